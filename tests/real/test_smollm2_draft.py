"""A draft for a released model: SmolLM2-135M-Instruct writes the same text in fewer passes beside one that was trained
for minutes on the Python documentation. Where the weights come from: test_smollm2.py."""

import json

import pytest

from examples.smollm2 import MASK
from tests.real.test_smollm2 import folder, python  # noqa: F401 (a fixture)

pytestmark = pytest.mark.real
NEW, PROMPTS, CHARACTERS = 64, 8, 240
STEPS = "--train-iters 400 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10"
UNTRAINED = "--train-iters 1 --lr 0"


@pytest.fixture(scope="module")
def corpus(folder):  # noqa: F811
    """(JSONL of documents, the same in the model's tokens)."""
    path = folder.parent
    python("examples/python_docs_corpus.py", path / "docs.jsonl")
    python(
        "tools/preprocess_data.py --append-eod --tokenizer-type HuggingFaceTokenizer --tokenizer-model", folder,
        "--input", path / "docs.jsonl", "--output-prefix", path / "docs",
    )  # fmt: skip
    return path / "docs.jsonl", path / "docs_text_document"


@pytest.fixture(scope="module")
def prompts(corpus):
    """A file with the beginnings of the last documents, which are held out: the last tenth is."""
    with open(corpus[0], encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    assert len(documents) // 10 < PROMPTS <= -(-len(documents) // 10)
    path = corpus[0].with_name("prompts.jsonl")
    path.write_text("".join(json.dumps(dict(prompt=text[:CHARACTERS])) + "\n" for text in documents[-PROMPTS:]))
    return path


@pytest.fixture(scope="module")
def draft(folder, corpus):  # noqa: F811
    """draft(name, flags) -> folder of a run, one process a core."""

    def train(name, flags):
        path = folder.parent / name
        python(
            "-m torch.distributed.run --standalone --nproc-per-node 2 pretrain_dllm.py --dllm-mode dflash "
            f"--dllm-mask-token-id {MASK} --num-layers 2 --dllm-block-size 8 --dflash-num-anchors 16 --seq-length 128 "
            f"--micro-batch-size 2 --global-batch-size 4 --split 90,10,0 --eval-iters 0 {flags} --log-interval 20 "
            "--save-interval 1000 --no-save-optim --dflash-target", folder, "--data-path", corpus[1], "--save", path,
        )  # fmt: skip
        return path

    return train


def write(run, prompts, *flags) -> tuple[list[list[int]], float]:
    """(what is written, tokens that a pass of the target yields after the one over the prompt)."""
    out = python(
        "tools/generate.py --json --raw --max-new-tokens", NEW, "--load", run, "--prompts-file", prompts, *flags
    )
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(answers) == PROMPTS and all(len(answer["ids"]) == NEW for answer in answers)
    passes = sum(answer["forwards"] - 1 for answer in answers)
    return [answer["ids"] for answer in answers], len(answers) * (NEW - 1) / passes


def test_a_draft_is_accepted_more_when_trained(draft, prompts):
    trained = draft("draft", STEPS)
    alone, one = write(trained, prompts, "--mode", "ar")
    assert one == 1
    before, few = write(draft("untrained", UNTRAINED), prompts)
    after, more = write(trained, prompts)
    print(f"tokens per pass of the target: untrained {few:.3f}, trained {more:.3f}")
    assert before == alone and after == alone
    assert few < 1.02 and more > few + 0.06
