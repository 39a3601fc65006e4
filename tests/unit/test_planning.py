"""What a plan counts without running anything: pairs by the rule, layouts by the checks, and what it refuses."""

import json
import math
import re
import shlex
import subprocess
import sys

import pytest
import torch

from megatron_dllm.arguments import read_command_line
from megatron_dllm.metrics import throughput
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import BLOCK, CLEAN, DOCUMENT, NOISY, NUM_ATTRIBUTES, POSITION, STREAM
from megatron_dllm.planning import memory
from megatron_dllm.planning.command import own_words, plan_command
from megatron_dllm.planning.hardware import GPUS, recognise
from megatron_dllm.planning.rows import RULE, TARGET, TILE, WINDOW, count_pairs, count_rows, expected_rows, rules
from megatron_dllm.planning.search import default_batch
from tests.hf_models import make

TINY = (
    "--model-preset tiny --tokenizer-type ByteLevelTokenizer --data-path x --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 1"
).split()
MODES = {
    "mdlm": "--dllm-mode mdlm",
    "hybrid": "--dllm-mode hybrid --dllm-block-size 5",
    "bd3lm": "--dllm-mode bd3lm --dllm-block-size 7 --bd3lm-complementary-masks",
    "idlm": "--dllm-mode idlm",
    "scdd": "--dllm-mode scdd",
    "block_diffusion": "--dllm-mode block_diffusion --dllm-block-size 16",
    "gemma": "--dllm-mode block_diffusion --model-preset tiny-diffusion-gemma",
}


@pytest.fixture
def checked(monkeypatch, capsys):
    """checked(flags): arguments of a run, as the checks leave them."""

    def read(flags: str):
        words = [*TINY, *flags.split()]
        if "tiny-" in flags:
            words = words[2:]
        monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *words])
        args, _ = read_command_line()
        capsys.readouterr()
        return args

    return read


@pytest.fixture
def plan(monkeypatch, capsys):
    """plan(flags): what the tool prints."""

    def run(flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["plan.py"])
        return plan_command(shlex.split(flags))

    return run


# --- rows -------------------------------------------------------------------------------------------------------------


