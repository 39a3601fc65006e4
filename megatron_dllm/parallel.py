"""What a rank gets of a micro-batch, and how long a micro-batch must be for the layout.

Every tensor-, context- and pipeline-parallel peer builds the same micro-batch from the same samples; here it
keeps its slice of the sequence (context parallelism) and the rows that some loss term scores.
"""

import hashlib
import math
from dataclasses import dataclass, field, replace

import torch

from megatron_dllm.modes.base import BLOCK, DOCUMENT, ModelInput
from megatron_dllm.precision import FP8_ROWS


@dataclass
class RankTerm:
    """The N rows of this rank that one loss term scores.

    rows_N index the flattened [Qr, B] hidden states of this rank (sequence first, as Megatron has them);
    the rest are the rows of a `Term`.
    """

    rows_N: torch.Tensor
    targets_N: torch.Tensor
    weights_N: torch.Tensor
    levels_N: torch.Tensor | None = None
    offsets_N: torch.Tensor | None = None
    inputs_N: torch.Tensor | None = None
    teacher_N: torch.Tensor | None = None

    def chunk(self, rows: slice) -> "RankTerm":
        """Some of the rows."""
        return RankTerm(**{name: None if tensor is None else tensor[rows] for name, tensor in vars(self).items()})


@dataclass
class RankBatch:
    """One micro-batch as one rank trains on it. Qr = Q / context-parallel size.

    attributes_BQA covers the GLOBAL sequence, in the order of the concatenated ranks, because a rule needs
    both sides; None where everything is visible to everything, so that no mask is needed.
    counts, tokens: this micro-batch's contributions, the same on every context-parallel peer.
    denominators, microbatches: filled in once the whole step has been read (see data/stream.py).
    flops: model FLOPs of the whole micro-batch (planning/flops.py); 0 where nobody asks.
    digest: hash of everything above before slicing; equal on all tensor/context/pipeline peers.
    self_conditioned_B: as in ModelInput.
    """

    tokens_BQ: torch.Tensor
    position_ids_BQ: torch.Tensor
    attributes_BQA: torch.Tensor | None
    terms: dict[str, RankTerm]
    counts: dict[str, float]
    tokens: dict[str, float]
    index: list[int]
    canvas_rows: int = 0  # of the rows that are a mode's canvases, how many are this rank's; the last ones
    first: "RankBatch | None" = None  # as much of it as a first pass needs (self_conditioning.py)
    soft: tuple[torch.Tensor, torch.Tensor] | None = None  # what that pass made of the canvases
    flops: float = 0.0
    digest: int = 0
    denominators: dict[str, float] = field(default_factory=dict)
    microbatches: int = 1
    self_conditioned_B: torch.Tensor | None = None

    def to(self, device) -> "RankBatch":
        """Move all tensors; a no-op on CPU."""
        if torch.device(device).type == "cpu":
            return self
        move = lambda t: t if t is None else t.to(device, non_blocking=True)
        self.tokens_BQ, self.position_ids_BQ = move(self.tokens_BQ), move(self.position_ids_BQ)
        self.attributes_BQA, self.self_conditioned_B = move(self.attributes_BQA), move(self.self_conditioned_B)
        for term in self.terms.values():
            for name, tensor in vars(term).items():
                setattr(term, name, move(tensor))
        return self


def rank_positions(length: int, streams: int, cp_size: int, cp_rank: int, drafted: int = 0) -> torch.Tensor:
    """Global positions [Q / cp_size] that a context-parallel rank owns.

    Megatron's zigzag (chunks r and 2·cp-1-r, which balances causal work) inside each of the `streams`, so
    that a rank owns the same positions of every stream; the same of the `drafted` tokens after them.
    """
    if cp_size == 1:
        return torch.arange(length * streams + drafted)

    def zigzag(count: int) -> torch.Tensor:
        chunks = torch.arange(count).chunk(2 * cp_size)
        return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])

    own = [zigzag(length) + stream * length for stream in range(streams)]
    return torch.cat([*own, zigzag(drafted) + streams * length] if drafted else own)


