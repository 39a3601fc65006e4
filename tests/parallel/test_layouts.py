"""Every layout equals the single process: losses, gradient norms, and each gradient against a naive reference.

The reference of a family of cases runs once on one process; it also writes the gradients of the first step
computed the plain way (full logits, F.cross_entropy, autograd over the whole global batch).
"""

import json

import pytest

RELATIVE = 1e-5
TINY = (
    "--dllm-mode mdlm --model-preset tiny --tokenizer-type ByteLevelTokenizer --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 3 --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 10 "
    "--weight-decay 0.1 --eval-iters 1 --eval-interval 1000 --log-interval 1 --make-vocab-size-divisible-by 8"
).split()

ANSWERS = (
    "Megatron splits matrices by column and by row.",
    "Yes.",
    "A block of text is noised and then denoised, all positions at once, until no mask is left in it.",
    "Positions restart in every document.",
    "In every layout the same sample meets the same noise.",
)


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    """Chat data of many lengths; every fifth sample is longer than the sequence before its answer begins, so
    nothing of it is scored, and one micro-batch of the first step consists of such samples alone."""
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    with open(path, "w") as file:
        for i in range(40):
            question = "Why? " * (1 + i % 4) if i % 5 else "So long a question that its answer is cut off. " * 3
            messages = [
                dict(role="user", content=question),
                dict(role="assistant", content=ANSWERS[i % 5][: 5 + 3 * i]),
            ]
            file.write(json.dumps(dict(messages=messages)) + "\n")
    return str(path)


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


def close(a, b, relative=RELATIVE):
    return a == pytest.approx(b, rel=relative)


class Family:
    """A reference run and the layouts compared with it."""

    def __init__(self, pool, folder, argv):
        self.pool, self.argv, self.path = pool, argv, str(folder / "reference.pt")
        self.reference = self.pool.run(argv, 1, save_reference=self.path, reference=self.path)[0]

    def check(self, processes: int, flags: str, gradients: bool = True):
        results = self.pool.run(self.argv + flags.split(), processes, reference=self.path if gradients else None)
        last = results[-1]
        assert close(last["losses"], self.reference["losses"])
        for result in results:
            assert close(result["grad_norms"], self.reference["grad_norms"])
        assert last["evaluations"] == [
            {k: pytest.approx(v, rel=RELATIVE) for k, v in e.items()} for e in self.reference["evaluations"]
        ]
        if gradients:
            assert last["grad_error"] < 1e-5
        return results


@pytest.fixture(scope="module")
def chat_family(pool, chat, tmp_path_factory):
    return Family(pool, tmp_path_factory.mktemp("reference"), [*TINY, "--sft-data-path", chat])


def test_the_single_process_equals_the_naive_computation(chat_family):
    reference = chat_family.reference
    assert close(reference["losses"][0], reference["naive_loss"], 1e-6)
    assert reference["grad_error"] < 2e-6
    assert len(reference["losses"]) == 3 and reference["grad_norms"][0] > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(chat_family, name):
    chat_family.check(*LAYOUTS[name])


@pytest.mark.parametrize("name", DISTRIBUTED_OPTIMIZER)
def test_distributed_optimizer(chat_family, name):
    chat_family.check(*DISTRIBUTED_OPTIMIZER[name], gradients=False)