def naive_pairs(rule, attributes_QA, first=0) -> tuple[int, int]:
    """One pair after the other; tiles of the queries from `first` on."""
    Q = len(attributes_QA)
    seen, tiles = 0, set()
    for q in range(first, Q):
        for k in range(Q):
            if bool(rule(attributes_QA[q], attributes_QA[k])):
                seen += 1
                tiles.add(((q - first) // TILE, k // TILE))
    return seen, len(tiles)


@pytest.mark.parametrize("mode", MODES)
def test_pairs_are_those_that_the_rule_shows(checked, mode):
    """Of documents of 20 tokens in 48; the batch of a mode is exact, whatever its streams are."""
    args = checked(f"{MODES[mode]} --seq-length 48")
    rows = expected_rows(args, document=20)
    from megatron_dllm.noise import ValidationDraws
    from megatron_dllm.planning.rows import _text

    several = []
    for index in range(64):
        sample = get_mode(args.dllm_mode).corrupt(_text(args, 48, 20, 1.0, index), ValidationDraws(index), args)
        several.append(get_mode(args.dllm_mode).layout([sample], 48, args))
    assert rows.processed == several[0].tokens_BQ.shape[1] and rows.data == 48
    for name, term in several[0].terms.items():
        mean = sum(float((batch.terms[name].weights_BQ != 0).sum()) for batch in several) / len(several)
        assert rows.scored[name] == pytest.approx(mean) and term.weights_BQ.shape[1] == rows.processed
    for kind, rule in rules(args).items():
        exact = count_rows(several[0], args, 2**30, tiles=True)
        seen, tiles = naive_pairs(rule, several[0].attributes_BQA[0])
        assert exact.pairs[kind] == seen and tiles * TILE**2 >= exact.tiled[kind] >= seen
    assert set(rows.pairs) == ({RULE, WINDOW} if mode == "gemma" else {RULE})


def test_half_of_the_tokens_are_scored_where_masking_is_uniform(checked):
    rows = expected_rows(checked("--dllm-mode mdlm --seq-length 256"))
    assert rows.scored["dllm"] == pytest.approx(128, rel=0.02)
    answers = expected_rows(checked("--dllm-mode mdlm --seq-length 256"), answer=0.25)
    assert answers.scored["dllm"] == pytest.approx(32, rel=0.05)
    assert expected_rows(checked("--dllm-mode scdd --seq-length 256")).scored["dllm"] == 256
    hybrid = expected_rows(checked("--dllm-mode hybrid --seq-length 256"))
    assert hybrid.processed == 512 and hybrid.scored["ar"] == 255


@pytest.mark.parametrize("mode", ("hybrid", "idlm", "bd3lm", "mdlm"))
def test_sampled_pairs_are_close(mode):
    """Of an eighth of the queries, where documents have many lengths."""
    S = 1024
    draw = torch.Generator().manual_seed(3)
    document_S = (torch.rand(S, generator=draw) < 0.01).cumsum(0)
    start_S = torch.searchsorted(document_S, document_S)
    attributes = torch.zeros(1, 2 * S, NUM_ATTRIBUTES, dtype=torch.int32)
    for stream, part in ((NOISY, slice(0, S)), (CLEAN, slice(S, 2 * S))):
        attributes[0, part, STREAM], attributes[0, part, DOCUMENT] = stream, document_S.int()
        attributes[0, part, POSITION] = (torch.arange(S) - start_S).int()
        attributes[0, part, BLOCK] = (torch.arange(S) // 5).int()
    rule = get_mode(mode).visible
    exact, _ = count_pairs(rule, attributes, most=2**40)
    assert exact == float(rule(attributes[0][:, None], attributes[0][None]).sum())
    sampled, _ = count_pairs(rule, attributes, most=(2 * S) ** 2 // 8)
    assert sampled == pytest.approx(exact, rel=0.03) and sampled != exact
    _, tiles = count_pairs(rule, attributes, most=2**40, tiles=True)
    allowed = rule(attributes[0][:, None], attributes[0][None])
    assert tiles == float(allowed.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).any(3).any(1).sum()) * TILE**2


def test_two_passes_cost_their_share(checked):
    args = checked("--dllm-mode block_diffusion --model-preset tiny-diffusion-gemma --seq-length 64")
    assert args.block_diffusion_self_conditioning == 0.5
    rows = expected_rows(args)
    assert rows.first.samples == 0.5 and 16 <= rows.first.processed < 0.5 * rows.processed


# --- layouts and the command ------------------------------------------------------------------------------------------


def command_words(text: str, **values: str) -> list[str]:
    """The printed command as a shell would split it, without its launcher."""
    line = text[text.index("torchrun") :].replace("\\\n", " ")
    for name, value in values.items():
        line = line.replace(f'"${name}"', value)
    words = shlex.split(line)
    return words[words.index("pretrain_dllm.py") + 1 :]


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ("--dllm-mode mdlm --model-preset llada-8b --seq-length 4096", 16),
        ("--dllm-mode hybrid --model-preset qwen3-8b --seq-length 8192 --dllm-mask-token-id 200 --best 1", 64),
        ("--dllm-mode bd3lm --model-preset llada2-mini --seq-length 2048 --best 1", 32),
        (
            "--dllm-mode block_diffusion --model-preset diffusion-gemma-26b-a4b --seq-length 4096 --gpu b200 --best 1",
            16,
        ),
    ],
)
def test_the_printed_command_passes_all_checks(plan, monkeypatch, capsys, tmp_path, flags, gpus):
    """Those of a run, Megatron's included; and it has so many ranks."""
    text = plan(f"{flags} --gpus {gpus}")
    tokenizer, _ = make("qwen3", tmp_path)
    words = command_words(text, DATA="x", TOKENIZER=tokenizer)
    monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *words])
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    args, _ = read_command_line()
    assert args.world_size == gpus and args.bf16 and args.global_batch_size % args.data_parallel_size == 0
    first = text.split("layout  ")[1].splitlines()[1]
    sizes = dict(re.findall(r"(TP|PP|CP|EP|DP)(\d+)", first))
    assert args.tensor_model_parallel_size == int(sizes.get("TP", 1))
    assert args.pipeline_model_parallel_size == int(sizes.get("PP", 1))
    assert args.context_parallel_size == int(sizes.get("CP", 1))
    assert args.expert_model_parallel_size == int(sizes.get("EP", 1))
    assert args.data_parallel_size == int(sizes.get("DP", 1))


