"""The conversion tool: bad values are one sentence, and nothing is left behind."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_dllm.arguments import read_command_line
from megatron_dllm.conversion import exporting, importing, torch_dist
from megatron_dllm.conversion.checking import Comparison
from megatron_dllm.conversion.flags import check_conversion
from megatron_dllm.models import recognise
from megatron_dllm.models.hf import Folder, FolderWriter, read_config
from tests.hf_models import make, write_tokenizer
from tests.one_process import once
from tests.parallel.cases import TINY

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("convert_checkpoint", ROOT / "tools/convert_checkpoint.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder, and a run imported from it."""
    folder = tmp_path_factory.mktemp("made")
    path, _ = make("qwen3", folder)
    run = str(folder / "run")
    imported(path, run)
    return Namespace(folder=path, run=run, config=read_config(path))


def imported(path: str, run: str) -> None:
    with once():
        importing.run(importing.plan(path), run)


def refused(call, *args, **options) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "size"), (("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1.5kb", 1500), ("7B", 7), ("123", 123))
)
def test_sizes(text, size):
    assert tool.shard_size(text) == size


EXPORT = ["export", "--load", "run", "--save", "new"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    (
        *(
            ([*EXPORT, f"--max-shard-size={size}"], "is no size: write it like 5GB")
            for size in ("0", "abc", "-1GB", "0.1B", "5 parsecs", "")
        ),
        ([*EXPORT, "--dtype", "int8"], "invalid choice: 'int8'"),
        ([*EXPORT, "--export-as", "gpt5"], "invalid choice: 'gpt5'"),
        ([*EXPORT, "--ckpt-step", "last"], "invalid int value"),
        (["import", "--hf-model", "x", "--save", "y", "--family", "gpt5"], "invalid choice: 'gpt5'"),
        (["import", "--hf-model", "x"], "--save"),
        (["check", "--hf-model", "x", "--load", "y", "--tolerance", "nan"], "no tolerance"),
        (["check", "--hf-model", "x", "--load", "y", "--tolerance", "-1"], "no tolerance"),
        (["convert"], "invalid choice: 'convert'"),
        ([], "required"),
    ),
)
def test_flags(capsys, argv, sentence):
    with pytest.raises(SystemExit) as stop:
        tool.parse_args(argv)
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


# --- import ------------------------------------------------------------------------------------------


def test_import_refuses(made, tmp_path):
    assert "is not a folder" in refused(importing.plan, str(tmp_path / "none"))
    assert "config.json cannot be read" in refused(importing.plan, made.run)
    assert "unknown --dllm-mode 'nosuch'" in refused(importing.plan, made.folder, mode="nosuch")
    for token in (-1, 91):
        assert f"mask token id {token} is outside" in refused(importing.plan, made.folder, mask_token_id=token)
    assert "is also the eos token" in refused(importing.plan, made.folder, mask_token_id=1)
    assert "exists and is not an empty folder" in refused(importing.run, importing.plan(made.folder), made.run)


def test_import_of_another_family(made):
    for other in ("llama", "llada"):
        assert f"this family ({other}) does not implement" in refused(importing.plan, made.folder, family=other)
    assert "unknown model family 'gpt5'" in refused(importing.plan, made.folder, family="gpt5")


