"""A small model's folder, text that it knows the words of, and its loss by the training program's own model."""

from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron_dllm.data.stream import Collate, CorruptedSamples
from megatron_dllm.modes import get_mode
from megatron_dllm.quantization.batches import data_arguments, open_samples
from megatron_dllm.quantization.source import plan
from tests.hf_models import make
from tests.one_process import one_process
from tests.parallel.naive import naive_logits, naive_loss
from tests.parity.loading import build

SHAPE = dict(hidden_size=128, intermediate_size=256, head_dim=32, num_hidden_layers=2)  # in whole blocks of 128
SEQ, CALIBRATED, MEASURED = 48, 12, 10


def folder(name: str, where: Path, **changes) -> str:
    own_heads = {} if name in ("llada", "dream") else SHAPE
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim" or own_heads}
    return make(name, where, shape=shape | changes)[0]


def write_words(where: Path, documents: int = 24) -> str:
    """Prefix of a corpus: documents of random words of write_tokenizer's, each of 20 to 89 tokens."""
    prefix, draw = str(where / "words"), np.random.default_rng(0)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for i in range(documents):
        ids = [*draw.integers(4, 91, 19 + 3 * i), 1]
        builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(prefix + ".idx")
    return prefix


def arguments(path: str, data: list[str], mode: str, **options):
    """(args of a quantization on this data, its samples), of a Hugging Face folder."""
    source = plan(None, path, mode=mode, **options)
    args = data_arguments(source.args, data, SEQ, seed=1234)
    return args, open_samples(args, source.tokenizer, CALIBRATED + MEASURED)


def own_rows(samples, args, indices: range) -> list:
    """Corrupted as an evaluation of training does it."""
    args.eval_iters, args.eval_global_batch_size = 1, indices.stop
    corrupted = CorruptedSamples(samples, args, Split.valid)
    return [corrupted[index] for index in indices]


def own_logits(path: str, rows: list, args) -> torch.Tensor:
    """[B, Q, V] of Megatron's model with the folder's weights, under the mode's rule."""
    mask = [] if args.dllm_mask_token_id is None else ["--dllm-mask-token-id", str(args.dllm_mask_token_id)]
    with one_process(), torch.no_grad():
        return naive_logits(build(path, *mask, rule=get_mode(args.dllm_mode).visible), Collate(args, 1, 0)(rows), args)


def own_loss(path: str, rows: list, args) -> float:
    """The loss of these rows, token by token."""
    return float(naive_loss(own_logits(path, rows, args), rows, args))
