"""A target whose features were written before (tools/cache_features.py): only its two ends are in memory.

What is read equals what the target would compute, bit for bit where micro-batches and layout are those that it was
written with, else but for the rounding of matrix products of other sizes.
"""

import hashlib
import os
from argparse import Namespace

import torch
from megatron.training.arguments import core_transformer_config_from_args

from megatron_dllm.models.targets.base import Ends, Target, Whole
from megatron_dllm.models.targets.store import Store, read_header, verify

_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json "
    "merges.txt chat_template.jinja chat_template.json"
).split()
_SAMPLED = 16  # places of a file of weights that are read, and how many bytes of each
_SAMPLE_BYTES = 4096
_FLAGS = dict(
    target="--dflash-target",
    backend="--dflash-target-backend",
    layers="--dflash-target-layers",
    tokenizer="the tokenizer",
    template="--chat-template",
    length="--seq-length",
    precision="the precision",
    seed="--seed",
    documents="--dllm-cross-document-attention",
    supervision="--dllm-padding",
    filling="--dllm-pad-block-size",
)


def identity(args: Namespace) -> dict:
    """What features depend on, apart from the samples themselves, which are compared one by one."""
    return dict(
        target=target_identity(args.dflash_target),
        backend=args.dflash_target_backend,
        layers=list(args.dflash_target_layers),
        tokenizer=tokenizer_identity(args),
        template=_of_text_or_file(args.chat_template),
        length=args.dllm_sequence_length,
        precision="bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
        seed=args.seed,
        documents=bool(args.dllm_cross_document_attention),
        supervision=args.dllm_padding,
        filling=args.dllm_pad_block_size,
    )


def target_identity(path: str) -> str:
    """Hash of a folder's configuration and of its weights: their index, headers, sizes, and some bytes of each file, so
    that a model trained further is another one. Cheap for any size."""
    from megatron_dllm.checkpoint import iteration_folder

    is_hf = os.path.isfile(os.path.join(path, "config.json"))
    folder = path if is_hf else iteration_folder(path, None)
    h = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        file = os.path.join(folder, name)
        if not os.path.isfile(file) or (is_hf and name != "config.json" and ".safetensors" not in name):
            continue
        size = os.path.getsize(file)
        h.update(f"{name}:{size};".encode())
        with open(file, "rb") as data:
            if name.endswith(".json") or size <= _SAMPLED * _SAMPLE_BYTES:
                h.update(data.read())
                continue
            for place in range(_SAMPLED):
                data.seek((size - _SAMPLE_BYTES) * place // (_SAMPLED - 1))
                h.update(data.read(_SAMPLE_BYTES))
    return h.hexdigest()


def tokenizer_identity(args: Namespace) -> str:
    """Hash of the tokenizer's kind and files."""
    h = hashlib.sha256(f"{args.tokenizer_type}:{args.vocab_size};".encode())
    path = args.tokenizer_model
    files = []
    if path is not None:
        files = [os.path.join(path, name) for name in _TOKENIZER_FILES] if os.path.isdir(path) else [path]
    for file in files:
        if os.path.isfile(file):
            h.update(os.path.basename(file).encode())
            with open(file, "rb") as data:
                h.update(data.read())
    return h.hexdigest()


def _of_text_or_file(text: str | None) -> str | None:
    if text is None:
        return None
    data = text.encode()
    if os.path.isfile(text):
        with open(text, "rb") as file:
            data = file.read()
    return hashlib.sha256(data).hexdigest()


def check(args: Namespace) -> None:
    """ValueError (one sentence) unless the features are those of this run, and of as many samples as it reads."""
    args.dflash_features = os.path.abspath(args.dflash_features)
    header = read_header(args.dflash_features)
    here, there = identity(args), header["identity"]
    for name, value in here.items():
        if there.get(name) != value:
            shown = "" if isinstance(value, str) and len(value) == 64 else f" ({there.get(name)}, not {value})"
            raise ValueError(
                f"--dflash-features {args.dflash_features} was written with another {_FLAGS[name].removeprefix('the ')}"
                f"{shown}: train with that one, or write a new folder with tools/cache_features.py."
            )
    wanted = args.train_samples
    if wanted is None:
        per_step = args.global_batch_size or args.micro_batch_size * max(
            1,
            args.world_size // (args.tensor_model_parallel_size * args.context_parallel_size),
        )
        wanted = args.train_iters * per_step
    if wanted > header["samples"] and not header["every_epoch"]:
        raise ValueError(
            f"--dflash-features {args.dflash_features} is of {header['samples']} samples, and this run reads {wanted}: "
            f"train for fewer, or write a new folder with tools/cache_features.py --num-samples {wanted}."
        )
    verify(args.dflash_features)


def build(args: Namespace, pg_collection=None) -> "OfflineTarget":
    """On this rank."""
    store = Store(args.dflash_features)
    embedding_VD, head_VD = (store.table(name) for name in ("embedding", "head"))
    config = core_transformer_config_from_args(args)
    ends = Ends(config, embedding_VD, head_VD, args.padded_vocab_size, args.vocab_size, pg_collection)
    return OfflineTarget(store, ends.cuda())


class OfflineTarget(Target):
    """Ends of a target, and its features of known samples."""

    decodes = False

    def __init__(self, store: Store, ends: Ends):
        self._store, self.model = store, ends

    @torch.no_grad()
    def features(
        self, tokens_BS: torch.Tensor, position_ids_BS: torch.Tensor, attributes_BSA: torch.Tensor, last: bool = False
    ) -> torch.Tensor:
        """Zeros at padding, which is seen by nothing. Raises ValueError (one sentence) for an unknown sample, and for
        `last`, which is not written."""
        if last:
            raise ValueError(f"{self._store.path} holds no last hidden states: leave out --dflash-features.")
        whole = Whole(tokens_BS, attributes_BSA, self.model.pg_collection.cp)
        B, S = whole.tokens_BS.shape
        device = tokens_BS.device
        like = self.model.table_VD
        features_SBF = torch.zeros(S, B, self._store.header["width"], dtype=like.dtype, pin_memory=like.is_cuda)
        rows = (x.cpu() for x in (whole.tokens_BS, whole.position_ids_BS, whole.document_BS))
        for b, sample in enumerate(zip(*rows, strict=True)):
            found = self._store.features(*sample)
            features_SBF[: len(found), b] = found
        return whole.own(features_SBF.to(device, non_blocking=True))
