"""One core attention for every mode: it evaluates the mode's `visible` rule and knows context parallelism.

Megatron's TransformerBlock hands its `attention_mask` unchanged to every core attention, through pipeline
stages and activation recomputation. We pass the attribute tensor there, so the one rule makes the dense mask,
the Flex BlockMask and the tiles of a CPU alike, and no mask kind of a kernel is ever silently replaced by another.

Shapes: s local sequence, b batch, h query heads, g key/value heads, d head size, S global sequence.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule

from megatron_dllm.models.cache import KeyValueCache
from megatron_dllm.models.flex import block_mask, flex
from megatron_dllm.models.tiled import Plan, make_plan, tiled_attention
from megatron_dllm.modes.base import Rule

BACKENDS = ("auto", "sdpa", "flex", "tiled")
TILED_FROM = 512  # keys; times faster than a dense mask: 1.0 to 2.7 there, 0.8 to 1.4 at 256 keys, less at 128


class RuleAttention(MegatronModule):
    """Core attention under a visibility rule, with context parallelism by all-to-all or all-gather.

    forward(query [s,b,h,d], key [k,b,g,d], value [k,b,g,d], attention_mask = attributes_BQA of the global
    sequence of keys in rank-concatenated order, or None where everything is visible) -> [s, b, h*d]. The queries are
    the last s of a rank's k keys: all of them, but for drafts (draft.py).
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        *,
        visible: Rule,
        backend: str = "auto",
        **unused,
    ):
        super().__init__(config=config)
        self.visible, self.backend = visible, backend
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp = pg_collection.cp
        self.cp_comm_type = cp_comm_type
        self.cache: KeyValueCache | None = None  # set while a decoding loop runs the network
        if self.cp.size() > 1 and cp_comm_type not in ("a2a", "all_gather"):
            raise ValueError(f"--cp-comm-type {cp_comm_type} cannot carry a custom mask: use a2a or all_gather.")

    def forward(self, query, key, value, attention_mask, **unused):
        s, b, h, d = query.shape
        if self.cache is not None:
            return self.cache.attend(self, query, key, value, self.visible, self.softmax_scale).reshape(s, b, h * d)
        attributes, cp = attention_mask, self.cp.size()
        own = slice(len(key) - s, len(key))
        if cp > 1 and self.cp_comm_type == "all_gather":
            before = self.cp.rank() * len(key)
            own = slice(before + own.start, before + own.stop)
            key, value = self._gather_sequence(key), self._gather_sequence(value)
        elif cp > 1:
            own = slice(None)
            query, key, value = (self._heads_for_sequence(x) for x in (query, key, value))
        output = self._attend(query, key, value, attributes, own)
        if cp > 1 and self.cp_comm_type == "a2a":
            output = self._sequence_for_heads(output)
        return output.reshape(s, b, h * d)

    def _attend(self, query, key, value, attributes, own: slice):
        """[s,b,h,d] queries, [S,b,g,d] keys and values -> [s,b,h,d]"""
        dropout = self.dropout if self.training else 0.0
        if attributes is not None and self.use_tiled(query, key):
            if dropout:
                raise ValueError("tiled attention has no dropout: use --attention-dropout 0.")
            plan = masks.tiled(self.visible, attributes, own, query.dtype)
            return tiled_attention(query, key, value, plan, self.softmax_scale)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        options = dict(scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1])
        if attributes is not None and self.use_flex(query):
            if dropout:
                raise ValueError("Flex attention has no dropout: use --attention-dropout 0.")
            output = flex(query, key, value, block_mask=masks.block(self.visible, attributes, own), **options)
            return output.permute(2, 0, 1, 3)
        if attributes is not None:
            options["attn_mask"] = masks.dense(self.visible, attributes, own, query.dtype)
        if not dropout:
            return F.scaled_dot_product_attention(query, key, value, **options).permute(2, 0, 1, 3)
        with tensor_parallel.get_cuda_rng_tracker().fork():  # peers hold different heads: different masks
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, **options).permute(2, 0, 1, 3)

    def use_flex(self, query) -> bool:
        return self.backend == "flex" or (self.backend == "auto" and query.is_cuda)

    def use_tiled(self, query, key) -> bool:
        """Whether to attend in tiles, given [s,b,h,d] queries and [S,b,g,d] keys."""
        if self.backend != "auto":
            return self.backend == "tiled"
        return not query.is_cuda and not (self.training and self.dropout) and len(key) >= TILED_FROM

    # --- context parallelism: Megatron's own differentiable collectives over the context-parallel group ---

    def _gather_sequence(self, x):
        """[s,b,g,d] -> [S,b,g,d]; the gradient is reduce-scattered."""
        return tensor_parallel.gather_from_sequence_parallel_region(
            x.contiguous(), tensor_parallel_output_grad=True, group=self.cp
        )

    def _heads_for_sequence(self, x):
        """[s,b,h,d] -> [S,b,h/cp,d]: give away heads, receive the other ranks' positions."""
        s, b, h, d = x.shape
        cp = self.cp.size()
        # contiguous first: an all-to-all into a strided buffer gives wrong gradients without an error
        x = x.view(s, b, cp, h // cp, d).permute(2, 0, 1, 3, 4).contiguous()
        return tensor_parallel.all_to_all(self.cp, x).flatten(0, 1)

    def _sequence_for_heads(self, x):
        """[S,b,h/cp,d] -> [s,b,h,d]: the inverse."""
        S, b, h, d = x.shape
        cp = self.cp.size()
        x = tensor_parallel.all_to_all(self.cp, x.reshape(cp, S // cp, b, h, d).contiguous())
        return x.permute(1, 2, 0, 3, 4).reshape(S // cp, b, cp * h, d)


class _Masks:
    """Masks of the last few micro-batches, shared by all layers.

    An entry keeps its attribute tensor alive, so address and layout identify it, and the version the content;
    recomputation sees a detached alias that shares them all. A pipeline holds several micro-batches at once,
    hence more than one.
    """

    CAPACITY = 4

    def __init__(self):
        self._entries: OrderedDict = OrderedDict()

    def _get(self, key: tuple, attributes: torch.Tensor, make: Callable):
        version = None if attributes.is_inference() else attributes._version  # inference tensors have none
        key += (attributes.data_ptr(), attributes.shape, attributes.stride(), version)
        if key not in self._entries:
            self._entries[key] = (attributes, make())
            if len(self._entries) > self.CAPACITY:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key][1]

    def dense(self, visible: Rule, attributes: torch.Tensor, own: slice, dtype: torch.dtype) -> torch.Tensor:
        """Additive [b, 1, rows, S]: 0 where visible, -inf elsewhere."""

        def make():
            allowed = visible(attributes[:, own, None], attributes[:, None])
            mask = torch.zeros(allowed.shape, dtype=dtype, device=attributes.device)
            return mask.masked_fill_(~allowed, float("-inf"))[:, None]

        return self._get((visible, own.start, dtype), attributes, make)

    def tiled(self, visible: Rule, attributes: torch.Tensor, own: slice, dtype: torch.dtype) -> Plan:
        """Which tiles to multiply under the same rule, and the masks of those seen in part."""
        make = lambda: make_plan(visible, attributes, own, dtype)
        return self._get((visible, own.start, dtype, "tiled"), attributes, make)

    def block(self, visible: Rule, attributes: torch.Tensor, own: slice):
        """Flex BlockMask of the same rule."""
        return self._get((visible, own.start, "block"), attributes, lambda: block_mask(visible, attributes, own))


masks = _Masks()