def test_json_says_the_same_in_numbers(plan):
    plans = json.loads(plan("--dllm-mode mdlm --model-preset llada-8b --seq-length 4096 --gpus 16 --json --best 3"))
    assert len(plans) == 3 and all(entry["fits"] for entry in plans)
    assert [entry["step_seconds"] for entry in plans] == sorted(entry["step_seconds"] for entry in plans)
    best = plans[0]
    assert best["parameters"] == pytest.approx(8.0156e9, rel=1e-4)  # the model card of LLaDA-8B: 8.02 B
    assert max(sum(parts.values()) for parts in best["memory_bytes"]) < best["gpu_memory_bytes"]
    assert sum(best["step_parts_seconds"].values()) == pytest.approx(best["step_seconds"], rel=1e-6)
    # 6 for each of the parameters that multiply, half of the head's, and 12·layers·width·pairs a token of attention
    table = 126464 * 4096
    expected = 6 * (best["parameters"] - 2 * table) + 6 * table / 2 + 12 * 32 * 4096 * 4096
    assert sum(best["flops_per_data_token"].values()) == pytest.approx(expected, rel=1e-3)


def test_nothing_else_is_on_standard_output(plan, capsys):
    """What presets and Megatron say of themselves would be no JSON."""
    flags = "--dllm-mode hybrid --model-preset nemotron-labs-diffusion-8b --seq-length 1024 --gpus 16 --json --best 1"
    json.loads(plan(f"{flags} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --micro-batch-size 1"))
    assert capsys.readouterr().out == ""


def test_a_given_layout_is_what_is_planned(plan):
    flags = (
        "--dllm-mode mdlm --model-preset llada-8b --seq-length 4096 --gpus 32 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --context-parallel-size 1 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --sequence-parallel --json"
    )
    plans = json.loads(plan(flags))
    assert {entry["layout"].replace(" VPP2", "").replace(" VPP4", "") for entry in plans} == {"TP4 PP2 DP4"}
    assert all("--tensor-model-parallel-size" not in entry["flags"] for entry in plans)
    assert plans[0]["command"].count("--tensor-model-parallel-size 4") == 1


def test_memory_falls_with_what_shares_it(plan):
    def total(more: str) -> dict:
        base = "--dllm-mode mdlm --model-preset llada-8b --seq-length 4096 --micro-batch-size 1 --gpu b200 --best 1"
        entry = json.loads(plan(f"{base} --json {more}"))[0]
        return max(entry["memory_bytes"], key=lambda parts: sum(parts.values()))

    fixed = "--pipeline-model-parallel-size 1 --context-parallel-size 1"
    one = total(f"--gpus 8 {fixed} --tensor-model-parallel-size 1")
    two = total(f"--gpus 16 {fixed} --tensor-model-parallel-size 2")
    eight = total(f"--gpus 64 {fixed} --tensor-model-parallel-size 1")
    assert two["weights"] == pytest.approx(one["weights"] / 2, rel=1e-3)
    assert two["optimizer"] == pytest.approx(one["optimizer"] / 2, rel=1e-3)
    assert eight["weights"] == one["weights"] and eight["optimizer"] == pytest.approx(one["optimizer"] / 8)
    assert one["weights"] == pytest.approx(2 * 8.0156e9, rel=1e-3) and one["gradients"] == 2 * one["weights"]


