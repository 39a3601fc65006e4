"""Encoder and canvas in one network (DiffusionGemma, Google 2026).

The encoder reads the text causally; a canvas of K tokens is denoised in both directions with all clean text before it
in view. Both are the same layers, and one pass over [text | canvases] computes both: the keys and values of the text
that a canvas sees are those of the text's own rows, which never look at a canvas. Sliding windows are the
model's affair.

Blocks: every turn (a maximal run of supervised tokens of one document; in packed text a document) is cut into blocks
of K from its start. `--block-diffusion-canvases` of them, drawn uniformly, become canvases. Their tokens are replaced
by uniformly drawn ones (which may be the same) at one level a sample, t = eps + (1 - eps) u, and all of them are
scored, replaced or not:

    D    = Σ_{i of the canvases} -log q(x_i | canvas of i, x_0 of earlier blocks)  /  N_D
    AR   = Σ_i -log q(x_i+1 | x_0 up to i)  /  N_AR,     all neighbours of one document, prompts too
    loss = D + encoder_ar_loss_weight · AR

Decoding always denoises whole canvases. So the last canvas of a turn goes on with supervised EOS (the fill), which no
text row has: `--no-block-diffusion-eos-fill` leaves it short instead. Where the end of a turn is not in the sample it
is always short.

`--block-diffusion-self-conditioning P`: with probability P a sample's canvases are denoised a second time, knowing what
was predicted the first time. Here the coin is drawn; the training loop does the rest.

Shapes: S text, C canvases of K tokens, D = C·K (and padding), Q = S + D, N blocks chosen of one sample, F its fill;
logits of a canvas at i predict token i, those of the text token i+1.
"""

import argparse
import math
from dataclasses import dataclass

import torch

from megatron_dllm.data.sample import PADDING_DOCUMENT, Sample
from megatron_dllm.modes import common
from megatron_dllm.modes.base import (
    ANCHOR,
    BLOCK,
    CLEAN,
    DOCUMENT,
    NOISY,
    NUM_ATTRIBUTES,
    POSITION,
    STREAM,
    Corrupted,
    LossTerm,
    ModelInput,
    Term,
)
from megatron_dllm.noise import Draws, ValidationDraws

NEEDS_MASK_TOKEN = False
FULL_WITHIN_DOCUMENT = False
USES = {"dllm_eps", "dllm_block_size"}
CANVAS = 256  # as published
CHOICE, COINS = "block diffusion canvases", "block diffusion self-conditioning"  # the random streams


def add_args(group) -> None:
    group.add_argument(
        "--block-diffusion-canvases",
        type=_canvases,
        default=1,
        metavar="selected|all|K",
        help="How many blocks of a sample are denoised: selected (one, drawn uniformly; default), so many, or all.",
    )
    group.add_argument(
        "--block-diffusion-eos-fill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Continue the last canvas of a turn with supervised EOS, as decoding will write it (default).",
    )
    group.add_argument(
        "--block-diffusion-self-conditioning",
        type=float,
        default=None,
        metavar="P",
        help="Probability that a sample's canvases are denoised knowing a first prediction; default 0.5 where the "
        "model can, else 0.",
    )
    group.add_argument(
        "--encoder-ar-loss-weight", type=float, default=1.0, help="Weight of the encoder's next-token term; 0: none."
    )


def _canvases(text: str) -> int | str:
    if text in ("selected", "all"):
        return dict(selected=1, all="all")[text]
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: give selected, all or a number of at least 1.")
    return int(text)


