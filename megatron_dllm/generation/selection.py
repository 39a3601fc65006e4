"""Which masked tokens to commit, and to what: the numbers behind a mode's `reverse`.

Everything is float64: Gumbel noise in float32 is biased in the tail, and cannot tell apart confidences
near 1. Random numbers come from CPU generators, so that every device draws the same ones.

Shapes: C masked tokens of one row's current block, V true vocabulary.
"""

import copy

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


def keep_likely(logits_CV: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """The logits with -inf outside the `top_k` largest, then outside the smallest set with probability `top_p` of what
    is left (nucleus; Holtzman et al. 2020). The largest stays always; equals of the last one kept by `top_k` stay."""
    if top_k is not None and top_k < logits_CV.shape[-1]:
        least = logits_CV.topk(top_k, dim=-1).values[..., -1:]
        logits_CV = logits_CV.masked_fill(logits_CV < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits_CV.sort(dim=-1, descending=True, stable=True)
        probability = ordered.softmax(-1)
        outside = probability.cumsum(-1) - probability >= top_p  # those before it are enough
        outside[..., 0] = False
        outside = torch.zeros_like(outside).scatter_(-1, order, outside)
        logits_CV = logits_CV.masked_fill(outside, float("-inf"))
    return logits_CV


def draw(probabilities_CV: torch.Tensor, uniform_C: torch.Tensor) -> torch.Tensor:
    """[C] ids, each drawn from its row of float64 probabilities (of any sum) by one number in [0, 1)."""
    cumulative = probabilities_CV.cumsum(-1)
    below = cumulative <= uniform_C.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return below.sum(-1).clamp(max=probabilities_CV.shape[-1] - 1)


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
    tempered: confidences are probabilities of the distribution that tokens are drawn from, not of the network's.
    """

    def __init__(
        self,
        logits_CV: torch.Tensor,
        mask_id: int,
        temperature: float = 0.0,
        remasking: str = "low_confidence",
        *,
        draws: RowDraws,
        top_k: int | None = None,
        top_p: float | None = None,
        tempered: bool = False,
    ):
        self._logits_CV = logits_CV.double()
        self._normaliser_C = self._logits_CV.logsumexp(-1)  # with the mask, which is then never wanted again
        if self._logits_CV.data_ptr() == logits_CV.data_ptr():
            self._logits_CV = logits_CV.clone()
        self._logits_CV[:, mask_id] = float("-inf")
        self._temperature, self._remasking, self._draws = temperature, remasking, draws
        self._top_k, self._top_p, self._tempered = top_k, top_p, tempered
        self._proposed: tuple | None = None

    def __len__(self) -> int:
        return len(self._logits_CV)

    def likely(self) -> torch.Tensor:
        """[C, V] logits of what may be drawn, divided by the temperature (not by 0): never the mask, top-k, top-p."""
        logits_CV = self._logits_CV / self._temperature if self._temperature else self._logits_CV
        return keep_likely(logits_CV, self._top_k, self._top_p)

    def distribution(self) -> torch.Tensor:
        """[C, V] float64 probabilities that tokens are drawn from; at temperature 0 all on the likeliest."""
        likely = self.likely()
        if self._temperature:
            return likely.softmax(-1)
        return torch.zeros_like(likely).scatter_(-1, likely.argmax(-1, keepdim=True), 1.0)

    def draw(self, stream: str = "tokens") -> torch.Tensor:
        """[C] ids."""
        likely = self.likely()
        if self._temperature == 0:
            return likely.argmax(-1)
        return gumbel_argmax(likely, 1.0, self._draws.uniform(stream, *likely.shape).to(likely.device))

    def propose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids_C int64, confidence_C float64): a token for each position and how much to trust it.

        The confidence is the token's probability at temperature 1 among the whole vocabulary (unless `tempered`), or,
        with random remasking, a number that does not depend on the logits. The same however often it is called.
        """
        if self._proposed is None:
            ids_C = self.draw()
            if self._remasking == "random":
                confidence_C = self._draws.uniform("order", len(self)).to(ids_C.device)
            else:
                logits_CV, normaliser_C = self._logits_CV, self._normaliser_C
                if self._tempered and self._temperature:
                    logits_CV = self.likely()
                    normaliser_C = logits_CV.logsumexp(-1)
                confidence_C = torch.exp(logits_CV.gather(-1, ids_C[:, None])[:, 0] - normaliser_C)
            self._proposed = ids_C, confidence_C
        return self._proposed

    def of(self, some_C: torch.Tensor) -> "Candidates":
        """Some of them ([C] bool, on the CPU), with what was proposed for them."""
        some = copy.copy(self)
        some_C = some_C.to(self._logits_CV.device)
        some._logits_CV, some._normaliser_C = self._logits_CV[some_C], self._normaliser_C[some_C]
        some._proposed = tuple(x[some_C] for x in self.propose())
        return some

    def trust(self, chosen_K: torch.Tensor) -> torch.Tensor:
        """Confidence of some of the proposed tokens."""
        return self.propose()[1][chosen_K]
