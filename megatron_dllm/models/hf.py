"""Hugging Face folders of safetensors, read and written a slice at a time.

Memory stays near one slice whatever the model's size: rows are read from their place in a file (a map of it would count
as memory, page by page), the writer lays out each file first and then writes rows where they belong, in any order.
Nothing of a folder is executed: only safetensors and JSON are read.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import stat
import struct
import sys
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open

from megatron_dllm.display import can_hold_files

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BLOCK_BYTES = 16 * 2**20  # of whole rows, where only some columns are wanted


def read_config(folder: str) -> dict:
    """config.json of a folder. Raises ValueError (one sentence) if there is none."""
    path = os.path.join(folder, "config.json")
    if not os.path.isdir(folder):
        raise ValueError(f"{folder} is not a folder: give a local Hugging Face model folder.")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): give a Hugging Face model folder with its config.json."
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no configuration: give a Hugging Face model folder with its config.json.")
    return config


class Folder:
    """The tensors of a Hugging Face folder. shapes, dtypes: by key, from the files' headers.

    readable: they are to be read here, so they must be of a precision that can be (dtypes has no others).
    Raises ValueError (one sentence) for a folder without safetensors, a missing or broken file, an index that does
    not fit its files or names one outside of the folder.
    """

    def __init__(self, path: str, readable: bool = True):
        self.path, self._readable = path, readable
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._place: dict[str, tuple[str, int]] = {}  # key -> (file, first byte)
        self._open: dict[str, object] = {}
        index = self._index()
        for name in sorted(set(index.values())) if index is not None else [SINGLE]:
            self._read_header(name, None if index is None else {key for key, file in index.items() if file == name})

    def _index(self) -> dict[str, str] | None:
        """key -> file; None for a folder of one file."""
        path = os.path.join(self.path, INDEX)
        if not os.path.isfile(path):
            if os.path.isfile(os.path.join(self.path, SINGLE)):
                return None
            pickles = sorted(name for name in os.listdir(self.path) if name.endswith((".bin", ".pt", ".pth")))
            if pickles:
                raise ValueError(
                    f"{self.path} holds pickled weights ({pickles[0]}), which can run code when they are read: convert "
                    "them once, where you trust them, with transformers' from_pretrained and save_pretrained."
                )
            raise ValueError(f"{self.path} holds no weights: {SINGLE} and {INDEX} are missing.")
        try:
            with open(path, encoding="utf-8") as file:
                index = json.load(file)["weight_map"]
            pairs = [(str(key), str(name)) for key, name in index.items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): download it again.") from error
        for _, name in pairs:
            if name != os.path.basename(name) or not name.endswith(".safetensors"):
                raise ValueError(f"{path} names {name!r}, which is no safetensors file of this folder: do not use it.")
        return dict(pairs)

    def _read_header(self, name: str, expected: set[str] | None) -> None:
        path = os.path.join(self.path, name)
        if not os.path.isfile(path):
            raise ValueError(f"{path} is missing: download the folder again.")
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    view = file.get_slice(key)
                    self.shapes[key] = tuple(view.get_shape())
                    if view.get_dtype() in _DTYPES:
                        self.dtypes[key] = _DTYPES[view.get_dtype()]
                    elif self._readable:
                        raise ValueError(
                            f"{key} in {path} is stored as {view.get_dtype()}, and only {', '.join(_DTYPES)} are read: "
                            "save the model in one of them first."
                        )
                present = set(file.keys())
            with open(path, "rb") as file:  # the header is in order, or safetensors would have refused it
                length = struct.unpack("<Q", file.read(8))[0]
                header = json.loads(file.read(length))
            self._place |= {key: (name, 8 + length + header[key]["data_offsets"][0]) for key in present}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}): download it again.") from error
        if expected is not None and (wrong := sorted(expected ^ present)):
            where = "is not in it" if wrong[0] in expected else "is not in the index"
            raise ValueError(f"{path} does not fit {INDEX} ({wrong[0]} {where}): download the folder again.")

    def read(self, key: str, start: int, stop: int, columns: slice = slice(None), index: int | None = None):
        """Rows start..stop (and some columns) of a tensor, or of its slice `index`: a tensor of its own memory."""
        shape, dtype = self.shapes[key], self.dtypes[key]
        name, offset = self._place[key]
        if index is not None:
            shape = shape[1:]
            offset += index * _nbytes(shape, dtype)
        if columns == slice(None):
            return self._rows(name, offset, start, (stop - start, *shape[1:]), dtype)
        block = max(1, _BLOCK_BYTES // _nbytes(shape[1:], dtype))
        parts = []
        for first in range(start, stop, block):
            rows = self._rows(name, offset, first, (min(block, stop - first), *shape[1:]), dtype)
            parts.append(rows[:, columns].contiguous())
        return torch.cat(parts)

    def _rows(self, name: str, offset: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in self._open:
            self._open[name] = open(os.path.join(self.path, name), "rb", buffering=0)  # noqa: SIM115 (while we live)
        rows = torch.empty(shape, dtype=dtype)
        place, data = offset + start * _nbytes(shape[1:], dtype), memoryview(rows.view(torch.uint8).flatten().numpy())
        done = 0
        while done < len(data):  # a single read may be cut at 2 GiB
            count = os.preadv(self._open[name].fileno(), [data[done:]], place + done)
            if count == 0:
                raise ValueError(f"{os.path.join(self.path, name)} has become shorter while it was read.")
            done += count
        return rows


class FolderWriter:
    """Writes tensors of known shapes into `path`, sharded, a few rows at a time.

    tensors: key -> (shape, dtype), in the order in which they shall lie. The folder appears under a temporary name
    until `finish`.
    """

    def __init__(self, path: str, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], max_shard_bytes: int):
        self.path = os.path.normpath(path)
        self.part = self.path + ".part"
        self._place: dict[str, tuple[str, int, int]] = {}  # key -> (file, first byte, bytes a row)
        self._layout: list[tuple[str, dict[str, dict], int]] = []
        self._files: dict[str, int] = {}
        self._written = 0
        self._tensors = tensors
        self.total_bytes = sum(_nbytes(*tensor) for tensor in tensors.values())
        shards: list[list[str]] = [[]]
        size = 0
        for key, tensor in tensors.items():
            if shards[-1] and size + _nbytes(*tensor) > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(key)
            size += _nbytes(*tensor)
        for number, keys in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._lay_out(name, keys)
        self.shards = dict(zip((name for name, _, _ in self._layout), shards, strict=True))

    def _lay_out(self, name: str, keys: list[str]) -> None:
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for key in keys:
            shape, dtype = self._tensors[key]
            end = offset + _nbytes(shape, dtype)
            header[key] = dict(dtype=_DTYPE_NAMES[dtype], shape=list(shape), data_offsets=[offset, end])
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for key in keys:
            shape, dtype = self._tensors[key]
            row = math.prod(shape[1:]) * dtype.itemsize
            self._place[key] = (name, 8 + len(text) + header[key]["data_offsets"][0], row)
        self._layout.append((name, text, 8 + len(text) + offset))

    def start(self) -> None:
        """Make the temporary folder, empty."""
        begin_part(self.path)

    def write(self, key: str, start: int, rows: torch.Tensor, index: int | None = None) -> None:
        """Put `rows` at row `start` of a tensor, or of its slice `index`."""
        name, offset, row_bytes = self._place[key]
        if name not in self._files:
            text, size = next((text, size) for file, text, size in self._layout if file == name)
            file = os.open(os.path.join(self.part, name), os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(file, size)
            os.pwrite(file, struct.pack("<Q", len(text)) + text, 0)
            self._files[name] = file
        shape, dtype = self._tensors[key]
        whole = shape if index is None else shape[1:]
        inside = start >= 0 and start + len(rows) <= whole[0] and (index is None or 0 <= index < shape[0])
        if not inside or rows.shape[1:] != whole[1:] or rows.dtype != dtype:
            raise ValueError(
                f"{key} is {dtype} {list(shape)}: {rows.dtype} {list(rows.shape)} at {start} is no part of it."
            )
        if index is not None:
            row_bytes //= shape[1]
            start += index * shape[1]
        data = memoryview(rows.contiguous().view(torch.uint8).flatten().numpy())
        done = 0
        while done < len(data):  # a single write may be cut at 2 GiB
            done += os.pwrite(self._files[name], data[done:], offset + start * row_bytes + done)
        self._written += done

    def close(self) -> None:
        """Everything of this process is on disk."""
        for file in self._files.values():
            os.fsync(file)
            os.close(file)
        self._files = {}

    def finish(self) -> None:
        """Write the index, give the folder its name. Raises RuntimeError if rows are missing."""
        if self._written != self.total_bytes:
            raise RuntimeError(f"{self._written} of {self.total_bytes} bytes of {self.path} were written.")
        if len(self._layout) > 1:
            weight_map = {key: name for key, (name, _, _) in self._place.items()}
            index = dict(metadata=dict(total_size=self.total_bytes), weight_map=weight_map)
            with open(os.path.join(self.part, INDEX), "w", encoding="utf-8") as file:
                json.dump(index, file, indent=2, sort_keys=True)
        finish_part(self.path)

    def abandon(self) -> None:
        """Leave nothing behind."""
        self.close()
        shutil.rmtree(self.part, ignore_errors=True)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


_OURS = ".unfinished"  # marks a folder as one that may be thrown away
_held: dict[str, IO] = {}  # markers of folders that this process is writing, locked


def begin_part(path: str) -> str:
    """An empty folder `path`.part, which `finish_part` will call `path`. What an interrupted run has left there is
    replaced; ValueError if it is something else, or another process is at work there."""
    part = path + ".part"
    if os.path.lexists(part) and not os.path.isfile(os.path.join(part, _OURS)):
        raise ValueError(f"{part} is in the way, and nothing that an interrupted conversion left: move it elsewhere.")
    _let_go(part)
    if os.path.isdir(part):
        with open(os.path.join(part, _OURS)) as marker:
            if not _hold(marker):
                raise ValueError(f"{part} is being written by another process: wait for it, or choose another folder.")
            shutil.rmtree(part)
    os.makedirs(part)
    _held[part] = open(os.path.join(part, _OURS), "w")  # noqa: SIM115 (closed when the folder is finished)
    _hold(_held[part])
    return part


def _let_go(part: str) -> None:
    if part in _held:
        _held.pop(part).close()


def _hold(marker: IO) -> bool:
    """Whether this process now holds the lock of an open file; True where files have no locks."""
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def finish_part(path: str) -> None:
    """Give the folder its name, and its files the mode of any new file: safetensors writes private ones."""
    part = path + ".part"
    marker = os.path.join(part, _OURS)
    mode = stat.S_IMODE(os.stat(marker).st_mode)
    for name in os.listdir(part):
        if os.path.isfile(file := os.path.join(part, name)):
            os.chmod(file, mode)
    os.remove(marker)
    os.rename(part, path)
    _let_go(part)


def check_new_folder(path: str, bytes_needed: int = 0, flag: str = "--save") -> None:
    """ValueError unless `path` can be made and hold so much: missing or an empty folder, its parent writable."""
    empty = os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)
    if os.path.lexists(path) and not empty:
        raise ValueError(f"{flag} {path} exists and is not an empty folder: choose a new one.")
    parent = Path(path).absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not can_hold_files(str(parent)):
        raise ValueError(f"{flag} {path} cannot be made: {parent} is not a writable folder.")
    if (free := shutil.disk_usage(parent).free) < bytes_needed:
        raise ValueError(
            f"{flag} {path} needs {bytes_needed / 1e9:.2f} GB, and {parent} has {free / 1e9:.2f} GB free: choose "
            "another disk."
        )


if sys.byteorder != "little":
    raise ImportError("safetensors files are little-endian, and this machine is not.")