def validate(args) -> None:
    common.validate_eps(args)
    common.validate_blocks(args, default=CANVAS)
    longest = max(CANVAS, args.dllm_sequence_length)
    if args.dllm_block_size > longest:
        raise ValueError(
            f"--dllm-block-size {args.dllm_block_size}: no text of --seq-length {args.dllm_sequence_length} fills such "
            f"a canvas, give at most {longest}."
        )
    if args.dllm_pad_block_size is not None:
        raise ValueError(
            "--dllm-pad-block-size puts EOS into the text, and here only a turn's last canvas is filled with it (by "
            "default): remove it."
        )
    if args.block_diffusion_eos_fill and args.dllm_eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token to fill canvases with: give --no-block-diffusion-eos-fill.")
    weight = args.encoder_ar_loss_weight
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"--encoder-ar-loss-weight {weight} is not a weight: give a number of at least 0.")
    _validate_coin(args)
    if args.block_diffusion_canvases == "all":  # samples differ in their number of blocks
        args.dllm_variable_lengths = True
    elif args.block_diffusion_canvases > args.dllm_sequence_length:
        raise ValueError(
            f"--block-diffusion-canvases {args.block_diffusion_canvases}: no text has more blocks than tokens, give at "
            f"most --seq-length {args.dllm_sequence_length}, or all."
        )


def _validate_coin(args) -> None:
    able = getattr(args, "dllm_architecture", "standard") == "diffusion_gemma"
    if args.block_diffusion_self_conditioning is None:
        args.block_diffusion_self_conditioning = 0.5 if able else 0.0
    probability = args.block_diffusion_self_conditioning
    if not 0 <= probability <= 1:
        raise ValueError(f"--block-diffusion-self-conditioning {probability} is no probability: give 0 to 1.")
    if probability and not able:
        raise ValueError(
            f"--block-diffusion-self-conditioning {probability}: the model has no self-conditioning, leave it out."
        )


def streams(args) -> int:
    return 1


