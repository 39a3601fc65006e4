"""Rounding to FP8 as the recipes describe it, which products it is of, and padding that does not disturb it."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.enums import Fp8Recipe
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_dllm import fixes
from megatron_dllm.models.fp8_emulation import E4M3, E5M2, emulate_fp8, round_to_fp8
from megatron_dllm.models.targets import megatron
from megatron_dllm.precision import FP8_ROWS
from tests.one_process import MOE, attributes_of, one_process, packed, randomize, small_config, small_model

LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def nearest(value: float, dtype: torch.dtype) -> float:
    """Of all numbers of the format, the nearest (of two, the one whose last bit is 0); beyond them, the largest."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = [(number.item(), code) for code, number in enumerate(codes) if number.isfinite()]
    return min(finite, key=lambda pair: (abs(pair[0] - value), pair[1] % 2))[0]


def reference(x: torch.Tensor, recipe: str, dtype: torch.dtype, weight: bool) -> torch.Tensor:
    """Number by number, in double precision."""
    rows, columns = x.shape
    groups = {}
    for i in range(rows):
        for j in range(columns):
            block = {
                "tensorwise": 0,
                "mxfp8": (i, j // 32),
                "blockwise": (i // 128 if weight else i, j // 128),
            }[recipe]
            groups.setdefault(block, []).append((i, j))
    out = torch.zeros(rows, columns, dtype=torch.float64)
    for places in groups.values():
        largest = max(abs(x[place].item()) for place in places)
        if largest == 0:
            continue
        scale = LARGEST[dtype] / largest
        if recipe == "mxfp8":
            scale = 2.0 ** math.floor(math.log2(scale))
        for place in places:
            out[place] = nearest(x[place].item() * scale, dtype) / scale
    return out


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("shape", "weight"), [((3, 70), False), ((2, 150), False), ((140, 5), True)])
def test_rounding_number_by_number(recipe, dtype, shape, weight):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, shape[1])
    x[0, :3] = 0
    mine = round_to_fp8(x, recipe, dtype, weight)
    assert mine.shape == x.shape and mine.dtype == x.dtype
    # x times a scale, rounded to fp32 itself, may land on the other side of the middle between two numbers
    wrong = (mine.double() - reference(x, recipe, dtype, weight)).abs() > 1e-6 * x.abs().double()
    assert wrong.float().mean() < 0.005


@given(st.integers(1, 300), st.integers(0, 2**31), st.sampled_from(["tensorwise", "blockwise", "mxfp8"]))
def test_rounding_twice_is_rounding_once_and_errors_are_bounded(width, seed, recipe):
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(seed))
    once = round_to_fp8(x, recipe, E4M3)
    torch.testing.assert_close(round_to_fp8(once, recipe, E4M3), once, rtol=1e-6, atol=0)
    # half of the last of three bits, or half the smallest number under the scale of the largest
    assert ((once - x).abs() <= x.abs() / 16 * 1.001 + x.abs().amax() / 448 * 2 * 2**-9).all()


def test_what_is_not_a_number_stays_seen():
    x = torch.randn(2, 64)
    x[0, 3] = float("nan")
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        assert round_to_fp8(x, recipe, E4M3)[0, 3].isnan()
    assert (round_to_fp8(torch.zeros(2, 64), "mxfp8", E4M3) == 0).all()
    assert round_to_fp8(torch.zeros(0, 64), "mxfp8", E4M3).shape == (0, 64)


