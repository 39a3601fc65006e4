"""What a Hugging Face folder says about a run: architecture, token ids, tokenizer, as defaults of Megatron's flags."""

import os

from megatron_dllm.models import recognise
from megatron_dllm.models.family import Family
from megatron_dllm.models.hf import read_config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def folder_defaults(path: str, family: Family | None = None) -> dict:
    """Defaults for a run that names the folder. Raises ValueError (one sentence) for what is not implemented."""
    config = read_config(path)
    defaults = config_defaults(config, family or recognise(config))
    if has_tokenizer(path):
        defaults |= dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path)
    return defaults


def config_defaults(config: dict, family: Family) -> dict:
    """What a config.json says about a run. Raises ValueError like `folder_defaults`."""
    defaults = family.read(config) | family.suggested | dict(dllm_family=family.name)
    mask = config.get("mask_token_id")
    if isinstance(mask, int) and mask >= 0:
        defaults["dllm_mask_token_id"] = mask
    return defaults


def has_tokenizer(path: str) -> bool:
    return any(os.path.isfile(os.path.join(path, name)) for name in _TOKENIZER_FILES)


def misread_tokenizer(path: str) -> str | None:
    """The class that transformers' AutoTokenizer takes instead of the one that the folder names, if it does."""
    from transformers import AutoTokenizer

    from megatron_dllm.data.tokenizer import HuggingFace

    try:
        ours, theirs = HuggingFace(path).hf, AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # code of the folder's own
        return None
    return None if type(ours) is type(theirs) else type(theirs).__name__