def model_length(args) -> int:
    """Q; with all canvases, whose number differs, what a text of one turn has."""
    most = args.block_diffusion_canvases
    if most == "all":
        most = -(-args.dllm_sequence_length // args.dllm_block_size)
    return args.dllm_sequence_length + _drafted(most, args)


def _drafted(canvases: int, args) -> int:
    """D: canvases, and padding up to what the layout can split."""
    multiple = args.dllm_length_multiple
    return -(-canvases * args.dllm_block_size // multiple) * multiple


@dataclass(frozen=True)
class Canvases(Corrupted):
    """block_S: of the text, counted from 1; tokens that are not supervised have the number of the block before them.

    places_NK        int64, the tokens of each chosen block, as places in [text | fill]; -1: none
    fill_x_t_F       int64, what replaces the EOS of the sample's fill
    fill_noised_F    bool, where it was noised
    level            float32 [1], the noise level t
    self_conditioned  whether the canvases are denoised with a first prediction in view
    """

    places_NK: torch.Tensor = None
    fill_x_t_F: torch.Tensor = None
    fill_noised_F: torch.Tensor = None
    level: torch.Tensor = None
    self_conditioned: bool = False


def corrupt(sample: Sample, draws: Draws, args) -> Canvases:
    """Draws u [1], r [S], w [S], as published; then r [F], w [F] of the fill. The choice of blocks and the coin have
    streams of their own."""
    block_S, offset_S, places_NK, F = blocks(sample, args)
    g = draws.generator()
    t = args.dllm_eps + (1 - args.dllm_eps) * draws.level(g)

    def noise(tokens: torch.Tensor, supervised: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noised = (torch.rand(len(tokens), generator=g) < t) & supervised
        return torch.where(noised, torch.randint(0, args.vocab_size, tokens.shape, generator=g), tokens), noised

    x_t_S, noised_S = noise(sample.tokens_S, _supervised(sample))
    fill_F = torch.full((F,), args.dllm_eos_token_id if F else 0)
    fill_x_t_F, fill_noised_F = noise(fill_F, torch.ones(F, dtype=torch.bool))
    if args.block_diffusion_canvases != "all":
        order_N = torch.randperm(len(places_NK), generator=draws.generator(CHOICE))
        places_NK = places_NK[order_N[: args.block_diffusion_canvases].sort().values]
    coin = float(torch.rand(1, generator=draws.generator(COINS)))
    chosen_S = torch.zeros(len(sample) + F + 1, dtype=torch.bool)
    chosen_S[places_NK.flatten()] = True
    return Canvases(
        sample=sample,
        x_t_S=x_t_S,
        noised_S=noised_S,
        weight_S=chosen_S[: len(sample)].float(),
        level_S=t.expand(len(sample)),
        block_S=block_S,
        offset_S=offset_S,
        places_NK=places_NK,
        fill_x_t_F=fill_x_t_F,
        fill_noised_F=fill_noised_F,
        level=t,
        self_conditioned=coin < args.block_diffusion_self_conditioning and not isinstance(draws, ValidationDraws),
    )


def _supervised(sample: Sample) -> torch.Tensor:
    return sample.loss_mask_S & (sample.document_S != PADDING_DOCUMENT)


def blocks(sample: Sample, args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """(block_S, offset_S int32, places_NK of all N blocks, F): see `Canvases`; offset_S is the place within the block.

    A turn that reaches the end of a full sample without EOS is taken as cut off there: it has no fill.
    """
    S, K = len(sample), args.dllm_block_size
    supervised_S, place_S = _supervised(sample), torch.arange(S)
    turns_S = supervised_S.clone()
    turns_S[1:] &= ~supervised_S[:-1] | (sample.document_S[1:] != sample.document_S[:-1])
    start_S = torch.where(turns_S, place_S, 0).cummax(0).values if S else place_S
    offset_S = torch.where(supervised_S, (place_S - start_S) % K, 0)
    begins_S = supervised_S & (offset_S == 0)
    block_S = begins_S.cumsum(0)
    first_N = begins_S.nonzero()[:, 0]
    length_N = torch.bincount(block_S[supervised_S], minlength=len(first_N) + 1)[1:]
    fill_N = K - length_N if args.block_diffusion_eos_fill else torch.zeros_like(length_N)
    full = S > 0 and args.dllm_sequence_length == S
    if full and supervised_S[-1] and sample.tokens_S[-1] != args.dllm_eos_token_id:
        fill_N[-1] = 0
    fill_first_N = S + fill_N.cumsum(0) - fill_N
    first_N, length_N, fill_N, fill_first_N = (x[:, None] for x in (first_N, length_N, fill_N, fill_first_N))
    offset_K = torch.arange(K)
    places_NK = torch.where(offset_K < length_N, first_N + offset_K, fill_first_N + offset_K - length_N)
    places_NK = places_NK.masked_fill(offset_K >= length_N + fill_N, -1)
    return block_S.int(), offset_S.int(), places_NK, int(fill_N.sum())


def layout(samples: list[Canvases], length: int, args) -> ModelInput:
    """[x_0 | canvases of x_t]. Samples with fewer canvases than others get padding, which is nobody's."""
    rows = common.pad_rows(samples, length, args.dllm_pad_token_id)
    C = max(1, *(len(c.places_NK) for c in samples)) if args.dllm_variable_lengths else args.block_diffusion_canvases
    parts = [_canvas_part(c, C, args) for c in samples]
    canvases = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    tokens_BD, scored_BD, attributes_BDA = (canvases[name] for name in ("tokens", "scored", "attributes"))
    (B, S), D = rows.tokens_BS.shape, tokens_BD.shape[1]
    attributes_BQA = torch.zeros(B, S + D, NUM_ATTRIBUTES + 1, dtype=torch.int32)
    attributes_BQA[:, :S, STREAM] = CLEAN
    for column, values_BS in ((BLOCK, rows.block_BS), (POSITION, rows.position_BS), (DOCUMENT, rows.document_BS)):
        attributes_BQA[:, :S, column] = values_BS
    attributes_BQA[:, :S, ANCHOR] = rows.position_BS
    attributes_BQA[:, S:] = attributes_BDA
    after = lambda x_BD: torch.nn.functional.pad(x_BD, (S, 0))
    terms = {
        "dllm": Term(
            targets_BQ=after(canvases["targets"]),
            weights_BQ=after(scored_BD.float()),
            count=float(scored_BD.sum()),
            levels_BQ=after(canvases["levels"]),
            offsets_BQ=after(canvases["offsets"]),
        )
    }
    if args.encoder_ar_loss_weight:
        pairs_BS = common.follows(rows).roll(-1, dims=1)
        before = lambda x_BS: torch.nn.functional.pad(x_BS, (0, D))
        next_BS = rows.tokens_BS.roll(-1, dims=1)
        terms["encoder ar"] = Term(before(next_BS), before(pairs_BS.float()), float(pairs_BS.sum()))
    coins_B = torch.tensor([c.self_conditioned for c in samples])
    return ModelInput(
        tokens_BQ=torch.cat([rows.tokens_BS, tokens_BD], dim=1),
        position_ids_BQ=torch.cat([rows.position_BS, attributes_BDA[..., POSITION].long()], dim=1),
        attributes_BQA=attributes_BQA,
        terms=terms,
        drafted=D,
        noised_BD=canvases["noised"],
        self_conditioned_B=coins_B if args.block_diffusion_self_conditioning else None,
        tokens={
            "supervised": float(scored_BD.sum()),
            "noised": float(canvases["noised"].sum()),
            "data": float(rows.data_tokens),
            "processed": float(B * (S + D)),
        },
    )


def _canvas_part(c: Canvases, C: int, args) -> dict[str, torch.Tensor]:
    """The D places of one sample's canvases. Behind [text | fill] lies one token of padding, which a place of -1 is."""
    K, D, sample, F = args.dllm_block_size, _drafted(C, args), c.sample, len(c.fill_x_t_F)
    places_CK = torch.nn.functional.pad(c.places_NK, (0, 0, 0, C - len(c.places_NK)), value=-1)
    flat = lambda x_CK, value: torch.nn.functional.pad(x_CK.flatten(), (0, D - C * K), value=value)
    places_D, first_D = flat(places_CK, -1), flat(places_CK[:, :1].expand(-1, K), -1)
    offset_D = flat(torch.arange(K).expand(C, K), 0)
    scored_D = places_D >= 0
    pool = lambda text_S, fill_F, padding: torch.cat([text_S, fill_F, text_S.new_full((1,), padding)])
    eos_F = c.fill_x_t_F.new_full((F,), args.dllm_eos_token_id if F else 0)
    no_F = torch.zeros(F, dtype=torch.int64)  # no block begins in the fill
    of_block = lambda values_S, padding: pool(values_S, no_F, padding)[first_D].where(scored_D, padding)
    anchor_D = of_block(sample.position_S, 0)
    attributes_DA = torch.zeros(D, NUM_ATTRIBUTES + 1, dtype=torch.int32)
    attributes_DA[:, STREAM] = NOISY
    # padding sees itself, of its own canvas: a row that sees nothing would be NaN
    attributes_DA[:, BLOCK] = of_block(c.block_S, 0).where(scored_D, -1 - torch.arange(D) // K)
    attributes_DA[:, POSITION] = (anchor_D + offset_D).where(scored_D, 0)
    attributes_DA[:, DOCUMENT] = of_block(sample.document_S, PADDING_DOCUMENT)
    attributes_DA[:, ANCHOR] = anchor_D
    return dict(
        tokens=pool(c.x_t_S, c.fill_x_t_F, args.dllm_pad_token_id)[places_D],
        targets=pool(sample.tokens_S, eos_F, args.dllm_pad_token_id)[places_D],
        noised=pool(c.noised_S, c.fill_noised_F, False)[places_D],
        scored=scored_D,
        levels=c.level * scored_D,
        offsets=offset_D.int(),
        attributes=attributes_DA,
    )


def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Canvas: the whole of itself, and the text of earlier blocks, never that of its own. Text: causal."""
    text, canvas = query[..., STREAM] == CLEAN, query[..., STREAM] != CLEAN
    before = torch.where(text, key[..., POSITION] <= query[..., POSITION], key[..., BLOCK] < query[..., BLOCK])
    itself = canvas & (key[..., BLOCK] == query[..., BLOCK])
    sees = torch.where(key[..., STREAM] == CLEAN, before, itself)
    return sees & (query[..., DOCUMENT] == key[..., DOCUMENT])


def loss(score, args) -> list[LossTerm]:
    terms = [LossTerm("dllm", score.weighted_nll("dllm"))]
    if args.encoder_ar_loss_weight:
        terms.append(LossTerm("encoder ar", score.weighted_nll("encoder ar"), args.encoder_ar_loss_weight))
    return terms


reverse = common.most_trusted
