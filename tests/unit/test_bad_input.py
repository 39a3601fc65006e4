"""Bad input is one clear sentence before anything expensive starts."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import megatron.training.training as training
import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_dllm import validation
from megatron_dllm.arguments import add_arguments, parse_arguments
from megatron_dllm.checkpoint import check_before_loading
from megatron_dllm.data.datasets import build_datasets
from tests.parallel.cases import TINY, write_chat, write_text

ROOT = Path(__file__).parents[2]

TE_FP8 = "--transformer-impl transformer_engine --bf16 --fp8-format hybrid"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {"chat": write_chat(folder), "text": write_text(folder), "folder": folder}


def test_every_refused_flag_exists():
    """A name that is no flag's would refuse nothing."""
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    assert set(validation._REFUSED) <= {action.dest for action in parser._actions}


@pytest.fixture
def refused(monkeypatch):
    """refused(argv, processes) -> the sentence with which the command line is refused."""

    def run(argv, processes=1):
        monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *map(str, argv)])
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("RANK", "0")
        try:
            with pytest.raises(ValueError) as error:
                args, tokenizer = parse_arguments()
                check_before_loading(args)
                build_datasets(args, tokenizer)
        finally:
            training.destroy_global_state()
        sentence = str(error.value)
        assert "\n" not in sentence and len(sentence) < 400
        return sentence

    return run


