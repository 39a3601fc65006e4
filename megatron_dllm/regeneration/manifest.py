"""What decides the content of an output folder. A run that continues one must agree with it.

The server's address is not part of it, nor how fast it is asked: after a restart on another port, or with another
number of processes, the same folder goes on.
"""

import contextlib
import json
import os
from typing import Any

NAME = "manifest.json"
VERSION = 1


def manifest(options, digest: list[str], rows: int) -> dict[str, Any]:
    """options: the command's flags. digest: of the input's files. rows: in them."""
    return {
        "version": VERSION,
        "input_sha256": digest,
        "rows": rows,
        "model": options.model,
        "messages_column": options.messages_column,
        "shuffle_seed": options.shuffle_seed,
        "shard_size": options.shard_size,
        "turns": options.turns,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "seed": options.seed,
        "reasoning": options.reasoning,
        "extra_body": options.extra_body,
    }


def foreign(folder: str) -> str | None:
    """A file of the folder that no run of ours has written; hidden ones do not count."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return next((name for name in names if not name.startswith((".", NAME, "journal-", "shard-"))), None)


def agree(folder: str, wanted: dict[str, Any]) -> bool:
    """Is there a manifest? Raises ValueError, naming what differs, if it is not `wanted`."""
    path = os.path.join(folder, NAME)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise ValueError(f"{path} is not a manifest ({error}): choose another --output-dir.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a manifest: choose another --output-dir.")
    different = sorted(key for key in found | wanted if found.get(key, ...) != wanted.get(key, ...))
    if different:
        told = "; ".join(
            "the input's content" if key == "input_sha256" else f"{key} {found.get(key)!r}, now {wanted.get(key)!r}"
            for key in different
        )
        raise ValueError(
            f"{folder} was begun with other settings ({told}): give the same again, or choose another --output-dir."
        )
    return True


def write(folder: str, wanted: dict[str, Any]) -> None:
    """Under its name as a whole. Of several processes that start together one writes it, the others agree with it."""
    path = os.path.join(folder, NAME)
    partial = f"{path}.partial-{os.getpid()}"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(wanted, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)  # unlike a renaming, never over another's
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
    agree(folder, wanted)