LLADA = "--dllm-mode mdlm --model-preset llada-8b"
SENTENCES = {
    f"{LLADA} --seq-length 4096": "--gpus is missing",
    f"{LLADA} --gpus 8": "--seq-length is missing",
    f"{LLADA} --seq-length 4096 --gpus 12": "no whole nodes of 8",
    f"{LLADA} --seq-length 4096 --gpus 0": "--gpus 0 is too small",
    f"{LLADA} --seq-length 4096 --gpus 1": r"the closest, one GPU .* GiB too many",
    f"{LLADA} --seq-length 4096 --gpus 8 --answer-share 0": "--answer-share 0.0 is no",
    f"{LLADA} --seq-length 4096 --gpus 8 --context-parallel-size 2 --cp-comm-type p2p": "cannot carry a diffusion mask",
    f"{LLADA} --seq-length 4096 --gpus 8 --tensor-model-parallel-size 3": "no layout of 8 GPU|cannot be laid out",
    f"{LLADA} --seq-length 4096 --gpus 8 --dllm-block-size 4": "has no effect on",
    f"{LLADA} --seq-length 4096 --gpus 8 --optimizer muon": "cannot be planned",
    f"{LLADA} --seq-length 4096 --gpus 8 --dllm-emulate-fp8 mxfp8": "--dllm-emulate-fp8 is not counted by a plan",
    f"{LLADA} --seq-length 4096 --gpus 24 --global-batch-size 1024": "size 1024 out evenly; try a multiple",
    f"{LLADA} --seq-length 4096 --gpus 8 --json --markdown": "are two forms",
    f"{LLADA} --seq-length 4096 --gpus 8 --peak-tflops 0": "--peak-tflops 0.0 is no speed",
    "--dllm-mode mdlm --model-preset tiny --seq-length 64 --gpus 8": "how large is the vocabulary",
}


@pytest.mark.parametrize(("length", "ranks"), [(4096, [8, 1024]), (4096, [24]), (8192, [7, 48]), (10**7, [16])])
def test_the_default_batch_is_shared_out_evenly(length, ranks):
    samples = default_batch(length, ranks)
    assert all(samples % each == 0 for each in ranks)
    assert samples * length < 2 * 2**22 or samples <= 2 * math.lcm(*ranks)
    assert samples == 1024 or ranks != [8, 1024]


@pytest.mark.parametrize("flags", SENTENCES)
def test_what_cannot_be_planned_is_said_in_a_sentence(plan, flags):
    with pytest.raises(ValueError, match=SENTENCES[flags]) as error:
        plan(flags)
    assert "\n" not in str(error.value)


def test_flags_of_the_tool_stay_out_of_the_command():
    argv = "--gpus 8 --seq-length 64 --json --gpu=h200 --best 3 --bf16".split()
    assert own_words(argv) == ["--seq-length", "64", "--bf16"]


def test_a_folder_and_a_draft_beside_its_target(plan, tmp_path):
    """Shapes come from config.json; a draft's target is frozen weights, and a part of the operations."""
    folder, model = make("qwen3", tmp_path)
    entry = json.loads(plan(f"--dllm-mode mdlm --hf-model {folder} --seq-length 64 --gpus 2 --json --best 1"))[0]
    table = model.get_input_embeddings().weight
    padding = 2 * (128 - len(table)) * table.shape[1]  # --make-vocab-size-divisible-by
    assert entry["parameters"] == sum(p.numel() for p in model.parameters()) + padding
    draft = f"--dllm-mode dflash --dflash-target {folder} --num-layers 1 --seq-length 64 --dllm-block-size 4"
    flags = f"{draft} --dflash-num-anchors 8 --gpus 2 --json --best 1 --make-vocab-size-divisible-by 1"
    entry = json.loads(plan(f"{flags} --tensor-model-parallel-size 1 --micro-batch-size 1"))[0]
    both = entry["parameters"] + sum(p.numel() for p in model.parameters())
    assert entry["memory_bytes"][0]["weights"] == 2 * both and set(entry["rows"]["pairs"]) == {RULE, TARGET}
    assert entry["rows"]["processed"] == 64 + 8 * 4 and entry["rows"]["context"] == 64
    assert entry["flops_per_data_token"]["target"] > 0


