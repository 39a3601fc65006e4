"""Initial weights as a function of (seed, global parameter name, row), whatever the layout.

Megatron draws each rank's weights from rank-dependent generators, so a fresh run has another loss curve on
every layout. Here each row of the full parameter has its own generator; a rank draws the rows it holds.
`global_name` and `held` also say which slice of a full tensor a rank holds, for tests and for loading weights.
"""

import math

import torch

from megatron_dllm.models.weights import ADAPTER, VOCABULARY, local_name
from megatron_dllm.noise import hashed_seed

_ROWS_AT_ONCE = 1024


def global_name(model, name: str) -> str:
    """Name of a parameter in the whole model: layers and experts numbered globally, a tied head by its source."""
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    if is_expert(name):
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


def is_expert(name: str) -> bool:
    """Whether a module or parameter is one expert's."""
    return ".experts." in name  # not ".shared_experts."


def _group(model, name: str):
    return model.pg_collection.expt_tp if is_expert(name) else model.pg_collection.tp


def held(model, name: str, parameter: torch.Tensor) -> tuple[list[range], slice]:
    """Which rows (in order) and columns of the full parameter this rank holds."""
    rows = parameter.shape[0]
    if not getattr(parameter, "tensor_model_parallel", False):
        return [range(rows)], slice(None)
    group = _group(model, name)
    rank, size = group.rank(), group.size()
    if parameter.partition_dim == 1:
        width = parameter.shape[1]
        return [range(rows)], slice(rank * width, (rank + 1) * width)
    if "linear_fc1" in name and model.config.gated_linear_unit:
        half = rows // 2  # [gate; up]: a rank holds its part of each
        return [range(start, start + half) for start in (rank * half, (size + rank) * half)], slice(None)
    return [range(rank * rows, (rank + 1) * rows)], slice(None)


def cut(model, name: str, parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """The slice of the full tensor that `parameter` holds; vocabulary rows beyond `full` are zero."""
    runs, columns = held(model, name, parameter)
    pieces = []
    for run in runs:
        piece = full[run.start : run.stop]
        if name in VOCABULARY and len(piece) < len(run):
            piece = torch.cat([piece, piece.new_zeros(len(run) - len(piece), *piece.shape[1:])])
        pieces.append(piece[:, columns] if piece.dim() > 1 else piece)
    return torch.cat(pieces)


def initialize(model, seed: int) -> None:
    """Draw every parameter of this rank's part of the model but adapters, in place. Norms and scales become 1, biases
    0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ADAPTER):
                continue
            if parameter.dim() == 1:
                norm = "norm" in name and name.endswith("weight")
                parameter.fill_(1.0 if norm or name.endswith("scale") else 0.0)
                continue
            parameter.zero_()  # padding rows of the vocabulary stay so
            limit = model.true_vocab_size if name in VOCABULARY else None
            draw_rows(model, name, parameter, seed, limit=limit)


def draw_adapters(model, seed: int) -> None:
    """Draw the adapters of models/lora.py, in place: A uniform within 1 / sqrt(in), as PEFT does, B zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ADAPTER[1]):
                parameter.zero_()
            elif name.endswith(ADAPTER[0]):
                draw_rows(model, name, parameter, seed)


def draw_rows(
    model, name: str, parameter: torch.Tensor, seed: int, first: int = 0, limit: int | None = None
) -> None:
    """Draw those of the full matrix's rows first..limit that this rank holds, in place; the others stay as they are."""
    config, full_name = model.config, global_name(model, name)
    std = config.init_method_std
    if "linear_proj.weight" in name or "linear_fc2.weight" in name:
        std /= math.sqrt(2.0 * config.num_layers)  # residual branches, as Megatron scales them
    elif full_name == "embedding.word_embeddings.weight" and config.embedding_init_method_std is not None:
        std = config.embedding_init_method_std
    runs, columns = held(model, name, parameter)
    width = parameter.shape[1]
    if columns != slice(None):
        width *= _group(model, name).size()
    generator = torch.Generator()
    drawn = torch.empty(width, dtype=torch.float32)
    base, bound = hashed_seed(seed, "weights", local_name(full_name)), 1.0 / math.sqrt(width)
    adapter = full_name.endswith(ADAPTER)
    place = 0
    for run in runs:
        wanted = range(max(first, run.start), run.stop if limit is None else min(limit, run.stop))
        for start in range(wanted.start, wanted.stop, _ROWS_AT_ONCE):  # never a second copy of the whole parameter
            rows = range(start, min(start + _ROWS_AT_ONCE, wanted.stop))
            block = torch.empty(len(rows), parameter.shape[1])
            for i, row in enumerate(rows):
                generator.manual_seed(hashed_seed(base, row))
                if adapter:
                    drawn.uniform_(-bound, bound, generator=generator)
                else:
                    drawn.normal_(0.0, std, generator=generator)
                block[i] = drawn[columns]
            at = place + start - run.start
            parameter[at : at + len(rows)] = block
        place += len(run)
