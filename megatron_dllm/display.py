"""What the tools show and write: text for a terminal, pages, files that appear whole or not at all."""

import contextlib
import os
import tempfile
import unicodedata
from collections.abc import Iterator
from html import escape
from typing import TextIO

_WHITE = {" ": "·", "\n": "⏎", "\t": "⇥"}
_STYLE = "body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }"


def visible_text(text: str) -> str:
    """White space as signs; what cannot be printed, bytes that are no character too, as escapes."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(_WHITE.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)


def width(text: str) -> int:
    """Columns of a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def html_page(title: str, style: str, body: str, head: str = "") -> str:
    """A page that needs nothing from elsewhere, as long as its parts do not. title: text; the others: HTML or CSS."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{head}<title>{escape(title)}</title>'
        f"<style>\n{_STYLE}\n{style.strip()}\n</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def can_hold_files(path: str) -> bool:
    """Whether `path` is a folder that can be written to, or can become one. It is tried out in the nearest folder that
    is there, as permissions do not tell all, for instance of /proc; nothing of it remains."""
    there = os.path.abspath(path)
    try:
        while not _exists(there):
            there = os.path.dirname(there)
        with tempfile.TemporaryDirectory(dir=there):
            return True
    except OSError:
        return False


def _exists(path: str) -> bool:
    """Raises OSError for what cannot be a path (a name that is too long)."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def check_writable(flag: str, path: str) -> None:
    """ValueError unless a file could be written at `path`, which `flag` named."""
    folder = os.path.dirname(os.path.abspath(path))
    refused = ValueError(f"{flag} {path or "''"} is not a file in a folder that can be written to: choose another.")
    if not path or os.path.isdir(path) or not os.path.isdir(folder):
        raise refused
    try:  # permissions do not tell all, for instance of /proc
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise refused from error


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[TextIO]:
    """A text file that gets its name when the block ends well; else nothing of it remains, and an older one stays."""
    partial = f"{path}.partial-{os.getpid()}"
    try:
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def say(text: str, out: TextIO) -> None:
    """Print at once; a reader that has seen enough (`| head`) is no error."""
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