def test_documents_and_answers_are_as_long_as_it_is_told(plan):
    """Packed text sees its own document; of a chat only the answer is scored."""
    flags = "--dllm-mode mdlm --model-preset tiny --vocab-size 512 --seq-length 64 --gpus 1 --json --best 1"
    rows = lambda more: json.loads(plan(f"{flags} {more}"))[0]["rows"]
    one, four = rows(""), rows("--document-length 16")
    assert (one["pairs"][RULE], four["pairs"][RULE]) == (64**2, 4 * 16**2)
    assert rows("--answer-share 0.25")["scored"]["dllm"] == pytest.approx(one["scored"]["dllm"] / 4, rel=0.3)


def test_scaling_is_against_the_smallest_number_that_fits(plan):
    flags = "--dllm-mode mdlm --model-preset llada-8b --seq-length 4096 --micro-batch-size 1 --context-parallel-size 1"
    table = plan(f"{flags} --tensor-model-parallel-size 2 --gpus 2 8 64 --markdown").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert [line[0] for line in cells[2:]] == ["2", "8", "64"] and len({len(line) for line in cells}) == 1
    assert re.fullmatch(r"nothing fits: [\d.]+ GiB too many", cells[2][1])
    assert cells[3][-1] == "100%" and 80 <= int(cells[4][-1].rstrip("%")) <= 100


def test_making_a_block_mask_takes_so_much():
    """Measured in a process of its own, whose peak is that of the mask (getrusage would remember its parent's)."""
    code = (
        "import re, torch, megatron_dllm\n"
        "from megatron_dllm.models.attention import masks\n"
        "from megatron_dllm.modes import hybrid\n"
        "peak = lambda: 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read()).group(1))\n"
        "attributes = torch.zeros(1, 9216, 4, dtype=torch.int32)\n"
        "masks.block(hybrid.visible, attributes[:, :256].contiguous(), slice(None))\n"
        "before = peak()\n"
        "masks.block(hybrid.visible, attributes, slice(None))\n"
        "print(peak() - before)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert memory.PAIRS_AT_ONCE < 0.8 * 9216**2  # not all of them at once
    assert float(result.stdout.split()[-1]) == pytest.approx(memory.PAIRS_AT_ONCE * memory._RULE_BYTES, rel=0.1)


# --- what the log divides by ------------------------------------------------------------------------------------------


def test_gpus_are_known_by_their_names():
    assert recognise("NVIDIA H100 80GB HBM3") is GPUS["h100"] and recognise("NVIDIA H200") is GPUS["h200"]
    assert recognise("NVIDIA B200") is GPUS["b200"]
    for other in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB", "NVIDIA GB200"):
        assert recognise(other) is None


def test_throughput_is_flops_over_time_and_peak():
    class Args:
        world_size, peak_tflops, fp8 = 4, 989.0, None

    shown = throughput(flops=8e15, seconds=4.0, args=Args)
    assert shown == {"TFLOP/s per rank": 500.0, "MFU (%)": pytest.approx(100 * 500 / 989)}
    Args.peak_tflops = None
    assert throughput(8e15, 4.0, Args) == {"TFLOP/s per rank": 500.0} and throughput(0.0, 4.0, Args) == {}