def test_a_failed_import_leaves_nothing(made, tmp_path, monkeypatch):
    planned = importing.plan(made.folder)
    calls = []

    def fail_in_the_middle(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("disk full")
        return torch.zeros(args[2] - args[1], *planned.source.mapping.megatron[args[0]][0][1:])

    monkeypatch.setattr(planned.source, "read", fail_in_the_middle)
    with once(), pytest.raises(BaseException, match="disk full"):
        importing.run(planned, str(tmp_path / "run"))
    assert len(calls) == 3 and not os.listdir(tmp_path)


def test_a_folder_that_does_not_say_what_it_is(made, tmp_path):
    """--family and a tokenizer by name stand in, for the import and for the export after it."""
    folder = tmp_path / "anonymous"
    folder.mkdir()
    shutil.copy(f"{made.folder}/model.safetensors", folder)
    config = {key: value for key, value in made.config.items() if key not in ("architectures", "model_type")}
    (folder / "config.json").write_text(json.dumps(config))
    assert "none of llama" in refused(importing.plan, str(folder))
    assert "holds no tokenizer" in refused(importing.plan, str(folder), "qwen3")
    planned = importing.plan(str(folder), "qwen3", mask_token_id=2, tokenizer_type="NullTokenizer")
    args = planned.args
    assert (args.dllm_family, args.vocab_size, args.tokenizer_type) == ("qwen3", 91, "NullTokenizer")
    with once():
        importing.run(planned, str(tmp_path / "run"))
    assert exporting.plan(str(tmp_path / "run")).family.name == "qwen3"


def test_an_interrupted_import_is_replaced(made, tmp_path):
    (tmp_path / "run.part" / "release").mkdir(parents=True)
    (tmp_path / "run.part" / "release" / "left.distcp").touch()
    with pytest.raises(ValueError, match="nothing that an interrupted conversion left"):
        imported(made.folder, str(tmp_path / "run"))  # somebody else's
    assert os.listdir(tmp_path) == ["run.part"]
    (tmp_path / "run.part" / ".unfinished").touch()
    imported(made.folder, str(tmp_path / "run") + "/")
    assert os.listdir(tmp_path) == ["run"]
    assert not (tmp_path / "run" / "release" / "left.distcp").exists()


# --- export ------------------------------------------------------------------------------------------


def test_export_refuses(made, tmp_path):
    assert "latest_checkpointed_iteration.txt is missing" in refused(exporting.plan, str(tmp_path))
    assert "there is no iter_0000007" in refused(exporting.plan, made.run, step=7)
    assert "latest_checkpointed_iteration.txt is missing" in refused(exporting.plan, made.folder)
    assert "unknown model family 'gpt5'" in refused(exporting.plan, made.run, family="gpt5")
    assert "qwen2 models" in refused(exporting.plan, made.run, family="qwen2")
    assert "is not a folder" in refused(exporting.plan, made.run, reference=str(tmp_path / "none"))
    other, _ = make("qwen3 tied", tmp_path)
    assert "give the reference that it was made from" in refused(exporting.plan, made.run, reference=other)
    with once():
        planned = exporting.plan(made.run)
        assert "exists and is not an empty folder" in refused(exporting.run, planned, other)


def test_damaged_surroundings_are_found_before_the_weights_are_written(tmp_path):
    path, _ = make("qwen3", tmp_path)
    imported(path, str(tmp_path / "run"))
    for text in ("{", "[1]"):
        Path(path, "generation_config.json").write_text(text)
        assert "generation_config.json is damaged" in refused(exporting.plan, str(tmp_path / "run"))


def test_a_failed_export_leaves_nothing(made, tmp_path, monkeypatch):
    write, count = FolderWriter.write, []

    def fail_in_the_middle(self, *args):
        count.append(args)
        if len(count) == 4:
            raise OSError("disk full")
        write(self, *args)

    monkeypatch.setattr(FolderWriter, "write", fail_in_the_middle)
    with once(), pytest.raises(OSError, match="disk full"):
        exporting.run(exporting.plan(made.run), str(tmp_path / "hf"))
    assert len(count) == 4 and not os.listdir(tmp_path)


def test_checkpoint_of_another_shape(made):
    """Its arguments and its tensors disagree: somebody has changed one of them."""
    planned = exporting.plan(made.run)
    missing = Namespace(key="decoder.layers.self_attention.nosuch.weight", name="x")
    sentence = refused(torch_dist.Reader, planned.folder, [missing])
    assert "holds no decoder.layers.self_attention.nosuch.weight" in sentence


@pytest.mark.parametrize("name", ("nemotron", "llada2 merged", "llama tied"))
def test_there_and_back(tmp_path, name):
    """Scaled rotary embeddings, experts in one tensor, a tied head: the tensors come back to the bit."""
    path, _ = make(name, tmp_path)
    imported(path, str(tmp_path / "run"))
    with once():
        exporting.run(exporting.plan(str(tmp_path / "run")), str(tmp_path / "back"), max_shard_bytes=20_000)
    theirs, ours = Folder(path), Folder(str(tmp_path / "back"))
    assert theirs.shapes == ours.shapes and theirs.dtypes == ours.dtypes
    for key, shape in theirs.shapes.items():
        assert torch.equal(ours.read(key, 0, shape[0]), theirs.read(key, 0, shape[0])), key


def test_the_reference_s_configuration_is_kept(tmp_path):
    """In its own notation, unchanged by reading it."""
    path, _ = make("llama llama3", tmp_path)
    old = read_config(path)
    rope = old.pop("rope_parameters")
    old |= dict(rope_theta=rope.pop("rope_theta"), rope_scaling=rope, torch_dtype=old.pop("dtype"))
    Path(path, "config.json").write_text(json.dumps(old))
    imported(path, str(tmp_path / "run"))
    with once():
        exporting.run(exporting.plan(str(tmp_path / "run")), str(tmp_path / "back"))
    assert read_config(str(tmp_path / "back")) == old | dict(mask_token_id=2)
    assert recognise(old).read(read_config(str(tmp_path / "back"))) == recognise(old).read(old)
    importing.plan(str(tmp_path / "back"))


# --- check -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", (0.2, float("nan"), float("inf")))
def test_other_logits(monkeypatch, difference):
    from megatron_dllm.conversion import checking

    result = Comparison(dict(full=1e-6, causal=difference, block=1e-6), 1.0, 9)
    monkeypatch.setattr(checking, "compare", lambda *_: result)
    options = tool.parse_args(["check", "--hf-model", "x", "--load", "y"])
    said = "the logits are not numbers" if difference != difference else "does not hold the weights of x"
    assert said in refused(tool.check, options)
    result.differences["causal"] = 1e-6
    tool.check(options)


# --- a training command ------------------------------------------------------------------------------


def training(monkeypatch, *argv):
    base = list(TINY)
    place = base.index("--model-preset")
    del base[place : place + 2]
    place = base.index("--tokenizer-type")
    del base[place : place + 2]
    monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *base, "--sft-data-path", "none", *map(str, argv)])
    monkeypatch.setenv("WORLD_SIZE", "1")
    return read_command_line()


