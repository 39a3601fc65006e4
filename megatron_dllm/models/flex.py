"""Flex attention (torch.nn.attention.flex_attention) under a mode's `visible` rule."""

import torch
import torch.nn.functional as F

from megatron_dllm.modes.base import Rule

BLOCK = 128  # Flex's default, for queries and keys
PAIRS_AT_ONCE = 2**26  # of a query and a key, 6 bytes each (planning/memory.py)
_compiled = None


def flex(query, key, value, **options):
    """flex_attention, compiled on a GPU. On a CPU it has no backward: forward only, for tests."""
    from torch.nn.attention.flex_attention import flex_attention

    global _compiled
    if not query.is_cuda:
        return flex_attention(query, key, value, **options)
    if _compiled is None:
        _compiled = torch.compile(flex_attention)
    return _compiled(query, key, value, **options)


def block_mask(visible: Rule, attributes: torch.Tensor, own: slice):
    """The BlockMask of the query rows `own` of attributes [B,S,A]: which blocks of BLOCK x BLOCK pairs are seen in
    whole, in part, or not at all.

    torch's create_block_mask makes the same of all pairs at once, in 40 GiB for two streams of 32,768 tokens each.
    Here a band of some blocks' rows is evaluated at a time, at most PAIRS_AT_ONCE pairs (or one block's rows).
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries = attributes[:, own]
    (B, Q, _), S = queries.shape, attributes.shape[1]
    rows = max(1, PAIRS_AT_ONCE // (B * S * BLOCK)) * BLOCK
    bands = [_blocks(visible, queries[:, start : start + rows], attributes) for start in range(0, Q, rows)]
    seen, whole = (torch.cat(parts, dim=1) for parts in zip(*bands, strict=True))
    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, q, k: visible(queries[b, q], attributes[b, k]),
        seq_lengths=(Q, S),
    )


def _blocks(visible: Rule, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [B, blocks of queries, blocks of keys], twice: some pair is seen, all pairs are. What fills up the last
    blocks is seen by none."""
    B, Q, S = len(keys), queries.shape[1], keys.shape[1]
    allowed = visible(queries[:, :, None], keys[:, None]).expand(B, Q, S)
    allowed = F.pad(allowed, (0, -S % BLOCK, 0, -Q % BLOCK))
    tiles = allowed.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return tiles.any(dim=4).any(dim=2), tiles.all(dim=4).all(dim=2)


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 [B, 1, rows] how many blocks of a row are set, int32 [B, 1, rows, columns] their columns, ascending, and
    the others' behind them), as BlockMask wants them."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32)[:, None], columns.int().contiguous()[:, None]
