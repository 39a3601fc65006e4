"""Files of strangers run no code: checkpoints are unpickled by name, models of a hub bring no Python."""

import contextlib
import json
import os
import pickle
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dllm import fixes
from megatron_dllm.checkpoint import check_complete, saved_arguments
from megatron_dllm.conversion import exporting, importing
from megatron_dllm.conversion.defaults import folder_defaults
from megatron_dllm.data.tokenizer import build_tokenizer
from megatron_dllm.generation.load import saved_run
from tests.hf_models import make
from tests.one_process import once


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    path, _ = make("qwen3", folder)
    imported(path, str(folder / "run"))
    return folder / "run"


@pytest.fixture
def checkpoint(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run") / "release"


def imported(path: str, run: str) -> None:
    with once():
        importing.run(importing.plan(path), run)


def refused(call, *args) -> str:
    with pytest.raises(ValueError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_real_checkpoint_loads(checkpoint):
    check_complete(str(checkpoint))
    args = saved_arguments(str(checkpoint))
    assert args.num_layers == 4 and args.dllm_family == "qwen3" and args.dllm_mode == "mdlm"


def pickled(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls module.name(*arguments); a dotted name would reach into what the module imports."""
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    values = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in arguments)
    return b"\x80\x04" + words + b"\x93(" + values + b"tR."


@pytest.mark.parametrize(
    ("module", "name"),
    (
        ("os", "system"),
        ("posix", "system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch", "os.system"),
        ("torch", "hub.load"),
        ("pathlib", "os.system"),
        ("builtins", "eval"),
    ),
)
def test_index_that_would_run_code(checkpoint, tmp_path, module, name):
    mark = tmp_path / "mark"
    content = pickled(module, name, f"touch {mark}")
    (checkpoint / ".metadata").write_bytes(content)
    assert f"it names {module}.{name}, which no checkpoint needs" in refused(check_complete, str(checkpoint))
    assert not mark.exists()
    if "eval" not in name and "hub" not in name:
        pickle.loads(content)
        assert mark.exists(), "it would have"


def rewrite_common_state(checkpoint: Path, content: object) -> None:
    """Put another object in the place of the arguments, appended to the file that holds them."""
    with open(checkpoint / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    place = next(info for index, info in metadata.storage_data.items() if "common_state" in index.fqn)
    path = checkpoint / place.relative_path
    place.offset = path.stat().st_size
    with open(path, "ab") as file:
        torch.save(content, file)
    place.length = path.stat().st_size - place.offset
    with open(checkpoint / ".metadata", "wb") as file:
        pickle.dump(metadata, file)


@pytest.mark.parametrize("read", (saved_arguments, saved_run, exporting.plan, load_common_state_dict))
def test_arguments_that_would_run_code(checkpoint, tmp_path, read):
    mark = tmp_path / "mark"
    rewrite_common_state(checkpoint, [dict(args=Evil(mark))])
    check_complete(str(checkpoint))  # its index is in order
    fixes.objects_run_no_code()  # as every program of ours does before it reads
    with pytest.raises((ValueError, CheckpointException)) as error:
        read(str(checkpoint))
    assert not mark.exists()
    if read is not load_common_state_dict:  # Megatron's own
        assert isinstance(error.value, ValueError) and "not trusted" in str(error.value)


def test_arguments_that_are_none(checkpoint):
    rewrite_common_state(checkpoint, [dict(iteration=3)])
    assert "holds no arguments" in refused(saved_arguments, str(checkpoint))
    rewrite_common_state(checkpoint, [dict(args=Namespace(seed=1))])
    assert "its arguments name no --dllm-mode" in refused(saved_run, str(checkpoint))


def test_a_folder_with_code(tmp_path):
    """auto_map names classes of files in the folder; transformers would import them if it were allowed to."""
    path, _ = make("dream", tmp_path)
    mark = tmp_path / "mark"
    for name in ("evil", "tokenization_evil", "configuration_evil"):
        Path(path, f"{name}.py").write_text(
            f"open({str(mark)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast, Qwen2Config\n"
            "class Config(Qwen2Config):\n    pass\nclass Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
        )
    for file, auto_map in (
        ("config.json", dict(AutoConfig="configuration_evil.Config", AutoModel="evil.Model")),
        ("tokenizer_config.json", dict(AutoTokenizer=["tokenization_evil.Tokenizer", None])),
    ):
        config = json.loads(Path(path, file).read_text()) | dict(auto_map=auto_map)
        config.pop("tokenizer_class", None)
        Path(path, file).write_text(json.dumps(config))
    defaults = folder_defaults(path)
    assert "allow it with --trust-remote-code" in refused(importing.plan, path)
    assert "allow it with --trust-remote-code" in refused(build_tokenizer, Namespace(**defaults))
    assert not mark.exists()
    with contextlib.suppress(ValueError):  # the code is no tokenizer
        build_tokenizer(Namespace(**defaults, trust_remote_code=True))
    assert mark.exists(), "only --trust-remote-code runs it"
