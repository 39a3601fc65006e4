"""Features of a target on disk: written once, read by every run that trains a draft beside it.

    header.json     what they were made of (`identity` of a run) and how they lie; written first. At the end
                    it gets hashes of the other files but features.bin, of which only the size is checked
    keys.npy        uint64 [U], sorted: a hash of each sample's tokens, positions and documents
    rows.npy        int64 [U, 2]: where a sample's tokens begin in features.bin, and how many they are
    features.bin    [tokens, F], raw, padding left out
    embedding.bin, head.bin     [V, D], raw; no head.bin if it is the embedding
    done.bin        while it is written: a byte for every micro-batch that is safely on disk

A sample is found by what it holds, not by when it is read: in every epoch, order, layout and batch. The folder has its
name when it is whole; until then it is called .part, and an interrupted writer goes on where it was.
"""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch

from megatron_dllm.display import whole_file
from megatron_dllm.models.hf import begin_part, check_new_folder, finish_part

FORMAT = 1
_SYNC_BYTES, _SYNC_SECONDS = 256 * 2**20, 30.0  # between two syncs: what an interrupted writer does again


def key(tokens_S: torch.Tensor, positions_S: torch.Tensor, documents_S: torch.Tensor) -> tuple[int, int]:
    """(64-bit hash, length) of a sample without its padding, which comes last."""
    n = int((documents_S >= 0).sum())
    h = hashlib.blake2b(digest_size=8)
    for tensor in (tokens_S, positions_S, documents_S):
        h.update(tensor[:n].to(torch.int64).contiguous().numpy().tobytes())
    return int.from_bytes(h.digest(), "little"), n


def read_header(path: str) -> dict:
    """Raises ValueError (one sentence) if `path` is no finished store."""
    file = os.path.join(path, "header.json")
    again = "run tools/cache_features.py with the flags of this run and --dflash-features"
    if not os.path.isfile(file):
        if os.path.isdir(path + ".part"):
            raise ValueError(
                f"--dflash-features {path} is unfinished: {again}, which goes on where it was interrupted."
            )
        raise ValueError(f"--dflash-features {path} holds no features: {again}, which writes them.")
    try:
        with open(file, encoding="utf-8") as text:
            header = json.load(text)
        if header["format"] != FORMAT:
            raise ValueError(
                f"--dflash-features {path} is of another version of this program: {again} of a new folder."
            )
        size, expected = os.path.getsize(os.path.join(path, "features.bin")), header["bytes"]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--dflash-features {path} is damaged ({error}): {again} of a new folder.") from error
    if size != expected:
        raise ValueError(f"--dflash-features {path} is damaged ({size} of {expected} bytes): {again} of a new folder.")
    return header


def verify(path: str) -> None:
    """ValueError (one sentence) for a finished store whose tables or places are not what was written."""
    for name, expected in read_header(path).get("hashes", {}).items():  # older ones have none
        file = os.path.join(path, name)
        if not os.path.isfile(file) or _hash(file) != expected:
            raise ValueError(
                f"--dflash-features {path} is damaged ({name} is not what was written): write a new folder with "
                "tools/cache_features.py."
            )


