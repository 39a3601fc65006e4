"""DFlash drafts (arXiv:2602.06036): guess a block of tokens at once from the hidden states of a frozen target.

Every sample gets up to N anchors, places of the text that a block of K tokens begins at. The block's first token is
known, the others are masks, and the draft predicts them from its own block and from the target's hidden states strictly
before the anchor (models/draft.py); embeddings, head and hidden states are the target's (models/target.py). With
w_k = exp(-(k - 1) / gamma) for the k-th token after the anchor (equation 4) and m_k = 1 where it is supervised and lies
in the sample,

    loss = Σ_blocks Σ_k w_k m_k · -log q(x_{A+k} | block, target before A)  /  Σ_blocks Σ_k w_k m_k

over the global batch (`--dllm-compat automodel`: divided by Σ m_k, as that recipe's strategy does).

`--dflash-loss variable-prefix`: l tokens of a block are known instead of one, l drawn from min(2, K - 1) to K - 1 with
odds 0.9^l for each block; the first guess is then x_{A+l}, and weights are exp(-(k - l) / gamma).

`--dflash-loss dpace` (D-PACE, arXiv:2605.18810): w_k is what the draft's own confidence makes of it, anew in every
pass, detached (`guesses.dpace`), and the sum is divided by the number of blocks with a scored token. Divided by Σ w it
would lose what the weights say of how many tokens will be accepted (the author, in SpecForge's issue 828).

`--dflash-kl-weight λ`: the draft learns from the target's distribution p too, its prediction of x_{A+k} at A + k - 1
(JetSpec: forward KL, λ = 1, no decay). With both p_T and q_T of logits / T, same weights and denominator,

    (1 - λ) · Σ w_k m_k · -log q(x_{A+k})  +  λ T² · Σ w_k m_k · KL(p_T ‖ q_T)

Anchors are a function of the sample and the run's seed. `--dflash-anchor-sampling supervised`: distinct supervised
tokens with a whole block after them in their document, the way of the published trainer; `overlap` and `nonoverlap`:
those of the published strategy, which look at the sample's length alone. A sample with fewer than two blocks of
supervised tokens has no block that counts.

Shapes: S clean length, N blocks of K tokens, Q = S + N·K; logits of a block's place k predict its own token (no shift).
"""

import argparse
import math
from dataclasses import dataclass

import torch

from megatron_dllm.data.sample import Sample
from megatron_dllm.modes import common, guesses
from megatron_dllm.modes.anchors import nonoverlap, overlap, prefixes, supervised
from megatron_dllm.modes.base import Corrupted, LossTerm, ModelInput, Term
from megatron_dllm.noise import Draws
from megatron_dllm.precision import FP8_ROWS, fp8_recipe

NEEDS_MASK_TOKEN = True
FULL_WITHIN_DOCUMENT = False
USES = {"dllm_block_size", "dllm_compat"}
REQUIRED = {"dflash_target": "--dllm-mode dflash trains beside a frozen model: name it by --dflash-target DIR."}
NOTHING_SCORED = "a draft learns from samples with at least two blocks of supervised tokens (--dllm-block-size)."
SAMPLINGS = ("supervised", "overlap", "nonoverlap")
ANCHORS, PREFIXES = "dflash anchors", "dflash prefixes"  # the random streams