# flags -> (processes, what the sentence must say)
LAYOUTS = {
    "--tensor-model-parallel-size 2": (3, "3 process(es) cannot be laid out as TP 2 x PP 1 x CP 1 = 2"),
    "--tensor-model-parallel-size 3": (3, "--num-attention-heads 8 is not divisible by TP 3"),
    "--num-query-groups 3": (1, "--num-attention-heads 8 cannot share --num-query-groups 3"),
    "--kv-channels 7": (1, "a head of 7 channels cannot be rotated, which is done in pairs"),
    "--kv-channels 0": (1, "--kv-channels 0 is too small"),
    "--pipeline-model-parallel-size 3": (3, "--num-layers 4 is not divisible by PP 3"),
    "--context-parallel-size 4 --seq-length 60": (4, "must be a multiple of 8, for instance 56 or 64"),
    "--context-parallel-size 4 --tensor-model-parallel-size 2": (8, "use --cp-comm-type all_gather"),
    "--context-parallel-size 2 --cp-comm-type p2p": (2, "cannot carry a diffusion mask: use a2a or all_gather"),
    "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 62": (4, "multiple of 4, for instance 60 or 64"),
    "--sequence-parallel": (1, "needs TP > 1"),
    "--micro-batch-size 3": (1, "--global-batch-size 8 is not a multiple of --micro-batch-size 3"),
    "--pad-seq-len-divisible 48": (1, "--seq-length 64 cannot be split"),
    "--pad-seq-len-divisible 6 --context-parallel-size 2": (2, "must be a multiple of 4"),
    "--num-query-groups 1 --tensor-model-parallel-size 2 --context-parallel-size 2": (4, "leave 1 a rank"),
    "--num-experts 4 --expert-model-parallel-size 2": (1, "1 process(es) cannot be laid out as expert TP 1 x EP 2"),
    "--expert-model-parallel-size 2": (2, "needs a mixture of experts"),
    "--num-experts 4 --expert-model-parallel-size 3 --global-batch-size 12": (
        3,
        "--num-experts 4 is not divisible by EP 3",
    ),
    "--model-preset tiny-moe --tensor-model-parallel-size 2": (
        2,
        "under TP 2 with sequence parallelism only: add --seq",
    ),
    "--model-preset tiny-moe --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1": (2, "add --sequence-par"),
}
FLAGS = {
    "--seq-length 0": "--seq-length 0 is too small: it must be at least 1",
    "--tensor-model-parallel-size 0": "--tensor-model-parallel-size 0 is too small",
    "--micro-batch-size -2": "--micro-batch-size -2 is too small",
    "--pad-seq-len-divisible 0": "--pad-seq-len-divisible 0 is too small",
    "--dllm-verify-peers -1": "--dllm-verify-peers -1 is too small: it must be at least 0",
    "--dllm-attention-backend flex": "flex needs a GPU",
    "--dllm-attention-backend tiled --attention-dropout 0.1": "tiled has no dropout: use --attention-dropout 0",
    "--save /dev/null --save-interval 1": "--save /dev/null is not a folder",
    "--save /proc/run --save-interval 1": "--save /proc/run is not a folder that can be written to",
    "--bf16 --fp16": "Megatron refuses this combination of flags: assert not args.bf16",
    "--dllm-mode nosuch": "unknown --dllm-mode 'nosuch': choose one of",
    "--dllm-mode scdd --scdd-max-ratio 1": "--scdd-max-ratio 1.0 is out of range: give a number in [0, 1)",
    "--dllm-mode hybrid --ar-loss-alpha 0.3 --diffusion-loss-weight 0.5": "--ar-loss-alpha and --diffusion-loss-weight "
    "are one flag: give it once",
    "--dllm-mode scdd --scdd-timesteps 1": "--scdd-timesteps 1 is out of range: give 2 to 1000000",
    "--dllm-mode scdd --scdd-gamma-shape 3": "give --scdd-gamma-shape · (1 - --scdd-peak-time) at most 1",
    "--dllm-mode scdd --dllm-loss-normalization noise": "has no effect on --dllm-mode scdd",
    "--scdd-max-ratio 0.2": "--scdd-max-ratio belongs to --dllm-mode scdd, not mdlm",
    "--dllm-mode block_diffusion --dllm-pad-block-size 8": "only a turn's last canvas is filled with it",
    "--dllm-mode block_diffusion --dllm-loss-normalization noise": "has no effect on --dllm-mode block_diffusion",
    "--dllm-mode block_diffusion --dllm-mask-token-id 258": "--dllm-mask-token-id has no effect on --dllm-mode block",
    "--dllm-mode block_diffusion --block-diffusion-self-conditioning 0.5": "the model has no self-conditioning",
    "--dllm-mode block_diffusion --dllm-block-size 300": "no text of --seq-length 64 fills such a canvas",
    "--model-preset nosuch": "unknown --model-preset 'nosuch': choose one of diffusion-gemma-26b-a4b, ",
    "--calculate-per-token-loss": "--calculate-per-token-loss cannot be used",
    "--pretrained-checkpoint runs/a": "--pretrained-checkpoint cannot be used: use --load with --finetune",
    "--use-checkpoint-args": "--use-checkpoint-args cannot be used: give the model's flags again",
    "--window-size 8,0": "--window-size cannot be used",
    "--rotary-interleaved": "rotary embeddings rotate halves",
    "--rampup-batch-size 2 2 100": "--step-batch-size-schedule",
    "--dllm-cross-document-attention": "has no effect on chat data",
    "--dllm-eps 0": "--dllm-eps 0.0 is the smallest masking rate",
    "--position-embedding-type learned_absolute": "use rope",
    "--normalization LayerNorm": "needs --transformer-impl transformer_engine",
    "--transformer-impl transformer_engine": "--transformer-impl transformer_engine needs a GPU: use --transformer",
    "--fp8-format hybrid": "use --transformer-impl transformer_engine, or without a GPU --dllm-emulate-fp8",
    "--fp8-recipe mxfp8": "--fp8-recipe has no effect without --fp8-format",
    "--fp8-param-gather --dllm-emulate-fp8 mxfp8": "--fp8-param-gather has no effect without --fp8-format",
    "--fp8-format hybrid --transformer-impl transformer_engine": "is for models in bf16: add --bf16",
    f"{TE_FP8} --fp8-param-gather": "--fp8-param-gather needs --use-distributed-optimizer",
    f"{TE_FP8} --first-last-layers-bf16": "cannot be had with --fp8-recipe delayed",
    f"{TE_FP8} --fp8-recipe custom": "--fp8-recipe custom is not supported: use one of delayed, tensorwise,",
    f"{TE_FP8} --fp8-output-proj --fp8-recipe mxfp8": "--fp8-output-proj cannot be used: the head stays in bf16",
    f"{TE_FP8} --fp8-recipe blockwise --model-preset tiny-moe --moe-grouped-gemm": "needs --moe-router-padding-for-",
    "--fp8-format hybrid --dllm-emulate-fp8 mxfp8": "--dllm-emulate-fp8 is for layers without Transformer Engine",
    "--recompute-granularity selective --recompute-modules layernorm": "recomputes norms of Transformer Engine alone",
    "--lora-rank 129": "--lora-rank 129 is more than --hidden-size 128: give less",
    "--save runs/x --save-interval 2 --save-retain-interval 3": "give a multiple of that",
    "--verify-integrity": "--verify-integrity is about checkpoints: give --save or --load",
    "--dllm-emulate-fp8 blockwise --kv-channels 64 --seq-length 63": "a multiple of 128, for instance 128 or 256",
    "--fp4-format e2m1": "--fp4-format is not supported: use --fp8-format",
    "--dllm-emulate-fp8 mxfp8 --hidden-size 144": "multiplies in groups of 32, and --hidden-size is 144",
    "--dllm-emulate-fp8 mxfp8 --ffn-hidden-size 400": "groups of 32, and --ffn-hidden-size / TP is 400",
    "--dllm-emulate-fp8 mxfp8 --seq-length 72": "must be a multiple of 32, for instance 64 or 96",
    "--dllm-emulate-fp8 mxfp8 --pad-seq-len-divisible 48": "must be a multiple of 32 in this layout",
    "--vocab-size 200": "the tokenizer has 259 tokens but --vocab-size gives the embedding only 200 rows",
    "--dllm-mask-token-id 259": "outside the vocabulary of 259",
    "--dllm-mask-token-id -1": "outside the vocabulary of 259",
    "--dllm-mask-token-id 256": "is also the pad token",
    "--dllm-mask-token-id 257": "is also the eos token",
    "--tokenizer-type NullTokenizer --vocab-size 300": "the tokenizer has no mask token: give --dllm-mask-token-id",
    "--tokenizer-type SentencePieceTokenizer --tokenizer-model /no/such.model": "/no/such.model",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /no/such/folder": "/no/such/folder",
    "--chat-template /no/such.jinja": "/no/such.jinja",
    "--load /no/such/run": "/no/such/run holds no checkpoint",
    "--save /tmp/never": "--save needs --save-interval",
    "--data-path /also/text": "give one kind of training data",
    "--save-retain 2": "--save-retain keeps checkpoints of this run: give --save",
    "--save /tmp/never --save-interval 1 --save-retain 0": "--save-retain 0 is too small: it must be at least 1",
    "--async-save": "--async-save needs --save",
    "--save /tmp/never --save-interval 1 --async-save --async-strategy nvrx": "use mcore",
    "--dllm-skip-bad-steps -1": "--dllm-skip-bad-steps -1 is too small",
    "--dllm-skip-bad-steps 1 --no-check-for-nan-in-loss-and-grad": "has no effect with --no-check-for-nan",
    "--dllm-skip-bad-steps 1 --rerun-mode validate_results": "has no effect with --rerun-mode: remove one",
    "--dllm-skip-bad-steps 1 --fp16": "has no effect with fp16 and its loss scaling, which skips by itself",
    "--iterations-to-skip 0 5": "--iterations-to-skip counts iterations from 1",
    "--dllm-straggler-report 0.5": "--dllm-straggler-report 0.5 is out of range: give 1 or more",
    "--log-straggler": "use --dllm-straggler-report",
    "--heartbeat-file /no/such/folder/alive.json": "is not a file in a folder that can be written to",
    "--heartbeat-interval 5": "how often --heartbeat-file is written: give that too",
    "--hang-dump-seconds 0": "--hang-dump-seconds 0.0 is out of range: give more than 0",
}