def shard(batch: ModelInput, index: list[int], cp_size: int, cp_rank: int, full_within_document: bool) -> RankBatch:
    """Cut a micro-batch for one context-parallel rank and pick the rows that are scored."""
    length = (batch.tokens_BQ.shape[1] - batch.drafted) // batch.streams
    own = rank_positions(length, batch.streams, cp_size, cp_rank, batch.drafted)
    terms = {}
    for name, term in batch.terms.items():
        weights = term.weights_BQ[:, own].t().flatten()
        rows = weights.nonzero()[:, 0]
        pick = lambda tensor, rows=rows: None if tensor is None else tensor[:, own].t().flatten()[rows]
        terms[name] = RankTerm(
            rows,
            pick(term.targets_BQ),
            weights[rows],
            pick(term.levels_BQ),
            pick(term.offsets_BQ),
            pick(term.inputs_BQ),
            pick(term.teacher_BQ),
        )
    attributes = batch.attributes_BQA
    if full_within_document and (attributes[..., DOCUMENT] == 0).all():
        attributes = None
    elif cp_size > 1:
        order = torch.cat([rank_positions(length, batch.streams, cp_size, r, batch.drafted) for r in range(cp_size)])
        attributes = attributes[:, order].contiguous()
    return RankBatch(
        tokens_BQ=batch.tokens_BQ[:, own].contiguous(),
        position_ids_BQ=batch.position_ids_BQ[:, own].contiguous(),
        attributes_BQA=attributes,
        terms=terms,
        counts={name: term.count for name, term in batch.terms.items()},
        tokens=batch.tokens,
        index=index,
        canvas_rows=batch.drafted // cp_size,
        self_conditioned_B=batch.self_conditioned_B,
    )


def first_pass_input(batch: ModelInput, args) -> ModelInput | None:
    """What the first of two passes must see (self_conditioning.py): rows whose coin is on, their canvases, and of the
    text only what comes before the last of these; nothing is scored. None if no coin is on.

    Whole where lengths or rows must be those of the step: a pipeline that exchanges tensors of one shape, experts that
    exchange as many tokens as others.
    """
    if batch.self_conditioned_B is None or not batch.self_conditioned_B.any():
        return None
    gathers = args.expert_model_parallel_size > 1 and args.moe_token_dispatcher_type != "alltoall"
    if gathers or (args.pipeline_model_parallel_size > 1 and not args.dllm_variable_lengths):
        return replace(batch, terms={})
    Q = batch.tokens_BQ.shape[1]
    rows, S = batch.self_conditioned_B.nonzero()[:, 0], Q - batch.drafted
    text, canvas = batch.attributes_BQA[rows][:, :S], batch.attributes_BQA[rows][:, S:]
    last_B = canvas[..., BLOCK].masked_fill(canvas[..., DOCUMENT] < 0, 0).amax(1)
    seen_BS = (text[..., BLOCK] < last_B[:, None]) & (text[..., DOCUMENT] >= 0)
    needed = int((seen_BS * torch.arange(1, S + 1)).max())
    multiple = args.dllm_length_multiple
    length = min(S, max(1, -(-needed // multiple)) * multiple)
    columns = torch.cat([torch.arange(length), torch.arange(S, Q)])
    pick = lambda tensor: tensor[rows][:, columns]
    return replace(
        batch,
        tokens_BQ=pick(batch.tokens_BQ),
        position_ids_BQ=pick(batch.position_ids_BQ),
        attributes_BQA=pick(batch.attributes_BQA),
        self_conditioned_B=batch.self_conditioned_B[rows],
        noised_BD=None,
        terms={},
    )


def digest(batch: ModelInput, index: list[int]) -> int:
    """63-bit hash of all that a micro-batch trains on: inputs, positions, attributes, coins, every term."""
    h = hashlib.blake2b(repr(index).encode(), digest_size=8)
    tensors = [batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA]
    tensors += [] if batch.self_conditioned_B is None else [batch.self_conditioned_B]
    for name in sorted(batch.terms):
        h.update(repr(batch.terms[name].count).encode())
        tensors += [value for value in vars(batch.terms[name]).values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        h.update(tensor.contiguous().numpy().tobytes())
    return int.from_bytes(h.digest(), "little") >> 1


def pad_multiple(
    tensor_parallel: int, context_parallel: int, sequence_parallel: bool, fp8_recipe: str | None = None
) -> int:
    """What a stream's length must be divisible by: the zigzag halves of context parallelism, and of each rank's part
    the tensor-parallel shards under sequence parallelism, each in whole FP8_ROWS."""
    context = 2 * context_parallel if context_parallel > 1 else 1
    shards = tensor_parallel * context_parallel if sequence_parallel else context_parallel
    per_shard = 1 if fp8_recipe is None else FP8_ROWS[fp8_recipe]
    return math.lcm(context, shards * per_shard)
