"""Training with the rounding of FP8, on any machine: what goes into the products of linear layers is rounded to an FP8
format and multiplied in the model's own precision, as a GPU's tensor cores would (they add up in fp32).

    y = q(x) q(W)^T,    dx = q'(g) q(W),    dW = q'(g)^T q(x)

with q by a recipe of Transformer Engine's (its docs, "Using FP8"; OCP Microscaling Formats v1.0, section 5, for MXFP8):

    tensorwise   one scale of a tensor: largest value of the format / largest magnitude. q e4m3, q' e5m2 ("hybrid").
    blockwise    one scale for 128 neighbours of a row (x, g) or for 128 x 128 (W). e4m3 throughout.
    mxfp8        one power of two for 32 neighbours of a row. e4m3 throughout.

Differences from the kernels: x and g are rounded once, along their features, where blockwise and mxfp8 round the
operands of dW anew, along tokens. The scale of a tensor-wise row-parallel input is that of a rank's shard, as there.

Not rounded, as there: embedding, norms, attention, routers, head and cross entropy, and the first and last layers with
--first-last-layers-bf16.
"""

import torch
import torch.nn.functional as F
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def round_to_fp8(x: torch.Tensor, recipe: str, dtype: torch.dtype, weight: bool = False, group=None) -> torch.Tensor:
    """x, rounded to what `dtype` holds under the recipe's scales; shape and dtype of x.

    weight: blocks of the recipe blockwise have two dimensions. group: ranks whose shards of x have one scale together,
    tensor-wise.
    """
    if x.numel() == 0:
        return x
    square = weight and recipe == "blockwise"
    wide, size = x.float(), dict(mxfp8=32, blockwise=128).get(recipe)
    if recipe == "tensorwise":
        blocks = wide.reshape(1, -1)
    else:  # a last block that is not full is filled with zeros
        wide = F.pad(wide, (0, -x.shape[-1] % size, 0, -x.shape[0] % size) if square else (0, -x.shape[-1] % size))
        blocks = wide.unflatten(-1, (-1, size))
        if square:
            blocks = blocks.unflatten(0, (-1, size)).transpose(1, 2).flatten(2)
    largest = blocks.abs().amax(-1, keepdim=True)
    if recipe == "tensorwise" and group is not None and group.size() > 1:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    limit = torch.finfo(dtype).max
    if recipe == "mxfp8":
        scale = torch.exp2(-torch.ceil(torch.log2(largest / limit)))
    else:
        scale = limit / largest
    scale = torch.where((largest > 0) & scale.isfinite(), scale, 1.0)  # of nothing but zeros, or of what is not finite
    rounded = (blocks * scale).clamp(-limit, limit).to(dtype).float() / scale
    if square:
        rounded = rounded.unflatten(2, (size, size)).transpose(1, 2).flatten(0, 1)
    rounded = rounded.reshape(wide.shape)[..., : x.shape[-1]]
    return (rounded[: x.shape[0]] if square else rounded).to(x.dtype)


class _RoundForward(torch.autograd.Function):
    """Rounded; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, x, recipe, weight, group):
        return round_to_fp8(x, recipe, E4M3, weight, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None, None


class _RoundGradient(torch.autograd.Function):
    """As it is; the gradient is rounded."""

    @staticmethod
    def forward(ctx, x, recipe):
        ctx.recipe = recipe
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return round_to_fp8(gradient, ctx.recipe, E5M2 if ctx.recipe == "tensorwise" else E4M3), None


def emulate_fp8(model, recipe: str) -> list[str]:
    """Round what the linear layers of a DiffusionLM's or a draft's block multiply, in place. Returns their names."""
    model.fp8, changed = True, []
    for layer in model.decoder.layers:
        if is_first_last_bf16_layer(model.config, layer.layer_number - 1):
            continue
        for name, module in layer.named_modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                _emulate(module, recipe)
                changed.append(f"decoder.layers.{layer.layer_number - 1}.{name}")
    return changed


def _emulate(linear, recipe: str) -> None:
    multiply = linear._forward_impl  # both classes call it with what a product is made of
    # under sequence parallelism ranks hold shards of one tensor's rows
    shared = linear.tp_group if isinstance(linear, ColumnParallelLinear) and linear.sequence_parallel else None

    def rounded_product(input, weight, **options):
        options["gradient_accumulation_fusion"] = False  # the weight's gradient is that of a rounded copy
        input = _RoundForward.apply(input, recipe, False, shared)
        weight = _RoundForward.apply(weight, recipe, True, None)
        return _RoundGradient.apply(multiply(input=input, weight=weight, **options), recipe)

    linear._forward_impl = rounded_product
