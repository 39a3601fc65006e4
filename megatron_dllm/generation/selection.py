"""Which masked tokens to commit, and to what: the numbers behind a mode's `reverse`.

Everything is float64: Gumbel noise in float32 is biased in the tail, and cannot tell apart confidences
near 1. Random numbers come from CPU generators, so that every device draws the same ones.

Shapes: C masked tokens of one row's current block, V true vocabulary.
"""

import torch

from megatron_dllm.noise import hashed_seed

_LARGEST_BELOW_ONE = 1 - 2**-53


def quotas(masked: int, steps: int) -> list[int]:
    """How many of `masked` tokens to commit in each step: as even as it goes, earlier steps take the rest."""
    return [masked // steps + (step < masked % steps) for step in range(steps)]


def gumbel_argmax(logits_CV: torch.Tensor, temperature: float, uniform_CV: torch.Tensor) -> torch.Tensor:
    """[C] ids drawn from softmax(logits / temperature), given uniform float64 noise in [0, 1].

    Finite noise for u = 0 and u = 1 too, so an id whose logit is -inf is never drawn.
    """
    u = uniform_CV.clamp(torch.finfo(torch.float64).tiny, _LARGEST_BELOW_ONE)
    return (logits_CV - temperature * torch.log(-torch.log(u))).argmax(-1)


class RowDraws:
    """The random numbers of one prompt: a function of (seed, its own tokens, how many equal prompts came before).

    So they do not depend on the rest of the batch, and a prompt given twice is answered twice.
    """

    def __init__(self, seed: int, tokens: list[int], copy: int = 0):
        self._seed = hashed_seed(seed, "sampler", " ".join(map(str, tokens)), copy)
        self._generators: dict[str, torch.Generator] = {}

    def uniform(self, stream: str, *shape: int) -> torch.Tensor:
        """float64 in [0, 1), the next ones of the named stream."""
        if stream not in self._generators:
            self._generators[stream] = torch.Generator().manual_seed(hashed_seed(self._seed, stream))
        return torch.rand(*shape, dtype=torch.float64, generator=self._generators[stream])


class Candidates:
    """The masked tokens of a block as `reverse` sees them: without positions, layouts or vocabulary shards.

    logits_CV: any float type, without padding columns; mask_id: never predicted, as a clean text has none.
    """

    def __init__(
        self,
        logits_CV: torch.Tensor,
        mask_id: int,
        temperature: float = 0.0,
        remasking: str = "low_confidence",
        *,
        draws: RowDraws,
    ):
        self._logits_CV = logits_CV.double()
        self._mask_id, self._temperature, self._remasking, self._draws = mask_id, temperature, remasking, draws

    def __len__(self) -> int:
        return len(self._logits_CV)

    def propose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids_C int64, confidence_C float64): a token for each position and how much to trust it.

        The confidence is the token's probability at temperature 1 among the whole vocabulary, or, with
        random remasking, a number that does not depend on the logits.
        """
        allowed = self._logits_CV.clone()
        allowed[:, self._mask_id] = float("-inf")
        if self._temperature == 0:
            ids_C = allowed.argmax(-1)
        else:
            uniform = self._draws.uniform("tokens", *allowed.shape).to(allowed.device)
            ids_C = gumbel_argmax(allowed, self._temperature, uniform)
        if self._remasking == "random":
            return ids_C, self._draws.uniform("order", len(self)).to(ids_C.device)
        chosen = self._logits_CV.gather(-1, ids_C[:, None])[:, 0]
        return ids_C, torch.exp(chosen - self._logits_CV.logsumexp(-1))
