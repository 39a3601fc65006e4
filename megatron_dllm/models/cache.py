"""Keys and values of tokens that later passes of a decoding loop attend to.

Rows are ragged: each has slots of its own, of which the first `lengths[b]` are kept from earlier passes and the next
ones hold the tokens of the current pass, so one mask (the mode's `visible` over the slots' attributes) serves both. To
take tokens back, lower the length; what lies behind it is never seen. Keys are stored with their rotation.

Shapes: B rows, Q tokens of a pass, K slots, h query heads, g key/value heads, d head size, A attributes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron_dllm.modes.base import DOCUMENT, NUM_ATTRIBUTES, Rule

_ROOM = 64  # slots that a cache grows by at least


class KeyValueCache:
    """lengths: how many tokens of each row are kept; set it before a pass, `extend` it after one."""

    def __init__(self, rows: int):
        self.lengths = [0] * rows
        self._attributes_BKA = torch.zeros(rows, 0, NUM_ATTRIBUTES, dtype=torch.int32)
        self._layers: dict[torch.nn.Module, list[torch.Tensor]] = {}
        self._masks: dict = {}

    def begin(self, attributes_BQA: torch.Tensor) -> None:
        """A pass over these tokens (CPU int32; DOCUMENT -1 is padding) begins: they take the slots after the kept
        ones."""
        B, Q, _ = attributes_BQA.shape
        first_B = torch.tensor(self.lengths)
        self._slots_BQ = first_B[:, None] + torch.arange(Q)
        self._extent = int(first_B.max()) + Q
        self._reserve(self._extent)
        unused_BK = torch.arange(self._attributes_BKA.shape[1]) >= first_B[:, None]
        self._attributes_BKA[..., DOCUMENT].masked_fill_(unused_BK, -1)
        self._attributes_BKA[torch.arange(B)[:, None], self._slots_BQ] = attributes_BQA
        self._queries_BQA = attributes_BQA
        self._masks = {}

    def extend(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[b]` tokens of the pass."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        rows = list(rows)
        self.lengths = [self.lengths[b] for b in rows]
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
        """[Q,B,h,d] queries and [Q,B,g,d] keys and values of this pass -> [Q,B,h,d]; they attend to kept ones too."""
        B = query.shape[1]
        if layer not in self._layers:
            # zeros, as hidden slots are multiplied by 0
            shape = (B, self._attributes_BKA.shape[1], *key.shape[2:])
            self._layers[layer] = [key.new_zeros(shape), value.new_zeros(shape)]
        buffers = self._layers[layer]
        if len(set(self.lengths)) == 1:
            places = (slice(None), slice(self.lengths[0], self._extent))
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
        place = (visible, query.dtype, query.device)
        if place not in self._masks:
            allowed = visible(self._queries_BQA[:, :, None], self._attributes_BKA[:, None, : self._extent])
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
