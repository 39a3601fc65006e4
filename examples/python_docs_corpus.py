"""Writes a small real corpus that every Python brings along: the texts of its `help()` topics.

    python examples/python_docs_corpus.py docs.jsonl

gives about 0.5 MB of English prose and code in JSONL, {"text": ...}, a topic a document. Large enough to see
a tiny model learn, and there is nothing to download.
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics


def write(path: Path) -> int:
    """Writes the corpus to `path`; the number of documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for name in sorted(topics):
            file.write(json.dumps({"text": topics[name]}, ensure_ascii=False) + "\n")
    return len(topics)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/python_docs_corpus.py OUTPUT.jsonl")
    print(f"{write(Path(sys.argv[1]))} documents in {sys.argv[1]}")