def test_heads_of_no_whole_width():
    args = argparse.Namespace(hidden_size=64, num_attention_heads=12, group_query_attention=False, num_query_groups=1)
    args.kv_channels = None
    with pytest.raises(ValueError, match="--hidden-size 64 is not divisible by --num-attention-heads 12: say how wide"):
        validation._check_heads(args, 1)
    args.kv_channels = 8
    validation._check_heads(args, 1)


@pytest.mark.parametrize("flags", LAYOUTS)
def test_layout(refused, data, flags):
    processes, sentence = LAYOUTS[flags]
    assert sentence in refused([*TINY, "--sft-data-path", data["chat"], *flags.split()], processes)


@pytest.mark.parametrize("flags", FLAGS)
def test_flags(refused, data, flags):
    assert FLAGS[flags] in refused([*TINY, "--sft-data-path", data["chat"], *flags.split()])


def test_the_attention_of_cpus_on_a_gpu(refused, data, monkeypatch):
    monkeypatch.setattr(validation.torch.cuda, "is_available", lambda: True)
    argv = [*TINY, "--sft-data-path", data["chat"], "--dllm-attention-backend", "tiled"]
    assert "tiled is for CPUs: use flex, sdpa or auto" in refused(argv)


@pytest.mark.parametrize("flag", ("--sft-last-turn-only", "--dllm-padding supervise", "--pad-seq-len-divisible 8"))
def test_chat_flags_on_packed_text(refused, data, flag):
    assert "has no effect on packed text" in refused([*TINY, "--data-path", data["text"], *flag.split()])


