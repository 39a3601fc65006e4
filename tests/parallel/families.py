"""A reference run on one process, and the layouts that must equal it."""

import functools

import pytest

RELATIVE = 1e-5
slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # a case that only repeats what others show

# name -> (processes, flags)
LAYOUTS = {
    "accumulate 8": (1, "--micro-batch-size 1"),
    "one micro-batch": (1, "--micro-batch-size 8"),
    "DP2": (2, ""),
    "DP2, micro-batch 1": (2, "--micro-batch-size 1"),
    "DP4": (4, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP4": (4, "--tensor-model-parallel-size 4"),
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "TP4 SP": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "PP2 VPP2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "PP2 uneven": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "CP2 a2a": (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "CP2 all_gather": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "CP4 a2a": (4, "--context-parallel-size 4 --cp-comm-type a2a"),
    "CP4 all_gather": (4, "--context-parallel-size 4 --cp-comm-type all_gather"),
    "recompute full": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "recompute block": (1, "--recompute-granularity full --recompute-method block --recompute-num-layers 2"),
    "recompute selective": (1, "--recompute-granularity selective"),
    "TP2 SP recompute": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "TP2 SP PP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "TP2 SP PP2 VPP2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
    "TP2 SP CP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
    "PP2 CP2": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type all_gather"),
    "DP2 CP2": (4, "--context-parallel-size 2"),
    "DP2 TP2 SP": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "DP2 PP2 VPP2": (4, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}


# main_grad is scattered over ranks there: judged by loss and gradient norm
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
DISTRIBUTED_OPTIMIZER = {
    "DP2": (2, "--use-distributed-optimizer"),
    "DP2 overlap": (2, _OVERLAP),
    "DP4 overlap": (4, _OVERLAP),
    "DP2 TP2 SP overlap": (4, f"--tensor-model-parallel-size 2 --sequence-parallel {_OVERLAP}"),
    "DP2 PP2 VPP2 overlap": (
        4,
        f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {_OVERLAP}",
    ),
    "CP2 DP2 overlap": (4, f"--context-parallel-size 2 {_OVERLAP}"),
}
MIXTURE_OF_EXPERTS = {
    "one micro-batch": (1, "--micro-batch-size 8"),
    "DP2 EP2": (2, "--expert-model-parallel-size 2"),
    "DP4 EP4": (4, "--expert-model-parallel-size 4"),
    "TP2 SP ETP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "TP2 SP EP2 ETP1": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
    ),
    "TP2 SP EP2 ETP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"),
    "TP4 SP EP2 ETP2": (
        4,
        "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 2",
    ),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2"),
    "CP2 EP2": (2, "--context-parallel-size 2 --expert-model-parallel-size 2"),
    "DP2 EP2 PP2": (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "recompute full": LAYOUTS["recompute full"],
}


def close(a, b, relative=RELATIVE):
    return a == pytest.approx(b, rel=relative)


class Family:
    """A reference run and the layouts compared with it. Of two steps, the first shows every gradient and the second
    what the optimizer made of them."""

    def __init__(self, pool, folder, argv, steps: int = 2):
        self.pool, self.argv, self.path = pool, [*argv, "--train-iters", str(steps)], str(folder / "reference.pt")
        self.reference = self.pool.run(self.argv, 1, save_reference=self.path, reference=self.path)[0]

    def run(self, processes: int, flags: str, **options):
        return self.pool.run(self.argv + flags.split(), processes, **options)

    def check(self, processes: int, flags: str, gradients: bool = True, worst: float = 1e-5):
        results = self.run(processes, flags, reference=self.path if gradients else None)
        last = results[-1]
        assert close(last["losses"], self.reference["losses"])
        for result in results:
            assert close(result["grad_norms"], self.reference["grad_norms"])
        assert last["evaluations"] == [
            {k: pytest.approx(v, rel=RELATIVE) for k, v in e.items()} for e in self.reference["evaluations"]
        ]
        if gradients:
            assert last["grad_error"] < worst
        return results
