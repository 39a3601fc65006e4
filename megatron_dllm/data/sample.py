"""The one thing that flows from every data source to every mode."""

from dataclasses import dataclass

import torch

PADDING_DOCUMENT = -1


@dataclass(frozen=True)
class Sample:
    """One training sequence of S tokens, before noise and before padding to the batch's length.

    tokens_S       int64, clean ids x_0
    loss_mask_S    bool, True where a token is supervised (may be noised and scored)
    document_S     int32, document number inside this sequence (0, 1, ...); -1 is padding, seen by nobody
    position_S     int64, position ids; restart at 0 with every document
    index          place in the global shuffled stream: the sample's only identity, seeds all its noise
    """

    tokens_S: torch.Tensor
    loss_mask_S: torch.Tensor
    document_S: torch.Tensor
    position_S: torch.Tensor
    index: int

    def __len__(self) -> int:
        return self.tokens_S.numel()
