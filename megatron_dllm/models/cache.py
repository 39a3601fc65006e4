"""Keys and values of tokens that later passes of a decoding loop attend to.

Rows are ragged: each has slots of its own. A pass says how many of a row's first slots still count; its tokens take the
next ones, so one mask (the mode's `visible` over the slots' attributes) serves both, and a later pass keeps as many of
them as it says. To take tokens back is to count fewer; what lies behind is never seen. Keys are stored with their
rotation.

Of a draft (models/draft.py) only the last tokens of a pass have queries.

Shapes: B rows, Q tokens of a pass, K slots, h query heads, g key/value heads, d head size, A attributes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron_dllm.modes.base import Rule

_ROOM = 64  # slots that a cache grows by at least


class KeyValueCache:
    """Of one batch of rows, for all layers of this rank; its memory grows with the longest row."""

    def __init__(self, rows: int):
        self._rows = rows
        self._attributes_BKA: torch.Tensor | None = None
        self._layers: dict[torch.nn.Module, list[torch.Tensor]] = {}
        self._masks: dict = {}

    def begin(self, attributes_BQA: torch.Tensor, lengths: Sequence[int]) -> None:
        """A pass over these tokens (CPU int32; DOCUMENT -1 is padding) begins: they take the slots after the first
        `lengths[b]` of each row."""
        B, Q, A = attributes_BQA.shape
        if self._attributes_BKA is None:
            self._attributes_BKA = torch.zeros(self._rows, 0, A, dtype=torch.int32)
        self._lengths, first_B = list(lengths), torch.tensor(lengths)
        self._slots_BQ = first_B[:, None] + torch.arange(Q)
        self._extent = int(first_B.max()) + Q
        self._reserve(self._extent)
        self._used_BK = torch.arange(self._extent) < first_B[:, None] + Q
        self._attributes_BKA[torch.arange(B)[:, None], self._slots_BQ] = attributes_BQA
        self._queries_BQA = attributes_BQA
        self._masks = {}

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        rows = list(rows)
        self._rows = len(rows)
        if self._attributes_BKA is not None:
            self._attributes_BKA = self._attributes_BKA[rows]
        self._layers = {layer: [buffer[rows] for buffer in buffers] for layer, buffers in self._layers.items()}

    def attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: Rule,
        scale: float | None,
    ) -> torch.Tensor:
        """Queries [q,B,h,d] of the last q tokens, keys and values [Q,B,g,d] of all of this pass -> [q,B,h,d]; they
        attend to kept ones too."""
        B = query.shape[1]
        if layer not in self._layers:
            # zeros, as hidden slots are multiplied by 0
            shape = (B, self._attributes_BKA.shape[1], *key.shape[2:])
            self._layers[layer] = [key.new_zeros(shape), value.new_zeros(shape)]
        buffers = self._layers[layer]
        if len(set(self._lengths)) == 1:
            places = (slice(None), slice(self._lengths[0], self._extent))
        else:
            places = (torch.arange(B, device=key.device)[:, None], self._slots_BQ.to(key.device))
        for buffer, new in zip(buffers, (key, value), strict=True):
            buffer[places] = new.transpose(0, 1)
        keys, values = (buffer[:, : self._extent].transpose(1, 2) for buffer in buffers)
        output = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            keys,
            values,
            attn_mask=self._mask(visible, query),
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return output.permute(2, 0, 1, 3)

    def _mask(self, visible: Rule, query: torch.Tensor) -> torch.Tensor:
        """[B, 1, Q, K] additive; the same for all layers."""
        place = (visible, query.dtype, query.device, len(query))
        if place not in self._masks:
            queries_BQA = self._queries_BQA[:, -len(query) :]
            allowed = visible(queries_BQA[:, :, None], self._attributes_BKA[:, None, : self._extent])
            allowed &= self._used_BK[:, None]  # what earlier passes left behind is no one's, whatever the rule
            mask = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill_(~allowed, float("-inf"))
            self._masks[place] = mask[:, None].to(query.device)
        return self._masks[place]

    def _reserve(self, slots: int) -> None:
        have = self._attributes_BKA.shape[1]
        if slots <= have:
            return
        more = max(slots - have, have // 2, _ROOM)
        self._attributes_BKA = F.pad(self._attributes_BKA, (0, 0, 0, more))
        grow = lambda buffer: F.pad(buffer, (0, 0, 0, 0, 0, more))
        self._layers = {layer: [grow(buffer) for buffer in buffers] for layer, buffers in self._layers.items()}
