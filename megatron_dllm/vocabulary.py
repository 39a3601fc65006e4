"""How many tokens the model knows, and which of them mean something to a run: mask, padding, EOS.

Every check raises ValueError with one sentence that says what to do.
"""

from types import ModuleType

from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.models import get_family


def resolve_vocabulary(args, tokenizer: Tokenizer, mode: ModuleType) -> None:
    """Fill in vocab_size (rows that are tokens), padded_vocab_size, and the ids of mask, padding and EOS (or None)."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    if args.vocab_size is not None and args.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but --vocab-size gives the embedding only "
            f"{args.vocab_size} rows: raise it or leave it out."
        )
    args.vocab_size = args.vocab_size or tokenizer.vocab_size
    if args.padded_vocab_size is None:
        args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)
    if args.padded_vocab_size < args.vocab_size:
        raise ValueError(
            f"--padded-vocab-size {args.padded_vocab_size} is smaller than the vocabulary of {args.vocab_size}."
        )
    args.dllm_eos_token_id = tokenizer.eos_id
    args.dllm_pad_token_id = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
    if args.dllm_pad_token_id is None:
        args.dllm_pad_token_id = 0  # padding is seen by nobody; any valid id will do
    if not mode.NEEDS_MASK_TOKEN:
        return
    if args.dllm_mask_token_id is None:
        args.dllm_mask_token_id = tokenizer.mask_id
    if args.dllm_mask_token_id is None and args.dllm_family is not None:
        usual = get_family(args.dllm_family).mask_token_id
        if usual is not None and usual < args.vocab_size:  # not in a vocabulary of another tokenizer's size
            args.dllm_mask_token_id = usual
    tokenizer.mask_id = args.dllm_mask_token_id  # clean data must not contain it, whichever it is
    check_mask_token(args.dllm_mask_token_id, args.vocab_size, tokenizer)


def check_mask_token(mask_id: int | None, vocab_size: int, tokenizer: Tokenizer) -> None:
    """ValueError unless `mask_id` is a row of the embedding and no token with another meaning."""
    if mask_id is None:
        raise ValueError("the tokenizer has no mask token: give --dllm-mask-token-id, an id that text never contains.")
    if not 0 <= mask_id < vocab_size:
        raise ValueError(
            f"mask token id {mask_id} is outside the vocabulary of {vocab_size}: give an id below it with "
            "--dllm-mask-token-id, or raise --vocab-size."
        )
    for name in ("pad", "eos", "bos"):
        if mask_id == getattr(tokenizer, f"{name}_id"):
            raise ValueError(
                f"mask token id {mask_id} is also the {name} token, which would then be unlearnable: choose an unused "
                "id with --dllm-mask-token-id."
            )
