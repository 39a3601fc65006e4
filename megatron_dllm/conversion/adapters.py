"""Adapters of a checkpoint (models/lora.py): merged into the weights beside them, or written as PEFT keeps them.

PEFT knows a module by its name and rank, and gives it A [R, in] and B [out, R]; its output is multiplied by alpha / R.
What of a Megatron layer goes to which module follows from the rows of its weight (weights.py), as everything else does:
a module's B are the rows of `wide(B)` that are rows of its weight, less the columns that are zero there. So a module of
one part has R = r, and one that holds several parts (query_key_value of LLaDA2.x) R = T r with the same alpha / R.

transformers keeps the experts of a layer in one parameter [experts, out, in] whatever is in the files. PEFT adapts
it through `target_parameters`: A [experts R, in], one expert's rows below the other's, B [out, R experts], an expert's
columns apart by `experts`; of the two parameters of a layer the first, gate_up_proj, is wrapped first, and is the
`base_layer` of the other. (PEFT also reads adapters of experts by their old names, one by one, but then loses those
that dense layers and shared experts have under the same names.)
"""

import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file

from megatron_dllm.models.hf import Folder, begin_part, check_new_folder, finish_part
from megatron_dllm.models.lora import A, B, choices, rank_of, targets_of, wide
from megatron_dllm.models.weights import Rows

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


