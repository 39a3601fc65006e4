"""Folders of safetensors: what we write is what safetensors and transformers read, and what is broken is refused."""

import json
import os
import struct
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_dllm.models import hf
from megatron_dllm.models.hf import INDEX, SINGLE, Folder, FolderWriter, check_new_folder, read_config


def tensors():
    return {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5).bfloat16(), "c": torch.ones(2, 3, 2).half()}


@pytest.fixture
def single(tmp_path):
    save_file(tensors(), tmp_path / SINGLE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    save_file({key: tensors()[key] for key in "ab"}, tmp_path / "x-1.safetensors")
    save_file({"c": tensors()["c"]}, tmp_path / "x-2.safetensors")
    write_index(tmp_path, a="x-1.safetensors", b="x-1.safetensors", c="x-2.safetensors")
    return tmp_path


def write_index(folder, **weight_map):
    (folder / INDEX).write_text(json.dumps(dict(metadata=dict(total_size=1), weight_map=weight_map)))


def refused(call, *args) -> str:
    with pytest.raises(ValueError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- reading ------------------------------------------------------------------------------------------


def test_config(tmp_path):
    assert "is not a folder" in refused(read_config, tmp_path / "none")
    assert "config.json cannot be read" in refused(read_config, tmp_path)
    for text in ("{", "\xff", "", "[" * 100_000):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        assert "config.json cannot be read" in refused(read_config, tmp_path)
    for text in ("[]", "null", "1"):
        (tmp_path / "config.json").write_text(text)
        assert "holds no configuration" in refused(read_config, tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_config(tmp_path) == {"a": 1}


def assert_reads(path):
    folder = Folder(path)
    for key, tensor in tensors().items():
        assert folder.shapes[key] == tuple(tensor.shape) and folder.dtypes[key] == tensor.dtype
        assert torch.equal(folder.read(key, 0, len(tensor)), tensor)
    assert torch.equal(folder.read("a", 1, 3, slice(1, 2)), tensors()["a"][1:3, 1:2])
    assert torch.equal(folder.read("c", 1, 3, slice(0, 1), index=1), tensors()["c"][1, 1:3, :1])


def test_reads(single):
    assert_reads(single)


def test_reads_shards(sharded):
    assert_reads(sharded)


def test_reads_a_hub_cache(sharded, tmp_path_factory):
    """The cache links every file of a snapshot to a blob elsewhere."""
    snapshot = tmp_path_factory.mktemp("hub") / "snapshot"
    snapshot.mkdir()
    for name in os.listdir(sharded):
        os.symlink(os.path.relpath(sharded / name, snapshot), snapshot / name)
    assert_reads(snapshot)


def test_reads_columns_row_by_row(sharded, monkeypatch):
    monkeypatch.setattr(hf, "_BLOCK_BYTES", 1)
    assert_reads(sharded)


def test_file_that_is_cut_while_it_is_read(sharded):
    folder = Folder(sharded)
    os.truncate(sharded / "x-2.safetensors", 90)
    assert "has become shorter" in refused(folder.read, "c", 0, 2)


def test_no_weights(tmp_path):
    assert "holds no weights" in refused(Folder, tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    sentence = refused(Folder, tmp_path)
    assert "pickled weights (pytorch_model.bin)" in sentence and "save_pretrained" in sentence


def test_missing_shard(sharded):
    os.remove(sharded / "x-2.safetensors")
    assert "x-2.safetensors is missing" in refused(Folder, sharded)


@pytest.mark.parametrize("keep", (0, 4, 20, -1))
def test_truncated_file(sharded, keep):
    path = sharded / "x-2.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "x-2.safetensors is damaged" in refused(Folder, sharded)


@pytest.mark.parametrize(
    "content",
    (
        b"\x08" + b"\0" * 7 + b"garbage!",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        b"<html>not found</html>",
    ),
)
def test_garbage_for_a_header(single, content):
    (single / SINGLE).write_bytes(content)
    assert "is damaged" in refused(Folder, single)


def test_damaged_index(sharded):
    for text in ("{", "[]", '{"weight_map": []}', '{"weights": {}}', "[" * 100_000):
        (sharded / INDEX).write_text(text)
        assert f"{INDEX} is damaged" in refused(Folder, sharded)


@pytest.mark.parametrize("name", ("../x-1.safetensors", "sub/x-1.safetensors", "/etc/passwd", "x.bin", "..", ""))
def test_index_that_leaves_the_folder(sharded, name):
    (sharded / "sub").mkdir()
    save_file(tensors(), sharded / "sub/x-1.safetensors")
    save_file(tensors(), sharded.parent / "x-1.safetensors")
    write_index(sharded, a=name)
    assert "no safetensors file of this folder" in refused(Folder, sharded)


def test_absolute_name_in_the_index(sharded):
    write_index(sharded, a=str(sharded / "x-1.safetensors"), b="x-1.safetensors")
    assert "no safetensors file of this folder" in refused(Folder, sharded)


def test_index_that_does_not_fit(sharded):
    files = dict(a="x-1.safetensors", b="x-1.safetensors", c="x-2.safetensors")
    write_index(sharded, **files, d="x-2.safetensors")
    assert "(d is not in it)" in refused(Folder, sharded)
    write_index(sharded, a="x-1.safetensors", c="x-2.safetensors")
    assert "(b is not in the index)" in refused(Folder, sharded)


@pytest.mark.parametrize("dtype", (torch.int8, torch.float8_e4m3fn, torch.float64, torch.int64))
def test_other_precisions_are_refused(tmp_path, dtype):
    save_file({"a": torch.zeros(2, 2).to(dtype)}, tmp_path / SINGLE)
    sentence = refused(Folder, tmp_path)
    assert sentence.startswith("a in ") and "only F32, F16, BF16 are read" in sentence


# --- writing ------------------------------------------------------------------------------------------

SHAPES = st.one_of(
    st.tuples(st.integers(1, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 5)),
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5)),
)
DTYPES = st.sampled_from((torch.float32, torch.float16, torch.bfloat16))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.text("abcd.é", min_size=1, max_size=6), st.tuples(SHAPES, DTYPES), min_size=1, max_size=6),
    st.integers(1, 400),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_safetensors_reads_what_is_written(tmp_path_factory, layout, limit, run, random):
    folder = tmp_path_factory.mktemp("out") / "hf"
    wanted = {key: torch.randn(shape).to(dtype) for key, (shape, dtype) in layout.items()}
    writer = FolderWriter(str(folder), layout, limit)
    writer.start()
    calls = []  # a few rows at a time, of whole tensors or of their slices, in any order
    for key, tensor in wanted.items():
        for index in [None] if tensor.dim() < 3 else range(len(tensor)):
            rows = tensor if index is None else tensor[index]
            calls += [(key, at, rows[at : at + run], index) for at in range(0, len(rows), run)]
    random.shuffle(calls)
    for call in calls:
        writer.write(*call)
    with patch.object(hf.os, "fsync"):  # slow, and nothing here reads the disk itself
        writer.close()
    assert not folder.exists()
    writer.finish()
    assert sorted(os.listdir(folder)) == sorted([*writer.shards, *([INDEX] if len(writer.shards) > 1 else [])])
    read = {}
    for name, keys in writer.shards.items():
        part = load_file(folder / name)
        assert set(part) == set(keys)
        size = sum(tensor.nbytes for tensor in part.values())
        assert size <= limit or len(keys) == 1
        with safe_open(folder / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
        read |= part
    assert set(read) == set(wanted)
    ours = Folder(str(folder))
    for key, tensor in wanted.items():
        assert read[key].dtype == tensor.dtype and torch.equal(read[key], tensor)
        assert ours.shapes[key] == tuple(tensor.shape) and torch.equal(ours.read(key, 0, len(tensor)), tensor)


def write_all(path, saved, limit):
    writer = FolderWriter(str(path), {key: (tuple(x.shape), x.dtype) for key, x in saved.items()}, limit)
    writer.start()
    for key, tensor in saved.items():
        writer.write(key, 0, tensor)
    writer.close()
    writer.finish()
    return writer


def test_transformers_reads_shards_and_lays_out_alike(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=4000)
    saved = {key: x.contiguous() for key, x in model.state_dict().items()}
    writer = write_all(tmp_path / "ours", saved, 4000)
    assert len(writer.shards) > 2
    config.save_pretrained(tmp_path / "ours")
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor)
    index, theirs = (json.loads((tmp_path / who / INDEX).read_text()) for who in ("ours", "theirs"))
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert set(index["weight_map"]) == set(theirs["weight_map"])
    count = len(writer.shards)
    assert sorted(set(index["weight_map"].values())) == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    pattern = set(theirs["weight_map"].values()).pop()
    assert len(pattern) == len(list(writer.shards)[0]), "transformers numbers its files with as many digits"


@pytest.mark.parametrize(
    ("start", "shape", "dtype", "index"),
    (
        (3, (2, 3), torch.float32, None),
        (-1, (1, 3), torch.float32, None),
        (0, (1, 2), torch.float32, None),
        (0, (1, 3), torch.float16, None),
        (0, (1, 3), torch.float32, 4),
    ),
)
def test_rows_that_do_not_belong_there(tmp_path, start, shape, dtype, index):
    """Written all the same, they would end up in the next tensor."""
    layout = {"a": ((4, 3) if index is None else (4, 1, 3), torch.float32), "b": ((9, 9), torch.float32)}
    writer = FolderWriter(str(tmp_path / "hf"), layout, 10**6)
    writer.start()
    assert "is no part of it" in refused(writer.write, "a", start, torch.zeros(shape, dtype=dtype), index)
    writer.abandon()


def test_interrupted_and_abandoned_writes(tmp_path):
    path = tmp_path / "hf"
    saved = tensors()
    layout = {key: (tuple(x.shape), x.dtype) for key, x in saved.items()}
    killed = FolderWriter(str(path), layout, 20)
    killed.start()
    killed.write("a", 0, saved["a"])
    assert os.listdir(tmp_path) == ["hf.part"]
    with pytest.raises(RuntimeError, match="48 of 82 bytes"):
        killed.finish()
    write_all(path, saved, 10**6)  # another layout: nothing of the first may stay
    assert os.listdir(tmp_path) == ["hf"] and os.listdir(path) == [SINGLE]
    abandoned = FolderWriter(str(tmp_path / "other"), layout, 20)
    abandoned.start()
    abandoned.write("a", 0, saved["a"])
    abandoned.abandon()
    assert os.listdir(tmp_path) == ["hf"]


def test_a_folder_that_another_process_writes(tmp_path):
    """It is not taken from under its hands, and is free again when that process is gone."""
    path = str(tmp_path / "hf")
    code = f"from megatron_dllm.models.hf import begin_part; begin_part({path!r}); print('there', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "there\n"
        assert "hf.part is being written by another process: wait" in refused(hf.begin_part, path)
        assert os.listdir(tmp_path / "hf.part") == [".unfinished"]
        other.kill()
    for _ in range(2):  # and one's own, abandoned
        assert os.listdir(hf.begin_part(path)) == [".unfinished"]
    hf.finish_part(path)


def test_all_of_a_folder_can_be_read_by_others(tmp_path):
    """Also what a library has written for its owner alone."""
    before = os.umask(0o027)
    try:
        part = hf.begin_part(str(tmp_path / "hf"))
        save_file(tensors(), os.path.join(part, SINGLE))
        hf.finish_part(str(tmp_path / "hf"))
    finally:
        os.umask(before)
    assert os.stat(tmp_path / "hf" / SINGLE).st_mode & 0o777 == 0o640


def test_new_folder(tmp_path):
    check_new_folder(str(tmp_path / "new" / "deeper"))
    (tmp_path / "empty").mkdir()
    check_new_folder(str(tmp_path / "empty"))
    assert (tmp_path / "empty").is_dir(), "a check changes nothing"
    write_all(tmp_path / "empty", tensors(), 10**6)
    assert "exists and is not an empty folder" in refused(check_new_folder, str(tmp_path / "empty"))
    (tmp_path / "file").touch()
    assert "exists" in refused(check_new_folder, str(tmp_path / "file"))
    assert "not a writable folder" in refused(check_new_folder, str(tmp_path / "file" / "below"))
    (tmp_path / "void").mkdir()
    os.symlink(tmp_path / "void", tmp_path / "link")  # a folder cannot be renamed onto it
    assert "exists" in refused(check_new_folder, str(tmp_path / "link"))
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    assert "exists" in refused(check_new_folder, str(tmp_path / "dangling"))
    assert "GB free" in refused(check_new_folder, str(tmp_path / "new"), 10**18)
