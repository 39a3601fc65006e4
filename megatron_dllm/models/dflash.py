"""A draft with its frozen target, as the training loop knows a model: tokens in, loss out."""

import functools
from collections.abc import Callable

import torch
from megatron.core.transformer.enums import ModelType

from megatron_dllm.models import draft
from megatron_dllm.models.dlm import DiffusionLM
from megatron_dllm.models.scoring import ScoreView
from megatron_dllm.models.target import Target
from megatron_dllm.models.targets.base import whole_text
from megatron_dllm.modes.base import NUM_ATTRIBUTES
from megatron_dllm.parallel import RankTerm


class DraftOfTarget(draft.DraftModel):
    """Parameters and checkpoint are the draft's alone."""

    def __init__(self, config, target: Target, num_features: int, rule=draft.visible, **options):
        super().__init__(config, num_features, rule=rule, **options)
        self.model_type = ModelType.encoder_or_decoder
        self._target = (target,)  # in a tuple: not a submodule, so neither trained nor saved

    @property
    def target(self) -> Target:
        return self._target[0]

    def set_input_tensor(self, input_tensor) -> None:
        """Called by the schedule; there is no stage before this one."""

    # --- what a ScoreView asks of a model ---

    @property
    def true_vocab_size(self) -> int:
        return self.target.model.true_vocab_size

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        return self.target.model.share_embeddings_and_output_weights

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        return self.target.model.shared_embedding_or_output_weight()

    @property
    def output_layer(self):
        return self.target.model.output_layer

    def select_rows(self, hidden_QBD: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        """[N, D] rows of the blocks, numbered as in the whole input, which the context comes before."""
        return DiffusionLM.select_rows(self, hidden_QBD, rows_N - self._context * hidden_QBD.shape[1])

    @torch.no_grad()
    def teacher_rows(self, places_N: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        """[N, D] what the target's head reads at these places of the text, each in the sample that its row (numbered as
        above) is of. Collective over context-parallel ranks; once for each pass."""
        last_SBD, self._last_SBD = whole_text(self._last_SBD, self.pg_collection.cp), None
        B = last_SBD.shape[1]
        return last_SBD.flatten(0, 1).index_select(0, places_N * B + rows_N % B)

    def hidden_states(self, *inputs) -> torch.Tensor:
        """What DraftModel computes."""
        return super().forward(*inputs)

    def forward(
        self,
        tokens_BT: torch.Tensor,
        position_ids_BT: torch.Tensor,
        attributes_BTA: torch.Tensor,
        loss: Callable | None = None,
        terms: dict[str, RankTerm] | None = None,
    ):
        """What `loss(ScoreView)` returns, or without it this rank's logits of the blocks in fp32 [B, N·K, V/tp]. Tokens
        are this rank's [context | blocks], attributes those of all ranks, one after the other."""
        cp = self.pg_collection.cp.size()
        mine_BTA = attributes_BTA[:, : tokens_BT.shape[1]]  # every rank has as many context tokens as another
        S = self._context = int((mine_BTA[0, :, draft.STREAM] == draft.CONTEXT).sum())
        context_BSA = attributes_BTA.unflatten(1, (cp, -1))[:, :, :S].flatten(1, 2)
        context = tokens_BT[:, :S], position_ids_BT[:, :S], context_BSA[..., :NUM_ATTRIBUTES].contiguous()
        if any(term.teacher_N is not None for term in (terms or {}).values()):
            features_SBF, self._last_SBD = self.target.features(*context, last=True)
        else:
            features_SBF = self.target.features(*context)
        embeddings_QBD = self.target.embed(tokens_BT[:, S:])
        hidden = self.hidden_states(features_SBF, embeddings_QBD, position_ids_BT, attributes_BTA)
        if loss is not None:
            return loss(ScoreView(self, hidden, terms))
        B, first = len(tokens_BT), S * len(tokens_BT)
        rows_N = torch.arange(first, first + tokens_BT[:, S:].numel(), device=tokens_BT.device)
        return self.target.model.logits(self.select_rows(hidden, rows_N)).unflatten(0, (-1, B)).transpose(0, 1)


def rule(causal_block: bool, window: int | None):
    """`draft.visible` with the variants that are asked for."""
    if not causal_block and window is None:
        return draft.visible
    return functools.partial(draft.visible, causal_block=causal_block, window=window)
