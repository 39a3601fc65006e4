"""Adapters the plain way: merged into dense weights, and their gradients from the dense ones by the chain rule."""

import contextlib

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.training import get_args

from megatron_dllm.models.init import draw_rows, global_name
from megatron_dllm.models.weights import attention_shape


class Stirred:
    """The pool, but every run begins with B drawn: a gradient of A that is zero, as at B = 0, says nothing."""

    def __init__(self, pool):
        self.pool = pool

    def run(self, argv, processes=1, **options):
        return self.pool.run(argv, processes, stir_adapters=True, **options)


def stir(model, seed: int) -> None:
    """Draw every B as an A, but so small that the network stays one that does not amplify rounding."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                draw_rows(model, name, parameter, seed)
                parameter *= 0.1


def rows_of_parts(layer_name: str, rows: int, args) -> list[list[int]]:
    """Of each target in a layer of a whole model, which rows of the weight are its own, one by one."""
    if layer_name.endswith("linear_qkv"):
        groups, d, shared = attention_shape(args, int(layer_name.split(".")[2]))
        of_group = args.num_attention_heads // groups
        names = ["q_proj"] * of_group + ["k_proj"] + ([] if shared else ["v_proj"])
        owners = [name for _ in range(groups) for name in names for _ in range(d)]
    elif layer_name.endswith("linear_fc1"):
        owners = ["gate_proj" if row < rows // 2 else "up_proj" for row in range(rows)]
    else:
        owners = [dict(linear_proj="o_proj", linear_fc2="down_proj")[layer_name.split(".")[-1]]] * rows
    assert len(owners) == rows
    parts = [[row for row, owner in enumerate(owners) if owner == part] for part in dict.fromkeys(owners)]
    return [part for part in parts if owners[part[0]] in args.lora_targets]


@contextlib.contextmanager
def merged(model):
    """layers: name -> (layer, its adapter's A and B) of a whole model that for now has W + (alpha / r) B A, to be
    differentiated, and no adapters."""
    args, layers, before = get_args(), {}, {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        matrix_A, matrix_B, dense = layer.lora_A.detach(), layer.lora_B.detach(), layer.weight.detach().clone()
        r = matrix_B.shape[1]
        for number, rows in enumerate(rows_of_parts(global_name(model, name + ".weight")[:-7], len(dense), args)):
            dense[rows] += args.lora_alpha / r * matrix_B[rows] @ matrix_A[number * r : (number + 1) * r]
        before[name] = type(layer), layer.weight
        layers[name] = layer, matrix_A, matrix_B
        layer.__class__ = ColumnParallelLinear if isinstance(layer, ColumnParallelLinear) else RowParallelLinear
        layer.weight = torch.nn.Parameter(dense)
    try:
        yield layers
    finally:
        for name, (kind, weight) in before.items():
            layers[name][0].__class__, layers[name][0].weight = kind, weight


def adapter_gradients(model, loss_of) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradient of every A and B by its name in the whole model). loss_of: of the merged model."""
    args, gradients = get_args(), {}
    with merged(model) as layers:
        loss = loss_of()
        dense = torch.autograd.grad(loss, [layer.weight for layer, _, _ in layers.values()])
    for (name, (_, matrix_A, matrix_B)), slope in zip(layers.items(), dense, strict=True):
        full, r = global_name(model, name + ".weight")[:-6], matrix_B.shape[1]
        scale, of_A, of_B = args.lora_alpha / r, torch.zeros_like(matrix_A), torch.zeros_like(matrix_B)
        for number, rows in enumerate(rows_of_parts(full[:-1], len(slope), args)):
            own = slice(number * r, (number + 1) * r)
            of_B[rows] = scale * slope[rows] @ matrix_A[own].t()
            of_A[own] = scale * matrix_B[rows].t() @ slope[rows]
        gradients[full + "lora_A"], gradients[full + "lora_B"] = of_A, of_B
    return loss, gradients


def optimizer_elements(optimizer) -> int:
    """How many parameters this rank's optimizers keep moments of."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state for part in parts if part.optimizer is not None for state in part.optimizer.state.values()]
    return sum(state["exp_avg"].numel() for state in states if "exp_avg" in state)