def test_the_three_products_of_a_layer():
    """y = q(x) q(W)^T, dx = q'(g) q(W), dW = q'(g)^T q(x), of the first linear layer that is met."""
    with one_process():
        model = small_model()
        randomize(model)
        names = emulate_fp8(model, "tensorwise")
        linear = model.decoder.layers[0].mlp.linear_fc1
        x = torch.randn(6, 1, 40, requires_grad=True)
        y, _ = linear(x)
        g = torch.randn_like(y)
        y.backward(g)
    quantized = (
        round_to_fp8(x.detach(), "tensorwise", E4M3)[:, 0],
        round_to_fp8(linear.weight.detach(), "tensorwise", E4M3),
    )
    coarse = round_to_fp8(g, "tensorwise", E5M2)[:, 0]
    torch.testing.assert_close(y[:, 0], quantized[0] @ quantized[1].t())
    torch.testing.assert_close(x.grad[:, 0], coarse @ quantized[1])
    torch.testing.assert_close(linear.weight.grad, coarse.t() @ quantized[0])
    parts = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    assert sorted(names) == sorted(f"decoder.layers.{i}.{part}" for i in range(2) for part in parts)


def test_what_stays_in_high_precision():
    """The embedding, routers, head and norms; with the flag, first and last layers too."""
    with one_process():
        model = small_model(small_config(**MOE))
        names = emulate_fp8(model, "mxfp8")
        assert not [name for name in names if "router" in name] and [
            name for name in names if "local_experts.3" in name
        ]
        config = small_config(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0)
        model = small_model(config)
        names = emulate_fp8(model, "mxfp8")
        assert names and all(name.startswith("decoder.layers.1.") for name in names)
        # a layer or a head that rounds would see the difference between these two
        fine = torch.randn(3, 40)
        with torch.no_grad():
            assert torch.equal(
                model.logits(fine),
                (fine @ model.output_layer.weight.t()).masked_fill(
                    torch.arange(64) >= 61, torch.finfo(torch.float32).min
                ),
            )


@pytest.mark.parametrize("recipe", FP8_ROWS)
@pytest.mark.parametrize("tokens", [1, 16, 100, 128])
def test_an_expert_s_tokens_are_filled_up_with_zeros(recipe, tokens):
    fixes.install()
    config = SimpleNamespace(use_transformer_engine_op_fuser=False, fp8="e4m3", fp4=None, fp8_recipe=Fp8Recipe(recipe))
    hidden, weights = torch.ones(tokens, 3), torch.ones(tokens)
    hidden, weights = SequentialMLP._pad_tensor_for_quantization(SimpleNamespace(config=config), hidden, weights)
    assert len(hidden) == len(weights) == -(-tokens // FP8_ROWS[recipe]) * FP8_ROWS[recipe]
    assert hidden.sum() == 3 * tokens and weights.sum() == tokens


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_padding_changes_neither_scales_nor_gradients(recipe):
    """The embedding of the pad token is large: were it seen, it would set the scale of all others, tensor-wise."""

    def run(length: int, embedding: float):
        documents, positions = packed([[9, 4], [7]], length)
        tokens = torch.randint(0, 60, (2, 13), generator=torch.Generator().manual_seed(1))
        tokens = torch.nn.functional.pad(tokens, (0, length - 13))
        tokens[documents < 0] = 60
        model = small_model()
        randomize(model)
        emulate_fp8(model, recipe)
        with torch.no_grad():
            model.embedding.word_embeddings.weight[60] = embedding
        logits = model(tokens, positions, attributes_of(documents, positions))[documents >= 0][:, :61]
        logits.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return dict(logits=logits.detach()) | gradients

    with one_process():
        reference, other_padding, unpadded = run(32, 0.1), run(32, 300.0), run(13, 300.0)
    for name, value in reference.items():
        assert torch.equal(other_padding[name], value), name
        # without padding sums have another order: some numbers are rounded to their other neighbour, 6 to 12 % away
        assert (unpadded[name] - value).norm() < 0.3 * value.norm(), name


def test_a_draft_s_target_is_not_rounded():
    """The hidden states that it learns from are those that it finds when decoding."""
    args = SimpleNamespace(fp8="hybrid", fp8_param_gather=True, hidden_size=64)
    own = megatron._own(args, SimpleNamespace(args=SimpleNamespace(hidden_size=32)))
    assert own.fp8 is None and not own.fp8_param_gather and own.hidden_size == 32
    assert args.fp8 == "hybrid"
