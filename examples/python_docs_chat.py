"""Writes a small chat data set that every Python brings along: a question and an answer about each `help()` topic.

    python examples/python_docs_chat.py chat.jsonl

gives JSONL, {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]} a line, the answer being the first
paragraph of the topic.
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics


def write(path: Path) -> int:
    """Writes the conversations to `path`; their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for name, text in sorted(topics.items()):
            # the paragraph behind the underlined title
            paragraphs = [part for part in text.split("\n\n") if part.strip(" \n*=-~")]
            if len(paragraphs) < 2:
                continue
            messages = [
                {"role": "user", "content": f"What is {name}?"},
                {"role": "assistant", "content": " ".join(paragraphs[1].split())},
            ]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            written += 1
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/python_docs_chat.py OUTPUT.jsonl")
    print(f"{write(Path(sys.argv[1]))} conversations in {sys.argv[1]}")
