"""Hugging Face folders as the multi-process tests use them: chat data of their words, and an independent answer."""

import json
import sys
from pathlib import Path

import torch
from megatron.core.datasets.utils import Split

from megatron_dllm.arguments import read_command_line
from megatron_dllm.data.datasets import build_datasets
from megatron_dllm.data.stream import CorruptedSamples
from tests.hf_models import VOCABULARY

# 2 steps of 4 samples, up to 32 tokens of one word each
TRAIN = (
    "--dllm-mode mdlm --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 "
    "--eval-iters 0 --log-interval 1 --make-vocab-size-divisible-by 8"
).split()


def write_words(folder: Path) -> str:
    """Chat data in the words of tests/hf_models.py, of many lengths."""
    path = folder / "words.jsonl"
    draw = torch.Generator().manual_seed(5)
    words = lambda n: " ".join(f"w{i}" for i in torch.randint(4, VOCABULARY, (n,), generator=draw).tolist())
    with open(path, "w") as file:
        for i in range(12):
            messages = [dict(role="user", content=words(1 + i % 5)), dict(role="assistant", content=words(3 + 2 * i))]
            file.write(json.dumps(dict(messages=messages)) + "\n")
    return str(path)


def corrupted(argv: list[str], indices) -> tuple[list, object]:
    """(the samples of those global indices, as the training command noises them, its arguments)."""
    before = sys.argv
    sys.argv = ["pretrain_dllm.py", *map(str, argv)]
    try:
        args, tokenizer = read_command_line()
    finally:
        sys.argv = before
    samples = CorruptedSamples(build_datasets(args, tokenizer).train, args, Split.train)
    return [samples[i] for i in indices], args


@torch.no_grad()
def theirs(model, argv: list[str], indices) -> tuple[float, dict[str, float]]:
    """(mdlm's loss of a global batch, nll by "index:place") from a transformers model, one sample after the other."""
    rows, args = corrupted(argv, indices)
    shift = int(args.mdlm_shift_logits)  # then a token is predicted at the place before, and the first one nowhere
    total, supervised, nll = 0.0, 0, {}
    for row in rows:
        n = len(row.sample)
        everything = torch.zeros(1, 1, n, n)  # to be added to the scores: each token sees all others
        logits = model(input_ids=row.x_t_S[None], attention_mask=everything, use_cache=False).logits[0]
        logits, tokens = logits[: n - shift].float(), row.sample.tokens_S[shift:]
        costs = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
        total += float((costs * row.weight_S[shift:]).sum())
        supervised += int(row.sample.loss_mask_S[shift:].sum())
        for place in row.noised_S[shift:].nonzero()[:, 0].tolist():
            nll[f"{row.sample.index}:{place}"] = costs[place].item()
    return total / supervised, nll
