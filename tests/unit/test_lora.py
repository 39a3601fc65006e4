"""The flags of LoRA and what is refused; which rows of a fused layer belong to which of PEFT's modules; initial A."""

import math
import sys
from argparse import Namespace

import megatron.training.training as training
import pytest
import torch

from megatron_dllm.arguments import parse_arguments
from megatron_dllm.conversion import adapters
from megatron_dllm.models import lora
from megatron_dllm.models.init import draw_adapters
from megatron_dllm.models.lora_flags import check_adapters, check_lora, described
from megatron_dllm.models.qwen3 import QWEN3
from megatron_dllm.models.weights import Interleaved, Mapping, Stacked
from tests.one_process import MOE, one_process, small_config, small_model
from tests.parallel.cases import TINY, write_chat

LORA, GEMMA = "--lora-rank 4", "--dllm-mode block_diffusion --model-preset tiny-diffusion-gemma"
BIASED = "--model-preset tiny-moe --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
REFUSED = {
    "--lora-alpha 8": "--lora-alpha has no effect without --lora-rank: give both.",
    "--lora-targets q_proj": "--lora-targets has no effect without --lora-rank",
    "--lora-rank 0": "--lora-rank 0 is too small: it must be at least 1.",
    f"{LORA} --lora-alpha 0": "--lora-alpha 0.0 must be greater than 0.",
    f"{LORA} --lora-alpha nan": "--lora-alpha nan must be greater than 0.",
    f"{LORA} --lora-dropout 1": "--lora-dropout 1.0 must be at least 0 and less than 1.",
    f"{LORA} --lora-targets q_proj,gate": "--lora-targets gate is no layer of this model: choose from q_proj, k_proj, "
    "v_proj, o_proj, gate_proj, up_proj, down_proj, Megatron's linear_qkv, linear_proj, linear_fc1, linear_fc2, or all",
    f"{LORA} --lora-targets ,": "--lora-targets names no layer: choose from q_proj",
    f"{LORA} --no-swiglu --lora-targets gate_proj": "gate_proj is no layer of this model: choose from q_proj, k_proj, "
    "v_proj, o_proj, up_proj, down_proj, Megatron's",
    f"{LORA} {GEMMA} --dllm-train-router": "--dllm-train-router trains a part of the weights that --lora-rank freezes",
    f"{LORA} {BIASED}": "set it to 0",
}


@pytest.fixture
def parsed(monkeypatch, tmp_path):
    def parse(flags, processes=1):
        argv = [*TINY, "--sft-data-path", write_chat(tmp_path), *flags.split()]
        monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *argv])
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("RANK", "0")
        try:
            return parse_arguments()[0]
        finally:
            training.destroy_global_state()

    return parse


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(parsed, flags):
    with pytest.raises(ValueError) as error:
        parsed(flags)
    assert REFUSED[flags] in str(error.value) and "\n" not in str(error.value)


def test_drafts_have_none():
    args = Namespace(lora_rank=4, lora_alpha=8.0, lora_dropout=0.0, dllm_mode="dflash")
    with pytest.raises(ValueError, match="--lora-rank is for whole models"):
        check_lora(args, {"lora_rank"})


@pytest.mark.parametrize(
    ("of_transformer_engine", "named"),
    [
        (dict(fp8_param_gather=True), "--fp8-param-gather is for weights that are trained"),
        (dict(use_transformer_engine_op_fuser=True), "--use-transformer-engine-op-fuser leaves no layers to adapt"),
        (dict(moe_grouped_gemm=True), "--moe-grouped-gemm makes all experts one layer"),
    ],
)
def test_transformer_engines_layers_that_cannot_have_any(parsed, of_transformer_engine, named):
    args = parsed(f"{LORA} --model-preset tiny-moe")  # a command with Transformer Engine is refused without a GPU
    args.transformer_impl, args.lora_targets = "transformer_engine", [lora.ALL]
    check_lora(args, set())
    args.__dict__ |= of_transformer_engine | dict(lora_targets=[lora.ALL])
    with pytest.raises(ValueError, match=named):
        check_lora(args, set())
    if "moe_grouped_gemm" in of_transformer_engine:
        args.lora_targets = ["linear_qkv"]
        check_lora(args, set())


def test_dropout_of_experts_that_are_cut(parsed):
    flags = f"{LORA} --lora-dropout 0.1 --model-preset tiny-moe --tensor-model-parallel-size 2 --sequence-parallel"
    with pytest.raises(ValueError, match="use --expert-tensor-parallel-size 1, or --lora-dropout 0"):
        parsed(flags, 2)
    assert parsed(f"{flags} --expert-tensor-parallel-size 1", 2).lora_dropout == 0.1
    assert parsed(f"{flags} --lora-targets linear_qkv", 2).lora_targets == ["q_proj", "k_proj", "v_proj"]


