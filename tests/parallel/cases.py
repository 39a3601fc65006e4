"""Data and flags that the multi-process tests share."""

import json
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

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


def write_chat(folder: Path) -> str:
    """Chat data of many lengths; of every fifth sample the answer is cut off, so nothing of it is scored."""
    path = folder / "chat.jsonl"
    with open(path, "w") as file:
        for i in range(40):
            question = "Why? " * (1 + i % 4) if i % 5 else "So long a question that its answer is cut off. " * 3
            answer = ANSWERS[i % 5][: 5 + 3 * i]
            messages = [dict(role="user", content=question), dict(role="assistant", content=answer)]
            file.write(json.dumps(dict(messages=messages)) + "\n")
    return str(path)


def write_text(folder: Path, documents: int = 60) -> str:
    """Megatron .bin/.idx of byte ids: documents of 5 to 150 tokens, so sequences hold parts of several."""
    prefix = str(folder / "text")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    text = " ".join(ANSWERS) * 3
    for i in range(documents):
        ids = list(text[i : i + 5 + (i * 37) % 146].encode()) + [257]
        builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(prefix + ".idx")
    return prefix