def test_all_canvases_and_experts_of_a_dispatcher_for_one_length(refused, data):
    flags = "--dllm-mode block_diffusion --block-diffusion-canvases all --model-preset tiny-moe "
    flags += "--moe-token-dispatcher-type allgather --expert-model-parallel-size 2"
    sentence = refused([*TINY, "--data-path", data["text"], *flags.split()], 2)
    assert "all canvases, differ in length between ranks" in sentence


@pytest.mark.parametrize("missing", ("--seq-length", "--micro-batch-size", "--lr", "--train-iters"))
def test_missing_flags(refused, data, missing):
    argv = [*TINY, "--sft-data-path", data["chat"]]
    place = argv.index(missing)
    assert f"{missing} is missing" in refused(argv[:place] + argv[place + 2 :])


def test_no_data(refused):
    assert "give one kind of training data" in refused(TINY)


def test_data_files(refused, data, tmp_path):
    assert "no_such.jsonl" in refused([*TINY, "--sft-data-path", tmp_path / "no_such.jsonl"])
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "empty.jsonl" in refused([*TINY, "--sft-data-path", empty])
    broken = tmp_path / "broken.jsonl"
    good = Path(data["chat"]).read_text().splitlines()[:2]
    broken.write_text("\n".join([*good, '{"messages": [}']) + "\n")
    sentence = refused([*TINY, "--sft-data-path", broken])
    assert "broken.jsonl" in sentence and "3" in sentence
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].role if messages[0].role == 'system' else raise_exception('no system') }}")
    sentence = refused([*TINY, "--sft-data-path", data["chat"], "--chat-template", template])
    assert "chat.jsonl, line 1: The chat template rejects the conversation (no system)" in sentence
    assert "no_such_prefix" in refused([*TINY, "--data-path", tmp_path / "no_such_prefix"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    (
        ("--split 0,100,0", "leaves no document to train on"),
        ("--split 80,0,20", "gives documents to the test set and none to validation"),
    ),
)
def test_splits_that_leave_something_out(refused, data, flags, sentence):
    assert sentence in refused([*TINY, "--data-path", data["text"], *flags.split()])


def test_half_written_checkpoint(refused, data, tmp_path):
    run = tmp_path / "run"
    (run / "iter_0000005").mkdir(parents=True)
    (run / "iter_0000003").mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    argv = [*TINY, "--sft-data-path", data["chat"], "--load", run]
    sentence = refused(argv)
    assert "not a complete checkpoint" in sentence and "--ckpt-step 3" in sentence
    (run / "iter_0000005/.metadata").write_bytes(b"half")
    (run / "iter_0000005/metadata.json").write_text("{}")
    assert ".metadata is damaged" in refused(argv)
    (run / "iter_0000005/metadata.json").write_text('{"sharded')
    assert "metadata.json is damaged" in refused(argv)
    (run / "latest_checkpointed_iteration.txt").write_text("")
    assert "should hold an iteration number" in refused(argv)


def test_the_program_prints_one_sentence_and_exits_with_2(data, tmp_path):
    argv = [
        *TINY,
        "--sft-data-path",
        str(tmp_path / "missing.jsonl"),
        "--save",
        str(tmp_path / "run"),
        "--save-interval",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "pretrain_dllm.py", *argv],
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("pretrain_dllm.py: error:")]
    assert not (tmp_path / "run").exists()
