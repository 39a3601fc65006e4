"""Raw documents on disk, for the tools that tokenize them: JSONL, parquet and plain text; and where those write.

A document is read as (origin, record): origin is "FILE:LINE" or the like, for error messages; record is what
`parse` turns into texts. Parsing is apart from reading so that worker processes can share it.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence

Record = str | dict[str, str | None]

_TEXT_SUFFIXES = (".txt", ".md", ".rst")
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


def check_inputs(paths: Sequence[str]) -> None:
    """Raises ValueError if a file is missing, empty, or of an unknown kind."""
    known = (*_JSON_SUFFIXES, *_TEXT_SUFFIXES, ".parquet")
    for path in paths:
        if not os.path.isfile(path):
            what = "is a folder, give the files in it" if os.path.isdir(path) else "does not exist"
            raise ValueError(f"Input file {path} {what}; correct --input.")
        if os.path.getsize(path) == 0:
            raise ValueError(f"Input file {path} is empty; leave it out of --input.")
        if not path.endswith(known):
            raise ValueError(f"The kind of {path} is unknown; name it {', '.join('*' + s for s in known)}.")


def read_documents(
    paths: Sequence[str], keys: Sequence[str], txt_documents: str = "file"
) -> Iterator[tuple[str, Record]]:
    """(origin, record) of every document, in order.

    JSONL: a line each (blank lines are skipped). Parquet: a row each, of the columns `keys`. Text: a file
    each, or with `txt_documents` "block" each run of lines that blank lines part. Raises ValueError for
    unreadable files.
    """
    for path in paths:
        try:
            if path.endswith(".parquet"):
                yield from _read_parquet(path, keys)
            elif path.endswith(_TEXT_SUFFIXES):
                yield from _read_text(path, keys, txt_documents)
            else:
                with open(path, encoding="utf-8", newline="\n") as file:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield f"{path}:{number}", line
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error.reason}); convert it first.") from error


def parse(origin: str, record: Record, keys: Sequence[str]) -> list[str]:
    """The text under each key. Raises ValueError, naming `origin`, if the record is malformed."""
    if isinstance(record, str):
        try:
            record = json.loads(record)
        except (ValueError, RecursionError) as error:  # JSONDecodeError; or a number too long, brackets too deep
            reason = getattr(error, "msg", error)
            raise ValueError(f"{origin}: not valid JSON ({reason}); one object a line is needed.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{origin}: a JSON object is needed, this is a {type(record).__name__}.")
    for key in keys:
        if not isinstance(record.get(key), str):
            found = type(record[key]).__name__ if key in record else "nothing"
            raise ValueError(f"{origin}: key '{key}' must hold a string, there is {found}; check --json-keys.")
    return [record[key] for key in keys]


@contextlib.contextmanager
def output_folder(prefix: str) -> Iterator[None]:
    """Makes the folder that `prefix` is in; what was made is removed again if the body fails and left it empty.

    Raises ValueError if it cannot be made.
    """
    folder = os.path.dirname(prefix) or "."
    missing, path = [], folder
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Cannot make the folder {folder} ({error.strerror}); correct --output-prefix.") from error
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in missing:
                os.rmdir(path)
        raise


def first_line(error: Exception) -> str:
    """What a library says, without its further explanations and full stop: part of a sentence of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _read_parquet(path: str, keys: Sequence[str]) -> Iterator[tuple[str, Record]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a parquet file ({first_line(error)}); leave it out or replace it.") from error
    missing = [key for key in keys if key not in table.schema_arrow.names]
    if missing:
        raise ValueError(f"{path} has columns {table.schema_arrow.names} but no '{missing[0]}'; check --json-keys.")
    row = 0
    try:
        for batch in table.iter_batches(columns=list(keys)):
            for record in batch.to_pylist():
                row += 1
                yield f"{path}: row {row}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged behind row {row} ({first_line(error)}); replace it.") from error


def _read_text(path: str, keys: Sequence[str], txt_documents: str) -> Iterator[tuple[str, Record]]:
    if len(keys) != 1:
        raise ValueError(f"{path} is plain text and has no keys {list(keys)}; give a single --json-keys.")
    with open(path, encoding="utf-8", newline="") as file:
        if txt_documents == "file":
            yield path, {keys[0]: file.read()}
            return
        block, start = [], 1
        for number, line in enumerate(file, 1):
            if line.strip():
                start = start if block else number
                block.append(line)
            elif block:
                yield f"{path}:{start}", {keys[0]: "".join(block).rstrip("\r\n")}
                block = []
        if block:
            yield f"{path}:{start}", {keys[0]: "".join(block).rstrip("\r\n")}
