"""Features on disk: what is written is found again by what a sample holds; what is of another run, or unfinished, is
refused."""

import json
import os
import shutil
from argparse import Namespace

import numpy as np
import pytest
import torch

from megatron_dllm.models.targets import offline, store
from tests.hf_models import make

WIDTH, DEPTH, VOCABULARY = 6, 3, 7


def sample(n: int, seed: int, padding: int = 0):
    """tokens, positions, documents."""
    tokens = torch.randint(VOCABULARY, (n + padding,), generator=torch.Generator().manual_seed(seed))
    documents = torch.zeros(n + padding, dtype=torch.int32)
    documents[n:] = -1
    return tokens, torch.arange(n + padding), documents


def write(path, identity: dict, units=(0, 1, 2), dtype=torch.float32, finish=True):
    """Three micro-batches of one sample each; returns their features."""
    keys, lengths = zip(*(store.key(*sample(4 + i, i)) for i in range(3)), strict=True)
    header = dict(
        format=store.FORMAT,
        identity=identity | dict(precision=str(dtype).removeprefix("torch.")),
        width=WIDTH,
        hidden_size=DEPTH,
        vocab_size=VOCABULARY,
        samples=3,
        every_epoch=False,
    )
    writer = store.Writer(str(path), header, np.array(keys, np.uint64), np.array(lengths), units=3)
    writer.prepare()
    done = writer.open()
    features = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)).to(dtype) for n in lengths]
    for unit in set(units) - done:
        writer.write(unit, [(keys[unit], features[unit])])
    writer.close()
    if finish:
        writer.finish(torch.ones(VOCABULARY, DEPTH, dtype=dtype), None)
    return features, done


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_there_and_back(tmp_path, dtype):
    features, _ = write(tmp_path / "here", {}, dtype=dtype)
    found = store.Store(str(tmp_path / "here"))
    for i in (2, 0, 1):
        assert torch.equal(found.features(*sample(4 + i, i)), features[i])
        tokens, positions, documents = sample(4 + i, i)
        pad = lambda x, value: torch.nn.functional.pad(x, (0, 3), value=value)
        assert torch.equal(found.features(pad(tokens, 5), pad(positions, 0), pad(documents, -1)), features[i])
    assert torch.equal(found.table("embedding"), torch.ones(VOCABULARY, DEPTH, dtype=dtype))
    assert found.table("head") is None
    tokens, positions, documents = sample(5, 1)
    for other in ((tokens + 1, positions, documents), (tokens, positions + 1, documents), sample(5, 9)):
        with pytest.raises(ValueError, match="has no features of a sample of this run"):
            found.features(*other)


def test_an_unfinished_one(tmp_path):
    path = str(tmp_path / "here")
    write(path, {}, units=[1], finish=False)
    with pytest.raises(ValueError, match="is unfinished: run tools/cache_features.py"):
        store.Store(path)
    with pytest.raises(RuntimeError, match="were not written"):
        write(path, {}, units=[1])
    features, done = write(path, {})
    assert done == {1}
    assert torch.equal(store.Store(path).features(*sample(5, 1)), features[1])
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        write(path, {})


def test_an_attempt_with_other_flags_is_not_continued(tmp_path):
    write(tmp_path / "here", dict(seed=1), units=[1], finish=False)
    assert write(tmp_path / "here", dict(seed=2))[1] == set()


def test_damage(tmp_path):
    path = str(tmp_path / "here")
    write(path, {})
    with open(os.path.join(path, "features.bin"), "r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match=r"is damaged \(100 of 360 bytes\)"):
        store.Store(path)


def test_damage_inside(tmp_path):
    path = str(tmp_path / "here")
    write(path, {})
    store.verify(path)
    for name in ("embedding.bin", "keys.npy", "rows.npy"):
        whole = (tmp_path / "here" / name).read_bytes()
        (tmp_path / "here" / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"is damaged .{name} is not what was written"):
            store.verify(path)
        (tmp_path / "here" / name).write_bytes(whole)
    store.verify(path)
    os.remove(os.path.join(path, "embedding.bin"))
    with pytest.raises(ValueError, match=r"is damaged \(embedding.bin is not what was written\)"):
        store.verify(path)


CHANGES = dict(
    dflash_target_layers=([0, 1], r"another --dflash-target-layers \(\[1, 3\], not \[0, 1\]\)"),
    dflash_target_backend=("transformers", "another --dflash-target-backend"),
    seed=(5, r"another --seed \(1, not 5\)"),
    dllm_sequence_length=(24, r"another --seq-length \(32, not 24\)"),
    bf16=(True, r"another precision \(float32, not bfloat16\)"),
    dllm_padding=("supervise", "another --dllm-padding"),
    dllm_pad_block_size=(8, "another --dllm-pad-block-size"),
    dllm_cross_document_attention=(True, "another --dllm-cross-document-attention"),
    chat_template=("{{ messages }}", "another --chat-template:"),
    tokenizer_type=("ByteLevelTokenizer", "another tokenizer:"),
    train_iters=(2, "is of 3 samples, and this run reads 4: .* --num-samples 4"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    target = make("qwen3 tied", folder)[0]
    args = Namespace(
        dflash_target=target,
        dflash_target_backend="megatron",
        dflash_target_layers=[1, 3],
        dflash_features=str(folder / "here"),
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=target,
        chat_template=None,
        vocab_size=91,
        dllm_sequence_length=32,
        bf16=False,
        fp16=False,
        seed=1,
        dllm_cross_document_attention=False,
        dllm_padding="ignore",
        dllm_pad_block_size=None,
        train_samples=None,
        train_iters=1,
        global_batch_size=None,
        micro_batch_size=2,
        world_size=2,
        tensor_model_parallel_size=2,
        context_parallel_size=1,
    )
    write(args.dflash_features, offline.identity(args))
    return args


@pytest.mark.parametrize("name", CHANGES)
def test_of_another_run(run, name):
    offline.check(run)
    value, message = CHANGES[name]
    with pytest.raises(ValueError, match=message):
        offline.check(Namespace(**vars(run) | {name: value}))


def test_of_another_target(run, tmp_path):
    """Names, shapes and sizes are the same, as after training it further."""
    other = str(tmp_path / "other")
    shutil.copytree(run.dflash_target, other)
    assert offline.target_identity(other) == offline.target_identity(run.dflash_target)
    with open(os.path.join(other, "model.safetensors"), "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\1\2\3")
    with pytest.raises(ValueError, match="another --dflash-target:"):
        offline.check(Namespace(**vars(run) | dict(dflash_target=other)))


def test_of_another_tokenizer(run, tmp_path):
    other = str(tmp_path / "other")
    shutil.copytree(run.tokenizer_model, other)
    with open(os.path.join(other, "tokenizer.json")) as file:
        tokenizer = json.load(file)
    tokenizer["model"]["vocab"]["w90"], tokenizer["model"]["vocab"]["w89"] = 89, 90
    with open(os.path.join(other, "tokenizer.json"), "w") as file:
        json.dump(tokenizer, file)
    with pytest.raises(ValueError, match="another tokenizer:"):
        offline.check(Namespace(**vars(run) | dict(tokenizer_model=other)))
