"""What several modes share: blocks, masking, the next token, and streams laid side by side.

Shapes: S clean length of one sample; B rows padded to a common S; Q = streams · S.
"""

from dataclasses import dataclass

import torch

from megatron_dllm.data.collation import pad_sample
from megatron_dllm.data.sample import PADDING_DOCUMENT, Sample
from megatron_dllm.modes.base import (
    BLOCK,
    CLEAN,
    DOCUMENT,
    NUM_ATTRIBUTES,
    POSITION,
    STREAM,
    Corrupted,
    ModelInput,
    Term,
)

LARGEST_BLOCK = 2**31 - 1  # a block may be longer than a sequence: then there is one

# --- blocks ---------------------------------------------------------------------------------------------------------


def validate_blocks(args, default: int) -> None:
    """Fill in `--dllm-block-size`; ValueError if it is not one."""
    if args.dllm_block_size is None:
        args.dllm_block_size = default
    if not 1 <= args.dllm_block_size <= LARGEST_BLOCK:
        raise ValueError(
            f"--dllm-block-size {args.dllm_block_size} cannot be the number of tokens in a block: give at least 1 and "
            "at most the sequence length."
        )


def blocks(sample: Sample, size: int, origin: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_S, offset_S), int32: the number of each token's block in the sample, and its place in that block.

    Blocks of `size` tokens are counted from the beginning of every document, and with origin "response" anew from
    every supervised token that follows an unsupervised one: generation begins a block there. So the last block
    before a new start may be short.
    """
    if len(sample) == 0:
        empty = torch.zeros(0, dtype=torch.int32)
        return empty, empty
    place_S = torch.arange(len(sample))
    starts_S = place_S == 0
    starts_S[1:] |= sample.document_S[1:] != sample.document_S[:-1]
    if origin == "response":
        starts_S[1:] |= sample.loss_mask_S[1:] & ~sample.loss_mask_S[:-1]
    start_S = torch.where(starts_S, place_S, 0).cummax(0).values
    offset_S = (place_S - start_S) % size
    return ((offset_S == 0).cumsum(0) - 1).int(), offset_S.int()


# --- noise ----------------------------------------------------------------------------------------------------------


def validate_eps(args) -> None:
    """ValueError unless `--dllm-eps` is a rate."""
    if not 0 < args.dllm_eps <= 1:
        raise ValueError(f"--dllm-eps {args.dllm_eps} is the smallest masking rate: give a number in (0, 1].")


def check_clean(sample: Sample, mask_id: int) -> None:
    """ValueError if the mask token stands in clean data: it could not be told from noise."""
    if (sample.tokens_S == mask_id).any():
        raise ValueError(
            f"sample {sample.index} holds the mask token {mask_id} before any noise: choose an "
            "id that the data never contains with --dllm-mask-token-id."
        )


def masked(sample: Sample, noised_S: torch.Tensor, p_S: torch.Tensor, mask_id: int, **blocks) -> Corrupted:
    """`sample` with the mask token at `noised_S`, each weighted by 1 / p_S, the probability that it is there."""
    return Corrupted(
        sample=sample,
        x_t_S=sample.tokens_S.masked_fill(noised_S, mask_id),
        noised_S=noised_S,
        weight_S=noised_S / p_S,
        level_S=p_S.expand(len(sample)),
        **blocks,
    )


def masked_at_rate(sample: Sample, p_S: torch.Tensor, g: torch.Generator, mask_id: int, **blocks) -> Corrupted:
    """`sample` with each supervised token masked independently with probability p_S ([S] or [1]). Draws: r [S]."""
    noised_S = (torch.rand(len(sample), generator=g) < p_S) & sample.loss_mask_S
    return masked(sample, noised_S, p_S, mask_id, **blocks)


# --- visibility -----------------------------------------------------------------------------------------------------


def seen_between_streams(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(own block, context, clean), boolean, of attributes [..., A] of one document: the key is in the query's own
    noisy block; the query is noisy and the key a clean token of an earlier block; both are clean."""
    same_document = query[..., DOCUMENT] == key[..., DOCUMENT]
    query_clean, key_clean = query[..., STREAM] == CLEAN, key[..., STREAM] == CLEAN
    same_stream = query[..., STREAM] == key[..., STREAM]
    own_block = same_document & same_stream & ~query_clean & (query[..., BLOCK] == key[..., BLOCK])
    context = same_document & key_clean & ~query_clean & (key[..., BLOCK] < query[..., BLOCK])
    return own_block, context, same_document & key_clean & query_clean