@dataclass
class Adapter:
    """Of one whole weight: A [T r, in], B [out, r], choices [out, T] in the dtype of the checkpoint and fp32."""

    A: torch.Tensor
    B: torch.Tensor
    choices: torch.Tensor
    scale: float

    def delta(self) -> torch.Tensor:
        """[out, in] fp32: what is added to the weight."""
        return self.scale * (wide(self.B.float(), self.choices) @ self.A.float())

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, T r]: rows of wide(B)."""
        return wide(self.B[start:stop], self.choices[start:stop].to(self.B))


def adapter(reader, args: Namespace, weight: str, shape: tuple[int, ...]) -> Adapter | None:
    """That of a weight (a local name), from a torch_dist.Reader; None if it has none."""
    if not (parts := targets_of(weight, args)):
        return None
    layer, r = weight.removesuffix("weight"), rank_of(args)
    matrix_A, matrix_B = reader.read(layer + A, len(parts) * r), reader.read(layer + B, shape[0])
    return Adapter(matrix_A, matrix_B, choices(weight, shape[0], args), args.lora_alpha / r)


def check_adapters_of(planned) -> None:
    """ValueError (one sentence) if the checkpoint of a planned export has none."""
    if rank_of(planned.args) is None:
        raise ValueError(f"{planned.folder} holds no adapters: leave out --lora.")


def check_peft(planned) -> None:
    """ValueError (one sentence) if PEFT has no form for the adapters of a planned export."""
    family, args = planned.family, planned.args
    merge = "leave out --lora adapter, which merges them"
    if planned.reference is None:
        raise ValueError(
            "--lora adapter writes what is added to the weights of a Hugging Face folder: name it by --hf-model "
            "(--lora base writes one)."
        )
    if family.text_config is not None:
        raise ValueError(
            f"{family.name} models have their layers twice in transformers, as encoder and as decoder, which PEFT "
            f"would adapt and merge twice: {merge}."
        )
    indexed = any(piece.index is not None for _, pieces in planned.mapping.megatron.values() for piece in pieces)
    if indexed and targets_of("layers.0.mlp.linear_fc1.weight", args) + targets_of("mlp.linear_fc2.weight", args):
        raise ValueError(
            f"{planned.reference} keeps the experts of a layer in one tensor in code of its own, which PEFT cannot "
            f"adapt: {merge}, or give a folder with experts one by one."
        )


@dataclass
class _Peft:
    """adapter_model.safetensors in the making, and what adapter_config.json says of it."""

    r: int
    alpha: float
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    ranks: dict[str, int] = field(default_factory=dict)

    def add(self, place: str, matrix_A: torch.Tensor, matrix_B: torch.Tensor) -> None:
        for name, matrix in (("lora_A", matrix_A), ("lora_B", matrix_B)):
            self.tensors[f"base_model.model.{place}.{name}.weight"] = matrix.contiguous()

    def note_rank(self, name: str, rank: int) -> None:
        """Of a module or parameter whose name ends like this."""
        if rank != self.r:
            self.ranks[re.escape(name)] = rank


def write_peft(planned, reader, save: str, dtype: torch.dtype | None = None) -> dict:
    """Write the folder `save` as PEFT saves an adapter of `planned.reference`.

    dtype: of the adapter, default as it is saved. Returns {"tensors": ..., "bytes": ...}. Raises ValueError (one
    sentence) if the base weights of the checkpoint are not those of the reference; nothing is left behind then.
    """
    args = planned.args
    packed = args.num_experts is not None and not planned.family.has_own_code
    check_new_folder(save)
    part = begin_part(save)
    try:
        peft = _collect(planned, reader, packed, dtype)
        save_file(peft.tensors, os.path.join(part, WEIGHTS), metadata={"format": "pt"})
        with open(os.path.join(part, CONFIG), "w", encoding="utf-8") as file:
            json.dump(_config(planned, peft, packed), file, indent=2, sort_keys=True)
            file.write("\n")
        finish_part(save)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return dict(tensors=len(peft.tensors), bytes=sum(tensor.nbytes for tensor in peft.tensors.values()))


def _collect(planned, reader, packed: bool, dtype: torch.dtype | None) -> _Peft:
    args, mapping, reference = planned.args, planned.mapping, Folder(planned.reference)
    peft = _Peft(rank_of(args), args.lora_alpha)
    experts: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}  # by parameter, then by expert
    for name, (shape, pieces) in mapping.megatron.items():
        _check_base(reader.read(name, shape[0]), pieces, reference, planned)
        found = adapter(reader, args, name, shape)
        if found is None:
            continue
        if dtype is not None:
            found.A, found.B = found.A.to(dtype), found.B.to(dtype)
        expert = _EXPERT.match(pieces[0].key)
        if packed and expert is not None:
            parameter = "down_proj" if expert[3] == "down_proj" else "gate_up_proj"
            of_layer = experts.setdefault(f"{expert[1]}.{parameter}", {})
            of_layer[int(expert[2])] = found.A, found.rows(0, shape[0])
            continue
        for key in dict.fromkeys(piece.key for piece in pieces):
            _add_module(peft, key, pieces, found, packed)
    for parameter in experts:
        _add_experts(peft, parameter, experts)
    return peft


def _check_base(weight: torch.Tensor, pieces: list[Rows], reference: Folder, planned) -> None:
    row = 0
    for piece in pieces:
        stop = row + piece.stop - piece.start
        if piece.key not in reference.shapes or not torch.equal(
            reference.read(piece.key, piece.start, piece.stop, index=piece.index).to(weight.dtype), weight[row:stop]
        ):
            raise ValueError(
                f"{piece.key} of {planned.reference} is not what the adapters of {planned.folder} were trained beside: "
                "write that by --lora base, and give it as --hf-model."
            )
        row = stop


def _add_module(peft: _Peft, key: str, pieces: list[Rows], found: Adapter, packed: bool) -> None:
    """The adapter of one module of several whose weights are rows of ours."""
    r, row = peft.r, 0
    rows: list[tuple[int, int, int, int]] = []  # there, here
    for piece in pieces:
        stop = row + piece.stop - piece.start
        if piece.key == key:
            rows.append((piece.start, piece.stop, row, stop))
        row = stop
    here = torch.cat([torch.arange(first, last) for _, _, first, last in rows])
    used = found.choices[here].any(0).nonzero()[:, 0].tolist()
    if not used:  # of a fused layer, the part that is no target
        return
    columns = torch.cat([torch.arange(t * r, (t + 1) * r) for t in used])
    matrix_B = found.B.new_zeros(max(stop for _, stop, _, _ in rows), len(columns))
    for start, stop, first, last in rows:
        matrix_B[start:stop] = found.rows(first, last)[:, columns]
    module = key.removesuffix(".weight")
    leaf = module.rpartition(".")[2]
    if packed and leaf in ("gate_proj", "up_proj", "down_proj"):
        peft.parameters.add(f"{leaf}.weight")
    else:
        peft.modules.add(module)
    peft.note_rank(leaf, len(columns))
    peft.add(module, found.A[columns], matrix_B)


def _add_experts(peft: _Peft, parameter: str, experts: dict) -> None:
    of_layer = experts[parameter]
    container, _, leaf = parameter.rpartition(".")
    inner = leaf == "gate_up_proj" and f"{container}.down_proj" in experts
    numbers = sorted(of_layer)
    matrix_A = torch.cat([of_layer[number][0] for number in numbers])
    matrix_B = torch.stack([of_layer[number][1] for number in numbers], -1).flatten(1)
    peft.parameters.add(f"experts.{leaf}")
    peft.note_rank(f"experts.{leaf}", len(matrix_A) // len(numbers))
    peft.add(container + (".base_layer" if inner else ""), matrix_A, matrix_B)


def _names(modules: set[str], keys: Iterable[str]) -> list[str]:
    """What PEFT, which looks at how names end, is to be told for just these: the last word where all that end in it are
    meant, else (LLaDA's ff_out is a layer's and the head) each one's whole name."""
    last = lambda module: module.rpartition(".")[2]
    others = {last(module) for key in keys if (module := key.removesuffix(".weight")) not in modules}
    return sorted({module if last(module) in others else last(module) for module in modules})


def _config(planned, peft: _Peft, packed: bool) -> dict:
    args = planned.args
    scale = peft.alpha / peft.r
    return dict(
        peft_type="LORA",
        task_type=None,
        base_model_name_or_path=os.path.abspath(planned.reference),
        r=peft.r,
        lora_alpha=peft.alpha,
        lora_dropout=0.0 if packed else args.lora_dropout,  # PEFT has none for parameters
        target_modules=_names(peft.modules, planned.mapping.hf),
        target_parameters=sorted(peft.parameters) or None,
        rank_pattern=peft.ranks,
        alpha_pattern={name: scale * rank for name, rank in peft.ranks.items()},
        bias="none",
        fan_in_fan_out=False,
        init_lora_weights=True,
        inference_mode=True,
        use_rslora=False,
        use_dora=False,
        modules_to_save=None,
    )