def _hash(file: str) -> str:
    with open(file, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


class Store:
    """Reads. Raises ValueError (one sentence) if there is nothing whole to read."""

    def __init__(self, path: str):
        self.path, self.header = path, read_header(path)
        self._keys, self._rows = (np.load(os.path.join(path, f"{name}.npy")) for name in ("keys", "rows"))
        self._dtype = getattr(torch, self.header["identity"]["precision"])
        self._features = self._map("features", self.header["width"])

    def _map(self, name: str, width: int) -> np.ndarray:
        """Bytes of a table, row by row."""
        data = np.memmap(os.path.join(self.path, f"{name}.bin"), dtype=np.uint8, mode="r")
        return data.reshape(-1, width * self._dtype.itemsize)

    def features(self, tokens_S: torch.Tensor, positions_S: torch.Tensor, documents_S: torch.Tensor) -> torch.Tensor:
        """[n, F] of the n tokens that are no padding. Raises ValueError (one sentence) for an unknown sample."""
        wanted, n = key(tokens_S, positions_S, documents_S)
        place = int(np.searchsorted(self._keys, np.uint64(wanted)))
        if place == len(self._keys) or int(self._keys[place]) != wanted or self._rows[place, 1] != n:
            raise ValueError(
                f"{self.path} has no features of a sample of this run ({n} tokens, {tokens_S[:4].tolist()} ...): its "
                "data or how they are read has changed, write the features anew with tools/cache_features.py."
            )
        start = int(self._rows[place, 0])
        return self._tensor(self._features[start : start + n])

    def table(self, name: str) -> torch.Tensor | None:
        """[V, D] of `embedding` or `head`; no head if it is the embedding."""
        if name == "head" and not os.path.isfile(os.path.join(self.path, "head.bin")):
            return None
        return self._tensor(self._map(name, self.header["hidden_size"]))

    def _tensor(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(rows)).view(self._dtype)


class Writer:
    """Writes a store, together with the other processes that are given the same arguments.

    header: without `bytes`; keys: of all samples, each once, and lengths; units: how many micro-batches there are;
    tables: 1 if the head is thought to be the embedding, else 2 (to say how much space is needed).
    Raises ValueError (one sentence) if the folder is in the way or does not fit.
    """

    def __init__(self, path: str, header: dict, keys: np.ndarray, lengths: np.ndarray, units: int, tables: int = 2):
        self.path, self._part = path, path + ".part"
        order = np.argsort(keys)
        ends = np.cumsum(lengths)
        self.keys = keys[order]
        self.rows = np.stack([ends - lengths, lengths], 1)[order]
        dtype = getattr(torch, header["identity"]["precision"])
        self._row_bytes = header["width"] * dtype.itemsize
        table_bytes = tables * header["vocab_size"] * header["hidden_size"] * dtype.itemsize
        self.header = header | dict(bytes=int(lengths.sum()) * self._row_bytes)
        self.total_bytes = self.header["bytes"] + table_bytes + self.keys.nbytes + self.rows.nbytes
        self._units = units
        self._pending: list[int] = []
        self._pending_bytes, self._synced = 0, time.monotonic()

    def is_finished(self) -> bool:
        """Whether all is there already. ValueError (one sentence) for what other flags or data have made."""
        if not os.path.isfile(os.path.join(self.path, "header.json")):
            return False
        found, own = _flat(read_header(self.path)), _flat(self.header)
        different = sorted(name for name in found | own if found.get(name, ...) != own.get(name, ...))
        if not different and not np.array_equal(np.load(os.path.join(self.path, "keys.npy")), self.keys):
            different = ["samples"]
        if different:
            raise ValueError(
                f"--dflash-features {self.path} was written with other flags or data ({', '.join(different)}): give "
                "the same again, or choose a new folder."
            )
        verify(self.path)
        return True

    def begins_anew(self) -> bool:
        """Whether nothing of an earlier attempt can be kept."""
        try:
            with open(os.path.join(self._part, "header.json"), encoding="utf-8") as file:
                same = _flat(json.load(file)) == _flat(self.header)
            same &= os.path.getsize(os.path.join(self._part, "done.bin")) == self._units
            same &= os.path.getsize(os.path.join(self._part, "features.bin")) == self.header["bytes"]
            return not same or not np.array_equal(np.load(os.path.join(self._part, "keys.npy")), self.keys)
        except (OSError, ValueError):
            return True

    def free_bytes(self) -> int:
        """Of the disk that it goes to, with what an earlier attempt has reserved there."""
        parent = Path(self.path).absolute().parent
        while not parent.exists():
            parent = parent.parent
        return shutil.disk_usage(parent).free + (0 if self.begins_anew() else self.header["bytes"])

    def prepare(self) -> None:
        """The first process: check that all fits, and reserve it."""
        if not self.begins_anew():
            return
        check_new_folder(self.path, self.total_bytes, flag="--dflash-features")
        begin_part(self.path)
        np.save(os.path.join(self._part, "keys.npy"), self.keys)
        np.save(os.path.join(self._part, "rows.npy"), self.rows)
        for name, size in (("features.bin", self.header["bytes"]), ("done.bin", self._units)):
            file = os.open(os.path.join(self._part, name), os.O_RDWR | os.O_CREAT, 0o644)
            try:
                os.posix_fallocate(file, 0, size)
            except OSError:  # a file system that cannot reserve
                os.ftruncate(file, size)
            os.close(file)
        Path(self._part, "header.json").write_text(
            json.dumps(self.header, indent=1), encoding="utf-8"
        )  # all else is there

    def open(self) -> set[int]:
        """Every process, after `prepare`. Returns the micro-batches that are done."""
        self._features, self._done = (
            os.open(os.path.join(self._part, name), os.O_RDWR) for name in ("features.bin", "done.bin")
        )
        return set(np.flatnonzero(np.fromfile(os.path.join(self._part, "done.bin"), np.uint8)).tolist())

    def write(self, unit: int, samples: list[tuple[int, torch.Tensor]]) -> None:
        """A micro-batch: the key of each sample, and its features [n, F] on the CPU."""
        for wanted, features_SF in samples:
            place = int(np.searchsorted(self.keys, np.uint64(wanted)))
            start, n = self.rows[place].tolist()
            if features_SF.shape[0] != n:
                raise RuntimeError(f"a sample of {n} tokens has features of {features_SF.shape[0]}.")
            self._pending_bytes += _write(self._features, features_SF, start * self._row_bytes)
        self._pending.append(unit)
        if self._pending_bytes >= _SYNC_BYTES or time.monotonic() - self._synced >= _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """What is written so far is on disk, and only then marked as done."""
        os.fdatasync(self._features)
        for unit in self._pending:
            os.pwrite(self._done, b"\1", unit)
        self._pending, self._pending_bytes, self._synced = [], 0, time.monotonic()

    def abandon(self) -> None:
        """Every process may call it, before anything is written: leave nothing behind."""
        os.close(self._features)
        os.close(self._done)
        shutil.rmtree(self._part, ignore_errors=True)

    def close(self) -> None:
        self.sync()
        os.close(self._features)
        os.close(self._done)

    def finish(self, embedding_VD: torch.Tensor, head_VD: torch.Tensor | None) -> None:
        """The first process, after all have closed: the two tables, then the folder gets its name."""
        for name, table in (("embedding", embedding_VD), ("head", head_VD)):
            if table is not None:
                file = os.open(os.path.join(self._part, f"{name}.bin"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                _write(file, table, 0)
                os.fsync(file)
                os.close(file)
        if not np.fromfile(os.path.join(self._part, "done.bin"), np.uint8).all():
            raise RuntimeError(f"some micro-batches of {self._part} were not written.")
        names = ("keys.npy", "rows.npy", "embedding.bin", "head.bin")
        files = {name: os.path.join(self._part, name) for name in names}
        hashes = {name: _hash(file) for name, file in files.items() if os.path.isfile(file)}
        with whole_file(os.path.join(self._part, "header.json")) as file:
            json.dump(self.header | dict(hashes=hashes), file, indent=1)
        os.remove(os.path.join(self._part, "done.bin"))
        finish_part(self.path)


def _flat(header: dict) -> dict:
    """A header as it is compared: as JSON has it, `identity` item by item, without names of files (samples have keys)
    and what comes at the end."""
    found = json.loads(json.dumps(header))
    left_out = ("identity", "hashes", "data")
    return {name: value for name, value in (found | found["identity"]).items() if name not in left_out}


def _write(file: int, tensor: torch.Tensor, offset: int) -> int:
    """All bytes of a CPU tensor; returns how many."""
    data = memoryview(tensor.contiguous().view(torch.uint8).flatten().numpy())
    done = 0
    while done < len(data):  # a single write may be cut at 2 GiB
        done += os.pwrite(file, data[done:], offset + done)
    return done