def add_args(group) -> None:
    group.add_argument(
        "--dflash-target",
        metavar="DIR",
        help="The frozen model whose hidden states are read: a Hugging Face folder, or the folder of a run. Its shape, "
        "tokenizer and token ids are the defaults of this run.",
    )
    group.add_argument(
        "--dflash-target-backend",
        choices=("megatron", "transformers"),
        default="megatron",
        help="What runs it: our own layers, sharded like the draft (default; families that are ours), or transformers, "
        "whole on every rank (any local folder, also of hybrid Mamba models).",
    )
    group.add_argument(
        "--dflash-target-layers",
        type=int,
        nargs="+",
        default=None,
        metavar="LAYER",
        help="Layers of the target, counted from 0, whose outputs are read; default: as many as the draft has, spread.",
    )
    group.add_argument(
        "--dflash-features",
        metavar="DIR",
        help="Read the target's hidden states from this folder, which tools/cache_features.py has written, instead of "
        "running the target.",
    )
    group.add_argument("--dflash-num-anchors", type=int, default=512, metavar="N", help="Most blocks of a sample.")
    group.add_argument(
        "--dflash-anchor-sampling",
        choices=SAMPLINGS,
        default="supervised",
        help="Distinct supervised tokens (default), or the published strategy's ways.",
    )
    guesses.add_args(group)
    group.add_argument(
        "--dflash-causal-block",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="A token of a block does not see those after it (JetSpec).",
    )
    group.add_argument(
        "--dflash-window", type=int, default=None, metavar="TOKENS", help="How far back the context is seen."
    )
    group.add_argument(
        "--dflash-eval-interval",
        type=int,
        default=None,
        metavar="ITERATIONS",
        help="So often decode prompts of the validation data (without any, of the training data) with the draft and "
        "log how many tokens a pass of the target yields.",
    )
    group.add_argument("--dflash-eval-prompts", type=int, default=None, metavar="N", help="How many; default 8.")
    group.add_argument(
        "--dflash-eval-tokens", type=int, default=None, metavar="N", help="New tokens of each prompt; default 64."
    )


def validate(args) -> None:
    common.validate_blocks(args, default=16)
    _validate_layout(args)
    K = args.dllm_block_size
    if K < 2:
        raise ValueError(f"--dllm-block-size {K}: a block is a known token and at least one guess, give 2 or more.")
    S = args.dllm_sequence_length
    if 2 * K > S:
        raise ValueError(
            f"--seq-length {S} holds no two blocks of --dllm-block-size {K}, which a sample must have to count: make "
            "one longer or the other smaller."
        )
    counts = "num_anchors window eval_interval eval_prompts eval_tokens"
    for flag, value in [(name.replace("_", "-"), getattr(args, f"dflash_{name}")) for name in counts.split()]:
        least = 2 if flag == "eval-tokens" else 1  # the first comes with the prompt
        if value is not None and value < least:
            raise ValueError(f"--dflash-{flag} is {value}: give at least {least}.")
    for name, default in (("prompts", 8), ("tokens", 64)):
        dest = f"dflash_eval_{name}"
        if getattr(args, dest) is None:
            setattr(args, dest, default)
        elif args.dflash_eval_interval is None:
            raise ValueError(
                f"--dflash-eval-{name} is of the decoding that --dflash-eval-interval asks for: give both or neither."
            )
    guesses.validate(args)
    multiple = anchor_multiple(args)
    if args.dflash_num_anchors % multiple:
        raise ValueError(
            f"--dflash-num-anchors {args.dflash_num_anchors} cannot be shared out among context- and sequence-parallel "
            f"ranks: give a multiple of {multiple}."
        )
    from megatron_dllm.models import target
    from megatron_dllm.models.targets.offline import target_identity

    target.check(args)
    args.dflash_target_identity = target_identity(args.dflash_target)  # saved: a resumed draft keeps its target
    longest = args.max_position_embeddings or args.seq_length
    if args.dflash_eval_interval is not None and args.dflash_eval_tokens >= longest:
        raise ValueError(
            f"--dflash-eval-tokens {args.dflash_eval_tokens} leaves no room for a prompt in the {longest} positions of "
            f"the target: give at most {longest - 1}, or leave out --dflash-eval-interval."
        )


