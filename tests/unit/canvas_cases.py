"""block_diffusion, said again in loops: turns, blocks, canvases and who sees whom."""

from types import SimpleNamespace

from megatron_dllm.modes import block_diffusion
from megatron_dllm.modes.base import ANCHOR, BLOCK, CLEAN, DOCUMENT, NOISY, POSITION, STREAM
from megatron_dllm.noise import Draws
from tests.unit.block_cases import PAD

EOS, V = 59, 61
FILL = "fill"


def flags(validate=True, **changes) -> SimpleNamespace:
    """Arguments as parsed, with the mode's checks and defaults applied."""
    values = dict(
        dllm_mode="block_diffusion",
        dllm_pad_token_id=PAD,
        dllm_eos_token_id=EOS,
        dllm_pad_block_size=None,
        dllm_eps=1e-3,
        dllm_block_size=4,
        dllm_sequence_length=64,
        dllm_length_multiple=1,
        dllm_variable_lengths=True,
        vocab_size=V,
        block_diffusion_canvases="all",
        block_diffusion_eos_fill=True,
        block_diffusion_self_conditioning=None,
        encoder_ar_loss_weight=1.0,
    )
    args = SimpleNamespace(**(values | changes))
    if validate:
        block_diffusion.validate(args)
    return args


def laid_out(samples, args, length=None, seed=1):
    """([Canvases], ModelInput)"""
    corrupted = [block_diffusion.corrupt(s, Draws(seed, s.index), args) for s in samples]
    return corrupted, block_diffusion.layout(corrupted, length or max(1, *(len(s) for s in samples)), args)


def turns(sample) -> list[list[int]]:
    """Places of the supervised tokens, turn by turn."""
    found = []
    for i in range(len(sample)):
        if not sample.loss_mask_S[i] or sample.document_S[i] < 0:
            continue
        goes_on = found and found[-1][-1] == i - 1 and sample.document_S[i] == sample.document_S[i - 1]
        if goes_on:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def canvases(sample, args) -> list[list]:
    """Of every block of the sample K entries: the place of a token, FILL, or None."""
    found, K = [], args.dllm_block_size
    for turn in turns(sample):
        for start in range(0, len(turn), K):
            canvas = list(turn[start : start + K])
            ends = start + K >= len(turn)
            last = turn[-1]
            cut = last == args.dllm_sequence_length - 1 and sample.tokens_S[last] != args.dllm_eos_token_id
            fills = ends and not cut and args.block_diffusion_eos_fill
            found.append(canvas + [FILL if fills else None] * (K - len(canvas)))
    return found


def block_numbers(sample, args) -> list[int]:
    """Of every token of the text."""
    number, numbers = 0, []
    begins = {canvas[0] for canvas in canvases(sample, args)}
    for i in range(len(sample)):
        number += i in begins
        numbers.append(number)
    return numbers


def sees(q: tuple, k: tuple) -> bool:
    """The rule in words; q and k are rows of attributes."""
    if q[DOCUMENT] != k[DOCUMENT]:
        return False
    if q[STREAM] == NOISY and k[STREAM] == CLEAN:
        return k[BLOCK] < q[BLOCK]
    if q[STREAM] == NOISY:
        return k[BLOCK] == q[BLOCK]
    return k[STREAM] == CLEAN and k[POSITION] <= q[POSITION]


def expected_part(sample, chosen: list[list], numbers: list[int], noised_of, args) -> list[dict]:
    """What each token of the chosen canvases is; `noised_of(entry, place in the fill)` is what the network sees."""
    found, fill = [], 0
    for canvas in chosen:
        first = canvas[0]
        for k, entry in enumerate(canvas):
            if entry is None:
                found.append(None)
                continue
            target = args.dllm_eos_token_id if entry is FILL else int(sample.tokens_S[entry])
            found.append(
                {
                    "target": target,
                    "sees": noised_of(entry, fill),
                    "offset": k,
                    STREAM: NOISY,
                    BLOCK: numbers[first],
                    POSITION: int(sample.position_S[first]) + k,
                    DOCUMENT: int(sample.document_S[first]),
                    ANCHOR: int(sample.position_S[first]),
                }
            )
            fill += entry is FILL
    return found
