"""The one entry to the data: which source the flags ask for."""

from dataclasses import dataclass
from typing import Protocol

from megatron_dllm.data.sample import Sample
from megatron_dllm.data.tokenizer import Tokenizer


class Samples(Protocol):
    """An endless stream of samples that repeats by epochs; `len` is the size of one epoch."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Datasets:
    train: Samples | None
    valid: Samples | None
    test: Samples | None


def build_datasets(args, tokenizer: Tokenizer) -> Datasets:
    """Open and check the data that the flags name. Raises ValueError for missing, empty or malformed data."""
    if args.sft_data_path is not None:
        from megatron_dllm.data.sft import build_chat

        return Datasets(*build_chat(args, tokenizer))
    from megatron_dllm.data.text import build_text

    datasets = Datasets(*build_text(args, tokenizer))
    if datasets.train is None:
        raise ValueError(f"--split {args.split} leaves no document to train on: give the first share more.")
    if datasets.valid is None and datasets.test is not None:
        raise ValueError(
            f"--split {args.split} gives documents to the test set and none to validation, which Megatron evaluates "
            "first: give validation a share, or the test set none."
        )
    return datasets
