"""A step whose loss or gradient norm is not finite: named by its samples, and not applied.

The verdict falls between backward and the optimizer's step, in `prepare_grads`, where Megatron's loss scaler of fp16
says the same: nothing has been written yet, and a skipped step leaves weights, moments and the learning rate's schedule
as they were, while its samples count as consumed (what --iterations-to-skip does, too). One small reduction over all
ranks makes them agree. Megatron's own check raises on the rank that has found something, without saying in what data.
"""

import math
import sys

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args

from megatron_dllm.metrics import LossCurves
from megatron_dllm.models.scoring import ScoreView

_MOST_NAMED = 8


class BadStep(RuntimeError):
    """A step that must not be applied, and none may be skipped any more. Raised on every rank, with the same text."""


class Guard:
    """Of one run. `begin` before every step, `note` for each of its micro-batches."""

    def __init__(self, curves: LossCurves):
        self._curves = curves
        self.reset()

    def reset(self) -> None:
        self._optimizer = self._iteration = self._norm = None
        self._noted: list[tuple[list[int], torch.Tensor, list]] = []
        self._biases: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self.skipped = False  # the last step

    def begin(self, iteration: int, model: list, optimizer) -> None:
        """iteration: counted from 1."""
        self._iteration, self._norm, self.skipped = iteration, None, False
        self._noted.clear()
        if optimizer is not self._optimizer:
            self._attach(optimizer)
            biases = (getattr(module, "expert_bias", None) for chunk in model for module in chunk.modules())
            self._biases = [bias for bias in biases if bias is not None]
        if get_args().dllm_skip_bad_steps:  # what a step changes before its verdict
            self._curves.keep()
            self._before = [bias.clone() for bias in self._biases]

    def note(self, index: list[int], loss: torch.Tensor, view: ScoreView) -> None:
        """index: global indices of the micro-batch's B samples; loss: its sum, on the last pipeline stage."""
        scored = [(view.rows(term).rows_N, view.rows(term).weights_N, nll_N) for term, nll_N in view.nll.items()]
        self._noted.append((index, loss.detach(), scored))

    def _attach(self, optimizer) -> None:
        prepare, norm = optimizer.prepare_grads, optimizer.get_grad_norm

        def norm_once():  # the optimizer asks again, to clip
            if self._norm is None:
                self._norm = norm()
            return self._norm

        def prepare_and_judge() -> bool:
            return prepare() or self._judge(float(norm_once() or 0.0))

        optimizer.prepare_grads, optimizer.get_grad_norm = prepare_and_judge, norm_once
        self._optimizer = optimizer

    def _judge(self, norm: float) -> bool:
        """Whether the step is skipped. BadStep if it is bad and must not be. Collective over all ranks."""
        device = torch.cuda.current_device()
        losses = torch.stack([loss.float() for _, loss, _ in self._noted] or [torch.zeros((), device=device)])
        bad = (~losses.isfinite()).any().int().clamp(min=int(not math.isfinite(norm)))
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if not bad:
            return False
        self._decide(" and ".join(self._reasons(norm)))
        return True

    def _reasons(self, norm: float) -> list[str]:
        """What is not finite, the same on every rank."""
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (norm, _bad_samples(self._noted)))
        norms = [norm for norm, _ in gathered if not math.isfinite(norm)]
        samples = sorted(set().union(*(samples for _, samples in gathered)))
        named = ", ".join(map(str, samples[:_MOST_NAMED]))
        more = f" and {len(samples) - _MOST_NAMED} more" if len(samples) > _MOST_NAMED else ""
        plural = "s" if len(samples) > 1 else ""
        losses = [f"the loss is not finite in sample{plural} {named}{more}" if samples else "every loss is finite"]
        return losses + [f"the gradient norm is {norm}" for norm in norms[:1]]

    def _decide(self, what: str) -> None:
        args = get_args()
        first = args.consumed_train_samples
        last = first + get_num_microbatches() * args.micro_batch_size * args.data_parallel_size - 1
        what = f"iteration {self._iteration}, trained on samples {first} to {last}: {what}"
        most, before = args.dllm_skip_bad_steps, args.dllm_bad_steps
        if len(before) >= most:
            plural = "s" if len(before) > 1 else ""
            skipped = f", after {len(before)} skipped step{plural} ({', '.join(map(str, before))})" if before else ""
            raise BadStep(
                f"{what}{skipped}; stopped before its update. tools/inspect_batch.py --first INDEX shows a sample; "
                f"--iterations-to-skip {self._iteration} leaves this step out, --dllm-skip-bad-steps "
                f"{most + 1} the next one that is bad."
            )
        before.append(self._iteration)
        self.skipped = True
        self._curves.restore()
        for bias, old in zip(self._biases, self._before, strict=True):
            bias.copy_(old)
        if dist.get_rank() == 0:
            print(
                f"Warning: {what}; its update is skipped, {len(before)} of at most {most}.", file=sys.stderr, flush=True
            )


def _bad_samples(noted: list[tuple[list[int], torch.Tensor, list]]) -> set[int]:
    """Global indices of the samples with a scored row that is not finite; all of a micro-batch if only its sum."""
    found = set()
    for index, loss, scored in noted:
        if torch.isfinite(loss):
            continue
        places = set()
        for rows_N, weights_N, nll_N in scored:
            bad_N = ~(nll_N * weights_N).isfinite()
            places |= set((rows_N[bad_N] % len(index)).tolist())  # rows of [Q, B]
        found |= {index[place] for place in places} or set(index)
    return found
