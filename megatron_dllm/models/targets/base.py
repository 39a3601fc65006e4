"""What a draft asks of its target, and the two ends of one that is not made of Megatron's layers.

Shapes: S tokens of the context (this rank's under context parallelism), F features (chosen layers times width).
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dllm.models.scoring import Head
from megatron_dllm.modes.base import DOCUMENT, POSITION
from megatron_dllm.parallel import rank_positions


class Target:
    """A frozen model. model: its embedding and head, as a DiffusionLM has them.

    Nothing of it is a parameter of the run. decodes: whether its keys and values can be kept, and taken back when a
    guess is refused, as generation/dflash.py does.
    """

    model: torch.nn.Module
    decodes = True

    def features(
        self, tokens_BS: torch.Tensor, position_ids_BS: torch.Tensor, attributes_BSA: torch.Tensor, last: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[S, B, F] hidden states of the layers side by side, of this rank's part of the sequence (attributes: of all
        of it, like a DiffusionLM's). Layers after the last one that is read are not run.

        last: also [S, B, D], what the head makes logits of (the final norm's output), for which all layers are run.
        """
        raise NotImplementedError

    @torch.no_grad()
    def embed(self, tokens_BQ: torch.Tensor) -> torch.Tensor:
        """[Q, B, D]"""
        return self.model.embedding(input_ids=tokens_BQ, position_ids=None)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embedding and head, [V, D] each without padding; no head if it is the embedding. Collective over
        tensor-parallel ranks."""
        raise NotImplementedError


class Ends(torch.nn.Module):
    """Embedding and head of a target whose layers are not ours, under the names that a ScoreView looks for.

    embedding_VD: the whole table, on every rank, as nothing is reduced for it; head_VD: likewise, None if it is the
    embedding. Of the head a rank uses its rows, padded as Megatron pads a vocabulary, so that the vocabulary-parallel
    cross entropy is that of a model of ours.
    Raises ValueError (one sentence) for tables that do not fit the configuration.
    """

    share_embeddings_and_output_weights = True  # the head's weight comes from outside of it

    def __init__(
        self,
        config,
        embedding_VD: torch.Tensor,
        head_VD: torch.Tensor | None,
        padded_vocab_size: int,
        vocab_size: int,
        pg_collection=None,
    ):
        super().__init__()
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tied, head_VD = head_VD is None, embedding_VD if head_VD is None else head_VD
        for what, table in (("embedding", embedding_VD), ("head", head_VD)):
            if table.shape != (vocab_size, config.hidden_size):
                raise ValueError(
                    f"the target's {what} is {list(table.shape)}, but its configuration makes it "
                    f"{[vocab_size, config.hidden_size]}: correct one."
                )
        self.true_vocab_size, self.vocab_size = vocab_size, padded_vocab_size
        self.register_buffer("table_VD", embedding_VD.detach(), persistent=False)
        rows = _own_rows(head_VD.detach(), padded_vocab_size, self.pg_collection.tp)
        self.register_buffer("head_VD", rows, persistent=False)
        self.output_layer = Head(
            config.hidden_size,
            padded_vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=True,
            disable_grad_reduce=True,
            tp_group=self.pg_collection.tp,
        )
        self.output_layer.sequence_parallel = False  # as in a DiffusionLM

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """[V/tp, D], this rank's rows of the head."""
        return self.head_VD

    def embedding(self, input_ids: torch.Tensor, position_ids=None) -> torch.Tensor:
        """[Q, B, D]"""
        return torch.nn.functional.embedding(input_ids.t(), self.table_VD)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V/tp] fp32, like a DiffusionLM's."""
        return self.output_layer.logits(hidden_ND, self.head_VD, self.true_vocab_size)


def all_rows(mine_VD: torch.Tensor, vocab_size: int, group) -> torch.Tensor:
    """[V, D] of a table whose rows are split over a group."""
    parts = [torch.empty_like(mine_VD) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine_VD.contiguous(), group=group)
    return torch.cat(parts)[:vocab_size]


def _own_rows(head_VD: torch.Tensor, padded: int, group) -> torch.Tensor:
    """This rank's rows, zeros where the vocabulary is padded; the very table where that is all of it."""
    size = padded // group.size()
    if size == len(head_VD):
        return head_VD
    start = size * group.rank()
    mine = head_VD.new_zeros(size, head_VD.shape[1])
    given = head_VD[start : start + size]
    mine[: len(given)] = given
    return mine


def whole_text(mine_SBD: torch.Tensor, group) -> torch.Tensor:
    """[S, B, D] of all places in order, from ranks that hold zigzag parts. (All of it, not what a rank asks for: blocks
    overlap, and their places are often more than the text has.)"""
    if group.size() == 1:
        return mine_SBD
    length = len(mine_SBD) * group.size()
    parts = mine_SBD.new_empty(length, *mine_SBD.shape[1:])
    torch.distributed.all_gather_into_tensor(parts, mine_SBD.contiguous(), group=group)
    order = torch.cat([rank_positions(length, 1, group.size(), rank) for rank in range(group.size())])
    return parts[order.argsort().to(parts.device)]


class Whole:
    """The whole context in order, from ranks that hold zigzag parts of it; and back.

    tokens_BS, attributes_BSA: as `Target.features` gets them.
    """

    def __init__(self, tokens_BS: torch.Tensor, attributes_BSA: torch.Tensor, group):
        self.tokens_BS, cp = tokens_BS, group.size()
        length = attributes_BSA.shape[1]
        order = torch.cat([rank_positions(length, 1, cp, rank) for rank in range(cp)]).to(tokens_BS.device)
        place = order.argsort()
        if cp > 1:
            parts = [torch.empty_like(tokens_BS) for _ in range(cp)]
            torch.distributed.all_gather(parts, tokens_BS.contiguous(), group=group)
            self.tokens_BS = torch.cat(parts, 1)[:, place]
            attributes_BSA = attributes_BSA[:, place]
        self.position_ids_BS = attributes_BSA[..., POSITION].long()
        self.document_BS = attributes_BSA[..., DOCUMENT]
        self._own = rank_positions(length, 1, cp, group.rank()).to(tokens_BS.device)

    def own(self, features_SBF: torch.Tensor) -> torch.Tensor:
        """This rank's part."""
        return features_SBF if len(self._own) == len(features_SBF) else features_SBF[self._own]