def _validate_layout(args) -> None:
    if args.pipeline_model_parallel_size > 1:
        raise ValueError(
            "a draft's few layers all read the same context, which a pipeline would have to pass on: use "
            "--pipeline-model-parallel-size 1."
        )
    if args.context_parallel_size > 1 and "a2a" in args.cp_comm_type:
        raise ValueError(
            "a draft's queries are not as many as its keys, which an exchange of heads cannot do: use --cp-comm-type "
            "all_gather."
        )
    plain = args.dflash_features is None and args.dflash_target_backend in (None, "megatron")
    if args.dflash_eval_interval is not None and not plain:
        raise ValueError(
            "--dflash-eval-interval decodes with the target, which takes --dflash-target-backend megatron and no "
            "--dflash-features: leave it out."
        )
    if args.context_parallel_size > 1 and args.dflash_eval_interval is not None:
        raise ValueError("--dflash-eval-interval decodes whole sequences: leave it out under context parallelism.")


def experts(args) -> int:
    """How many the target has, for expert parallelism: the draft is dense. ValueError if they cannot be shared out."""
    from megatron_dllm.models import target

    return target.check_experts(args)


def anchor_multiple(args) -> int:
    """What the number of a batch's blocks must be a multiple of: zigzag chunks of context parallelism are whole blocks,
    and each rank's are cut again by sequence parallelism, into what FP8 can multiply."""
    context = 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
    recipe = fp8_recipe(args)
    rows = shards if recipe is None else shards * FP8_ROWS[recipe]
    per_rank = rows // math.gcd(rows, args.dllm_block_size)
    return math.lcm(context, per_rank * args.context_parallel_size)


def streams(args) -> int:
    return 1


@dataclass(frozen=True)
class Anchored(Corrupted):
    """anchors_N int64: where blocks begin; kept_N bool: which of them count, those first; prefix_N int64: how many of
    their tokens are known."""

    anchors_N: torch.Tensor = None
    kept_N: torch.Tensor = None
    prefix_N: torch.Tensor = None


def corrupt(sample: Sample, draws: Draws, args) -> Anchored:
    """Draws anchors, and prefixes if there are any; the text itself is not noised."""
    common.check_clean(sample, args.dllm_mask_token_id)
    K, N = args.dllm_block_size, args.dflash_num_anchors
    g = draws.generator(ANCHORS)
    sample_anchors = dict(supervised=supervised, overlap=overlap, nonoverlap=nonoverlap)[args.dflash_anchor_sampling]
    anchors_N, kept_N = sample_anchors(sample, N, K, g)
    kept_N = kept_N & bool(sample.loss_mask_S.sum() >= 2 * K)
    prefix_N = torch.ones(N, dtype=torch.int64)
    if args.dflash_loss == "variable-prefix":
        prefix_N = prefixes(N, K, draws.generator(PREFIXES))
    return Anchored(
        sample=sample,
        x_t_S=sample.tokens_S,
        noised_S=torch.zeros_like(sample.loss_mask_S),
        weight_S=torch.zeros(len(sample)),
        level_S=torch.zeros(len(sample)),
        anchors_N=anchors_N,
        kept_N=kept_N,
        prefix_N=prefix_N,
    )


