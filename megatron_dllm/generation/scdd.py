"""Decoding of self-correcting models (`--dllm-mode scdd`): tokens that were written are looked at again in every step.

The chain of modes/scdd.py is walked back from t = 1 to 0 in equal steps. From t to s = t - 1/steps, with q the
network's prediction of the clean token and Q(v) = (1 - rho_s) / K + rho_s q(v):

    a masked token    stays masked with probability a_s / a_t, else becomes v with probability Q(v)
    a visible one, z  becomes v with probability proportional to Q(v) (rho_t / rho_s 1[v = z] + (1 - rho_t / rho_s) / K)

so what later evidence speaks against is replaced. The last step ends at s = 0: nothing is masked, Q = q. Above
temperature 0 tokens are drawn from this, which is exact for as many steps as the chain has. At temperature 0 a step
unmasks the most trusted tokens, their share by the same schedule, and replaces a visible token where another one is
the likeliest of all. Prompts stay. A step that could change nothing of a finished canvas is not skipped: correcting is
what it is for.
"""

import torch

from megatron_dllm.generation.llada import CanvasRow
from megatron_dllm.generation.network import Pass
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Decoding
from megatron_dllm.generation.selection import draw
from megatron_dllm.modes.scdd import Level, schedule


class CorrectingRow(CanvasRow):
    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        self._places = (~self.given).nonzero()[:, 0]
        steps = self.config.steps or len(self._places)
        times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        self._levels: Level = schedule(times, decoding.args)
        self._step, self._last = 0, steps - 1
        # ids that the tokenizer does not have may be noise in training, but are no text
        self._never = torch.tensor([self.mask_id, *range(decoding.vocab_size, decoding.args.vocab_size)])

    @property
    def settled(self) -> int:
        return len(self.tokens) if self.done else int(self._places[0])

    def passes(self) -> list[Pass]:
        return [self.whole(self._places)]

    def take(self, logits: list[torch.Tensor]) -> None:
        candidates = self.candidates(logits[0])
        z_C = self.tokens[self._places]
        q_CV = candidates.likely().softmax(-1).cpu()
        absorbed_t, absorbed_s = self._levels.absorbed[self._step : self._step + 2].tolist()
        rho_t, rho_s = self._levels.rho[self._step : self._step + 2].tolist()
        back_CV = step_back(q_CV, z_C, self._never, rho_t, rho_s)
        is_masked = z_C == self.mask_id
        if self.config.temperature:
            ids_C = draw(back_CV, self.draws.uniform("tokens", len(z_C)))
            stays = self.draws.uniform("absorbed", len(z_C)) < absorbed_s / absorbed_t
        else:
            ids_C = back_CV.argmax(-1)
            stays = self._least_trusted(back_CV.amax(-1), is_masked, absorbed_s)
        new = torch.where(is_masked & stays, z_C, ids_C)
        changed = new != z_C
        self.write(self._places[changed], new[changed], back_CV.gather(-1, ids_C[:, None])[changed, 0])
        self._step += 1
        self.done = self._step > self._last

    def _least_trusted(self, trust_C: torch.Tensor, is_masked: torch.Tensor, absorbed: float) -> torch.Tensor:
        """[C] bool: the masked tokens that stay so that a share `absorbed` of all places is masked."""
        count = min(int(is_masked.sum()), int(absorbed * len(trust_C) + 0.5))
        order = trust_C.masked_fill(~is_masked, float("inf")).argsort(stable=True)
        stays = torch.zeros_like(is_masked)
        stays[order[:count]] = True
        return stays


def step_back(q_CV: torch.Tensor, z_C: torch.Tensor, never: torch.Tensor, rho_t: float, rho_s: float) -> torch.Tensor:
    """[C, V] float64: what each place holds one step earlier, if it is not masked then. never: ids that are no text,
    the mask first."""
    K = q_CV.shape[-1] - 1
    mixed_CV = (1 - rho_s) / K + rho_s * q_CV
    mixed_CV[:, never] = 0
    kept = rho_t / rho_s if rho_s > 0 else 1.0
    seen = torch.full_like(mixed_CV, (1 - kept) / K)
    seen[torch.arange(len(z_C)), z_C] += kept
    visible = (z_C != never[0])[:, None]
    posterior = torch.where(visible, mixed_CV * seen, mixed_CV)
    return posterior / posterior.sum(-1, keepdim=True)
