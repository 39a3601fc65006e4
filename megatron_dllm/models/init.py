"""Initial weights as a function of (seed, global parameter name, row), whatever the layout.

Megatron draws each rank's weights from rank-dependent generators, so a fresh run has another loss curve on
every layout. Here each row of the full parameter has its own generator; a rank draws the rows it holds.
`global_name` and `cut` also say which slice of a full tensor a rank holds, for tests and for loading weights.
"""

import math

import torch

from megatron_dllm.noise import hashed_seed

_ROWS_AT_ONCE = 1024
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def global_name(model, name: str) -> str:
    """Name of a parameter in the whole model: layers and experts numbered globally, a tied head by its source."""
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    if _is_expert(name):
        first = model.config.num_moe_experts // model.pg_collection.ep.size() * model.pg_collection.ep.rank()
        if "local_experts" in parts:
            place = parts.index("local_experts") + 1
            parts[place] = str(int(parts[place]) + first)
        else:  # Transformer Engine's grouped layout: ...experts.linear_fc1.weight3
            parts[-1] = f"weight{int(parts[-1].removeprefix('weight')) + first}"
    name = ".".join(parts)
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


def _is_expert(name: str) -> bool:
    return ".experts." in name  # not ".shared_experts."


def _group(model, name: str):
    return model.pg_collection.expt_tp if _is_expert(name) else model.pg_collection.tp


def held_rows(model, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Indices [rows] of the full parameter's rows that this rank holds, before any cut along dimension 1."""
    rows = parameter.shape[0]
    if not getattr(parameter, "tensor_model_parallel", False) or parameter.partition_dim != 0:
        return torch.arange(rows)
    group = _group(model, name)
    if "linear_fc1" in name and model.config.gated_linear_unit:
        # [gate; up]: a rank holds its part of each half
        half = rows // 2
        gate = torch.arange(half) + group.rank() * half
        return torch.cat([gate, gate + half * group.size()])
    return torch.arange(rows) + group.rank() * rows


def cut(model, name: str, parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """The slice of the full tensor that `parameter` holds; vocabulary rows beyond `full` are zero."""
    rows = held_rows(model, name, parameter)
    if name in _VOCABULARY:
        inside = rows < full.shape[0]
        out = full.new_zeros(len(rows), *full.shape[1:])
        out[inside] = full[rows[inside]]
        return out
    full = full[rows]
    if getattr(parameter, "tensor_model_parallel", False) and parameter.partition_dim == 1:
        group = _group(model, name)
        return full.chunk(group.size(), dim=1)[group.rank()]
    return full


def initialize(model, seed: int) -> None:
    """Draw every parameter of this rank's part of the model, in place. Norms become 1, biases 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            _draw_matrix(model, name, parameter, seed)


def _draw_matrix(model, name: str, parameter: torch.Tensor, seed: int) -> None:
    config, full_name = model.config, global_name(model, name)
    std = config.init_method_std
    if "linear_proj.weight" in name or "linear_fc2.weight" in name:
        std /= math.sqrt(2.0 * config.num_layers)  # residual branches, as Megatron scales them
    elif full_name == "embedding.word_embeddings.weight" and config.embedding_init_method_std is not None:
        std = config.embedding_init_method_std
    parallel = getattr(parameter, "tensor_model_parallel", False)
    columns = slice(None)
    width = parameter.shape[1]
    if parallel and parameter.partition_dim == 1:
        group = _group(model, name)
        columns = slice(group.rank() * width, (group.rank() + 1) * width)
        width *= group.size()
    limit = model.true_vocab_size if name in _VOCABULARY else None
    generator = torch.Generator()
    drawn = torch.empty(width, dtype=torch.float32)
    base = hashed_seed(seed, "weights", full_name)
    rows = held_rows(model, name, parameter).tolist()
    for start in range(0, len(rows), _ROWS_AT_ONCE):  # never a second copy of the whole parameter
        block = torch.zeros(min(_ROWS_AT_ONCE, len(rows) - start), parameter.shape[1])
        for i, row in enumerate(rows[start : start + _ROWS_AT_ONCE]):
            if limit is not None and row >= limit:
                continue  # padding rows stay zero
            generator.manual_seed(hashed_seed(base, row))
            block[i] = drawn.normal_(0.0, std, generator=generator)[columns]
        parameter[start : start + len(block)] = block