def test_training_from_a_folder(made, monkeypatch):
    args, tokenizer = training(monkeypatch, "--hf-model", made.folder, "--init-from-hf")
    assert (args.num_layers, args.vocab_size, args.dllm_mask_token_id) == (4, 91, 2)
    assert tokenizer.vocab_size == 91
    # what Megatron's scripts say anyway, if it is true
    training(monkeypatch, "--hf-model", made.folder, "--init-from-hf", "--num-layers", 4, "--disable-bias-linear")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    (
        ("--model-preset tiny", "--model-preset and --hf-model both give the model's shape: give one of them"),
        ("--init-from-hf --hidden-size 32", "--hidden-size 32 does not fit"),
        ("--init-from-hf --rotary-base 5", "--init-from-hf reads (5000): remove the flag"),
        ("--init-from-hf --apply-layernorm-1p", "our norms are not zero-centred"),
        ("--dllm-family qwen", "unknown model family 'qwen'"),
        ("--seq-length 256", "--seq-length 256 is longer than --max-position-embeddings 128"),
        ("--vocab-size 80", "the tokenizer has 91 tokens but --vocab-size gives the embedding only 80 rows"),
        ("--save-hf-interval 5", "give --save and a multiple of --save-interval"),
        ("--save-hf-interval 5 --save x --save-interval 2", "give --save and a multiple of --save-interval"),
        ("--save-hf-interval 0 --save x --save-interval 2", "give --save and a multiple of --save-interval"),
    ),
)
def test_training_flags(made, monkeypatch, flags, sentence):
    assert sentence in refused(training, monkeypatch, "--hf-model", made.folder, *flags.split())


def test_init_without_a_folder():
    args = Namespace(dllm_rope_scaling=None, hf_model=None, dflash_target=None, init_from_hf=True)
    assert "--init-from-hf reads the weights of --hf-model DIR: give it" in refused(check_conversion, args, set())


# --- the program -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ("import", "export"))
def test_the_program_prints_one_sentence_and_exits_with_2(tmp_path, command):
    path = str(tmp_path / "hf")
    os.mkdir(path)
    write_tokenizer(path, 9)
    flag = "--hf-model" if command == "import" else "--load"
    before = sorted(os.listdir(path))
    done = subprocess.run(
        [sys.executable, ROOT / "tools/convert_checkpoint.py", command, flag, path, "--save", str(tmp_path / "new")],
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and not done.stdout
    lines = [line for line in done.stderr.splitlines() if "CUDA" not in line]
    assert len(lines) == 1 and lines[0].startswith("convert_checkpoint.py: error:"), done.stderr
    assert sorted(os.listdir(path)) == before and os.listdir(tmp_path) == ["hf"]