# --- layout ---------------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """B corrupted samples, padded to S tokens. Padding is document -1, neither noised nor supervised.

    tokens, x_t, position int64; document, block, offset int32; loss_mask, noised bool; weight, level float32
    """

    tokens_BS: torch.Tensor
    x_t_BS: torch.Tensor
    loss_mask_BS: torch.Tensor
    noised_BS: torch.Tensor
    weight_BS: torch.Tensor
    level_BS: torch.Tensor
    document_BS: torch.Tensor
    position_BS: torch.Tensor
    block_BS: torch.Tensor
    offset_BS: torch.Tensor
    data_tokens: int


def pad_rows(samples: list[Corrupted], length: int, pad_id: int) -> Rows:
    """Stack samples, each padded to `length`; ValueError if one is longer."""
    clean = [pad_sample(c.sample, length, pad_id, supervise=False) for c in samples]
    missing = [length - len(c.sample) for c in samples]

    def pad(name: str, fill=0):
        values = [getattr(c, name) for c in samples]
        values = [torch.zeros(len(c.sample)) if v is None else v for c, v in zip(samples, values, strict=True)]
        return torch.stack(
            [torch.nn.functional.pad(v, (0, n), value=fill) for v, n in zip(values, missing, strict=True)]
        )

    return Rows(
        tokens_BS=torch.stack([s.tokens_S for s in clean]),
        x_t_BS=pad("x_t_S", pad_id),
        loss_mask_BS=torch.stack([s.loss_mask_S for s in clean]),
        noised_BS=pad("noised_S", False),
        weight_BS=pad("weight_S"),
        level_BS=pad("level_S"),
        document_BS=torch.stack([s.document_S for s in clean]),
        position_BS=torch.stack([s.position_S for s in clean]),
        block_BS=pad("block_S").int(),
        offset_BS=pad("offset_S").int(),
        data_tokens=sum(len(c.sample) for c in samples),
    )


def follows(rows: Rows) -> torch.Tensor:
    """[B, S] bool: tokens that another one of their document comes before."""
    document_BS = rows.document_BS
    follows_BS = (document_BS == document_BS.roll(1, dims=1)) & (document_BS != PADDING_DOCUMENT)
    follows_BS[:, 0] = False
    return follows_BS


def next_token(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """(targets_BS int64, scored_BS bool) of logits that predict the token after their own.

    A row is scored where the next token is supervised and of the same document.
    """
    return rows.tokens_BS.roll(-1, dims=1), (rows.loss_mask_BS & follows(rows)).roll(-1, dims=1)


def next_token_term(rows: Rows, before: int, compat: str | None) -> Term:
    """Cross entropy of the next token, in the stream that `before` others precede. Counts what it scores.

    compat "automodel": counts every supervised token, also the ones that no row predicts, as that recipe does.
    """
    targets_BS, scored_BS = next_token(rows)
    counted_BS = rows.loss_mask_BS if compat == "automodel" else scored_BS
    pad = lambda x: torch.nn.functional.pad(x, (before * x.shape[1], 0))
    return Term(pad(targets_BS), pad(scored_BS.float()), float(counted_BS.sum()))


def streams_side_by_side(rows: Rows, streams: list[tuple[int, torch.Tensor]], terms: dict[str, Term]) -> ModelInput:
    """[first | second | ...]: each (value of STREAM, tokens_BS), with the same positions, blocks and documents.

    A term's tensors may be shorter than Q: the rows after them are not scored.
    """
    B, S = rows.tokens_BS.shape
    attributes_BQA = torch.zeros(B, S * len(streams), NUM_ATTRIBUTES, dtype=torch.int32)
    for i, (stream, _) in enumerate(streams):
        part = attributes_BQA[:, i * S : (i + 1) * S]
        part[..., STREAM] = stream
        part[..., BLOCK] = rows.block_BS
        part[..., POSITION] = rows.position_BS
        part[..., DOCUMENT] = rows.document_BS
    for term in terms.values():
        for name, value in vars(term).items():
            if isinstance(value, torch.Tensor):
                setattr(term, name, torch.nn.functional.pad(value, (0, S * len(streams) - value.shape[1])))
    return ModelInput(
        tokens_BQ=torch.cat([tokens_BS for _, tokens_BS in streams], dim=1),
        position_ids_BQ=rows.position_BS.repeat(1, len(streams)),
        attributes_BQA=attributes_BQA,
        terms=terms,
        streams=len(streams),
        tokens={
            "supervised": float(rows.loss_mask_BS.sum()),
            "noised": float(rows.noised_BS.sum()),
            "data": float(rows.data_tokens),
            "processed": float(B * S * len(streams)),
        },
    )


# --- sampling -------------------------------------------------------------------------------------------------------


def most_trusted(candidates, quota: int, threshold: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The `quota` most trusted candidates, and with a `threshold` all others at least so trusted.

    Of equally trusted ones the first. Returns (chosen_K, ids_K), int64: indices of candidates and their tokens.
    """
    ids_C, confidence_C = candidates.propose()
    order = confidence_C.argsort(descending=True, stable=True)
    count = quota if threshold is None else max(quota, int((confidence_C >= threshold).sum()))
    chosen_K = order[:count]
    return chosen_K, ids_C[chosen_K]