@pytest.mark.parametrize(
    ("flags", "targets"),
    (
        ("", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("--lora-targets all-linear q_proj", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("--lora-targets v_proj,q_proj", "q_proj v_proj"),
        ("--lora-targets down_proj linear_fc1,up_proj", "gate_proj up_proj down_proj"),
        ("--no-swiglu --lora-targets linear_fc1", "up_proj"),
    ),
)
def test_targets(parsed, flags, targets):
    args = parsed(f"{LORA} {flags}")
    assert args.lora_targets == targets.split() and args.lora_alpha == 4
    again = parsed(described(args) + (" --no-swiglu" if "--no-swiglu" in flags else ""))
    assert described(again) == described(args)


def test_a_run_that_knows_of_no_adapters_has_none():
    assert described(Namespace()) == "" and lora.targets_of("decoder.layers.0.mlp.linear_fc1.weight", Namespace()) == []
    args = Namespace(lora_rank=None, finetune=False)
    check_adapters(args, Namespace(), "runs/old")
    assert args.lora_anew is False


def shape(**changes) -> Namespace:
    config = dict(
        vocab_size=11, hidden_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=4,
        intermediate_size=10, rms_norm_eps=1e-6, max_position_embeddings=16,
    )  # fmt: skip
    return Namespace(**QWEN3.read(config) | dict(lora_rank=2, lora_alpha=2.0) | changes)


@pytest.mark.parametrize("targets", (["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], ["v_proj", "up_proj"]))
def test_rows_belong_to_the_modules_that_the_folder_makes_of_them(targets):
    """By the table of the family: a row's part is the Hugging Face tensor that it comes from."""
    args = shape(lora_targets=targets)
    mapping, rules = Mapping(QWEN3.weights[0], args), QWEN3.weights[0]
    for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"):
        rule = rules["decoder.layers.{layer}." + name]
        names = (rule.query, rule.key, rule.value) if isinstance(rule, Interleaved) else (rule.first, rule.second)
        assert isinstance(rule, (Interleaved, Stacked))
        full = "decoder.layers.1." + name
        (rows, _), pieces = mapping.megatron[full]
        keys = [piece.key for piece in pieces for _ in range(piece.stop - piece.start)]
        wanted = [names.index(key.replace("layers.1.", "layers.{layer}.")) for key in keys]
        assert lora.part_of_rows(full, rows, args).tolist() == wanted
        chosen = [part for part, key in enumerate(names) if any(target in key for target in targets)]
        assert lora.targets_of(full, args) == chosen
        assert lora.choices(full, rows, args).tolist() == [[float(part == t) for t in chosen] for part in wanted]


def test_peft_is_told_of_just_the_modules_that_have_adapters():
    keys = [f"model.blocks.{layer}.{name}.weight" for layer in range(2) for name in ("q_proj", "ff_out", "attn_norm")]
    adapted = {key.removesuffix(".weight") for key in keys if "norm" not in key}
    assert adapters._names(adapted, keys) == ["ff_out", "q_proj"]
    with_head = [*keys, "model.ff_out.weight"]
    assert adapters._names(adapted, with_head) == ["model.blocks.0.ff_out", "model.blocks.1.ff_out", "q_proj"]


def test_wide():
    B_Or, choices_OT = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[0.0, 1], [0, 0], [1, 0]])
    assert lora.wide(B_Or, choices_OT).tolist() == [[0, 0, 1, 2], [0, 0, 0, 0], [5, 6, 0, 0]]


@pytest.mark.parametrize("config", ({}, MOE))
def test_only_adapters_are_trained_and_drawn_as_peft_draws_them(config):
    args = Namespace(lora_rank=8, lora_alpha=16.0, lora_dropout=0.0, swiglu=True, num_attention_heads=4)
    args.lora_targets, args.dllm_architecture = lora.read_targets(["all-linear"], args), None
    args.group_query_attention = False
    with one_process():
        model = small_model(small_config(**config))
        heads, size = model.config.num_attention_heads, model.config.kv_channels
        args.num_attention_heads, args.kv_channels = heads, size
        before = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
        lora.add_adapters(model, args)
        draw_adapters(model, 1234)
        parameters = dict(model.named_parameters())
        assert {name for name, p in parameters.items() if p.requires_grad} == set(filter(lora.is_adapter, parameters))
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
        drawn = {name: p for name, p in parameters.items() if name.endswith("lora_A")}
        assert len(drawn) == 2 * (2 + 2 * (config.get("num_moe_experts") or 1))
        for name, matrix in drawn.items():
            bound = 1 / math.sqrt(matrix.shape[1])  # kaiming_uniform_(a=√5), as peft's reset_lora_parameters
            assert 0.9 * bound < matrix.abs().max() <= bound and abs(matrix.mean()) < 0.2 * bound, name
        assert len({tuple(matrix[0, :4].tolist()) for matrix in drawn.values()}) == len(drawn)
        assert not any(p.any() for name, p in parameters.items() if name.endswith("lora_B"))