def layout(samples: list[Anchored], length: int, args) -> ModelInput:
    """[x_0 | blocks]: the target reads the first, the draft predicts the second. Fewer than N blocks where no sample of
    the micro-batch has so many."""
    from megatron_dllm.models.draft import lay_out

    rows = common.pad_rows(samples, length, args.dllm_pad_token_id)
    K, multiple = args.dllm_block_size, anchor_multiple(args)
    most = max(1, *(int(c.kept_N.sum()) for c in samples))
    N = min(-(-most // multiple) * multiple, args.dflash_num_anchors)
    columns = ("anchors_N", "kept_N", "prefix_N")
    anchors_BN, kept_BN, prefix_BN = (torch.stack([getattr(c, name)[:N] for c in samples]) for name in columns)
    position_ids_BT, attributes_BTA = lay_out(anchors_BN, K, rows.position_BS, rows.document_BS, kept_BN)
    place_BNK = anchors_BN[..., None] + torch.arange(K)
    of_place = lambda x_BS: x_BS.gather(1, place_BNK.clamp(max=length - 1).flatten(1)).view(place_BNK.shape)
    tokens_BNK = of_place(rows.tokens_BS)
    same_BNK = of_place(rows.document_BS) == rows.document_BS.gather(1, anchors_BN)[..., None]
    there_BNK = (place_BNK < length) & same_BNK & kept_BN[..., None]
    known_BNK = there_BNK & (torch.arange(K) < prefix_BN[..., None])
    scored_BNK = of_place(rows.loss_mask_BS) & there_BNK & ~known_BNK
    if args.dflash_loss == "dpace":  # weights come with the loss
        weights_BNK, count = scored_BNK.float(), scored_BNK.any(-1).sum()
    else:
        weights_BNK = scored_BNK * guesses.decay(prefix_BN, K, args.dflash_loss_decay)
        count = scored_BNK.sum() if args.dllm_compat else weights_BNK.double().sum()
    after = lambda x_BNK: torch.nn.functional.pad(x_BNK.flatten(1), (length, 0))
    term = Term(
        targets_BQ=after(tokens_BNK),
        weights_BQ=after(weights_BNK),
        count=float(count),
        offsets_BQ=after(torch.arange(K, dtype=torch.int32).expand(place_BNK.shape)),
        teacher_BQ=after(place_BNK - 1) if args.dflash_kl_weight else None,
    )
    return ModelInput(
        tokens_BQ=torch.cat([rows.tokens_BS, tokens_BNK.where(known_BNK, args.dllm_mask_token_id).flatten(1)], dim=1),
        position_ids_BQ=position_ids_BT,
        attributes_BQA=attributes_BTA,
        terms={"dllm": term},
        drafted=N * K,
        noised_BD=~known_BNK.flatten(1),
        tokens={
            "supervised": float(rows.loss_mask_BS.sum()),
            "noised": float(scored_BNK.sum()),
            "data": float(rows.data_tokens),
            "processed": float(position_ids_BT.numel()),
            "samples that count": float(scored_BNK.flatten(1).any(1).sum()),
        },
    )


def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """See models/draft.py, whose rule also knows the variants."""
    from megatron_dllm.models import draft

    return draft.visible(query, key)


def rule(args):
    """`visible` with the variants that are asked for."""
    from megatron_dllm.models import dflash

    return dflash.rule(args.dflash_causal_block, args.dflash_window)


def loss(score, args) -> list[LossTerm]:
    rows, share = score.rows("dllm"), args.dflash_kl_weight
    nll_N = score.row_nll("dllm", differentiable=share < 1)
    weights_N = rows.weights_N
    if args.dflash_loss == "dpace":
        weights_N = guesses.dpace(nll_N, rows, score.batch_size, args.dllm_block_size, args.dflash_dpace_alpha)
    text = LossTerm("dllm", weights_N @ nll_N, 1 - share)
    if share == 0:
        return [text]
    temperature = args.dflash_kl_temperature
    kl_N = score.row_kl("dllm", temperature)
    return [text, LossTerm("kl", weights_N @ kl_N, share * temperature**2, of="dllm")]


def measure(score, args) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(sum, count) of this rank: tokens guessed right, in all and by their place, and how many tokens a block would
    give: its leading run of right ones, and one more."""
    right_N, rows = score.right["dllm"].float(), score.rows("dllm")
    offsets_N, K = rows.offsets_N, args.dllm_block_size
    report = {"draft accuracy": (right_N.sum(), right_N.new_tensor(len(right_N)))}
    for k in range(1, K):
        here = (offsets_N == k).float()
        report[f"draft accuracy at {k}"] = ((right_N * here).sum(), here.sum())
    run_MK, _ = guesses.runs(right_N, rows, score.batch_size, K)
    length_M = run_MK.sum(1) + 1
    report["accepted tokens a block"] = (length_M.sum(), length_M.new_tensor(len(length_M)))
    return report


reverse = common.most_trusted  # unused: decoding drafts and verifies (generation/dflash.py)
