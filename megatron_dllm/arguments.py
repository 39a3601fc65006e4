"""Command line: Megatron's flags as they are, our groups, defaults that make a tiny run short, and the checks.

Everything that can be wrong with a command is found here, before any process group, data set or model
exists, and is raised as a ValueError with one sentence that says what to do.
"""

import argparse
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

import torch

from megatron_dllm.conversion.flags import check_conversion
from megatron_dllm.data.tokenizer import Tokenizer, build_tokenizer
from megatron_dllm.models import FAMILIES
from megatron_dllm.models.attention import BACKENDS
from megatron_dllm.models.gemma_flags import check_gemma
from megatron_dllm.models.lora_flags import add_lora_arguments, check_lora
from megatron_dllm.models.rope import parse_scaling
from megatron_dllm.models.weights import GEMMA, target_layers
from megatron_dllm.modes import MODES, get_mode
from megatron_dllm.precision import EMULATED, check_precision, check_transformer_engine, check_widths
from megatron_dllm.presets import PRESETS
from megatron_dllm.resilience import flags as long_runs
from megatron_dllm.shape import chosen_defaults
from megatron_dllm.validation import check_flags, check_layout, set_model_length
from megatron_dllm.vocabulary import resolve_vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our groups and our defaults to Megatron's parser."""
    parser.usage = "%(prog)s --dllm-mode MODE [--model-preset NAME] --seq-length ... (--help lists every flag)"
    group = parser.add_argument_group("diffusion language model")
    group.add_argument("--dllm-mode", required=True, help=f"Training objective: {', '.join(MODES)}.")
    group.add_argument(
        "--model-preset",
        default=None,
        help=f"Named model, each value overridable: {', '.join(PRESETS)}.",
    )
    group.add_argument(
        "--hf-model",
        metavar="DIR",
        help="Local Hugging Face folder: its architecture, token ids and tokenizer become the defaults of this run.",
    )
    group.add_argument(
        "--dllm-family",
        default=None,
        metavar="FAMILY",
        help=f"What --hf-model is ({', '.join(FAMILIES)}); default: what its config.json says.",
    )
    group.add_argument(
        "--init-from-hf",
        action="store_true",
        help="Start from the weights of --hf-model, read straight into this layout; a checkpoint in --load goes first.",
    )
    group.add_argument(
        "--save-hf-interval",
        type=int,
        metavar="N",
        help="Every N iterations, beside the checkpoint, write the model as a Hugging Face folder (hf_0000100, ...).",
    )
    group.add_argument(
        "--dllm-rope-scaling",
        type=_rope_scaling,
        default=None,
        metavar="JSON",
        help='Scaled rotary embeddings in transformers\' notation, {"rope_type": "yarn", "factor": 16, ...}; the base '
        "is --rotary-base.",
    )
    group.add_argument(
        "--dllm-mask-token-id", type=int, default=None, help="Id of the mask token; default: the tokenizer's."
    )
    group.add_argument(
        "--dllm-eps",
        type=float,
        default=1e-3,
        help="Smallest noise level: p = (1 - eps) t + eps, t ~ U(0, 1).",
    )
    group.add_argument(
        "--dllm-loss-normalization",
        choices=("supervised", "noise"),
        default=None,
        help="Divide the diffusion loss by the global number of supervised tokens (an unbiased bound in nats "
        "per token; default) or of noised tokens (the published default of hybrid).",
    )
    group.add_argument(
        "--dllm-block-size",
        type=int,
        default=None,
        help="Tokens of a block, which is denoised as a whole; default 32 (hybrid, bd3lm), 1 (idlm), 16 (dflash) or "
        "256 (block_diffusion).",
    )
    group.add_argument(
        "--dllm-block-origin",
        choices=("sequence", "response"),
        default="sequence",
        help="Count blocks from the beginning of a document, or anew from every supervised turn.",
    )
    group.add_argument(
        "--dllm-compat",
        choices=("automodel",),
        default=None,
        help="Divide as NeMo AutoModel does: next-token terms by all supervised tokens, scored or not; a draft's loss "
        "by the number of tokens rather than the sum of their weights.",
    )
    group.add_argument(
        "--dllm-attention-backend",
        choices=BACKENDS,
        default="auto",
        help="flex (GPU, block-sparse), tiled (CPU, block-sparse) or sdpa (dense mask); auto is flex on a GPU, on a "
        "CPU tiled for long sequences and sdpa for short ones. A rule that needs no mask always runs without one.",
    )
    group.add_argument(
        "--dllm-emulate-fp8",
        choices=EMULATED,
        default=None,
        help="Round what goes into products of the layers to FP8 by this recipe, without Transformer Engine: slow, to "
        "see how a run does in FP8 on any machine.",
    )
    group.add_argument(
        "--dllm-verify-peers",
        type=int,
        default=1,
        metavar="N",
        help="Compare a hash of the batch across tensor-, context- and pipeline-parallel peers in the first N "
        "steps and stop on a difference.",
    )

    group.add_argument(
        "--peak-tflops",
        type=float,
        default=None,
        metavar="TFLOP/S",
        help="What a GPU can do at most in the run's precision, for the MFU in the log; default: known by its name for "
        "H100, H200 and B200.",
    )

    # The opposites of Megatron's flags whose default is today's usual architecture here (see _defaults).
    opposites = (
        ("--tie-embeddings-and-output-weights", "untie_embeddings_and_output_weights", "store_false"),
        ("--no-swiglu", "swiglu", "store_false"),
        ("--add-bias-linear", "add_bias_linear", "store_true"),
    )
    for name, dest, action in opposites:
        group.add_argument(name, dest=dest, action=action, help="The default here is the opposite.")

    group = parser.add_argument_group("diffusion_gemma: what Megatron's flags cannot say of layers (set by presets)")
    group.add_argument("--dllm-architecture", choices=(GEMMA,), default=None, help="Default: Megatron's usual layers.")
    group.add_argument(
        "--dllm-full-attention-layers",
        type=int,
        nargs="+",
        default=None,
        metavar="LAYER",
        help="Layers, counted from 0, that see everything; the others see a window.",
    )
    group.add_argument("--dllm-window", type=int, default=None, metavar="TOKENS", help="How far the others see back.")
    group.add_argument("--dllm-full-kv-channels", type=int, default=None, help="--kv-channels of full layers.")
    group.add_argument("--dllm-full-query-groups", type=int, default=None, help="--num-query-groups of full layers.")
    group.add_argument("--dllm-full-rotary-base", type=float, default=None, help="--rotary-base of full layers.")
    group.add_argument(
        "--dllm-full-rotary-percent", type=float, default=None, help="How much of a head full layers rotate."
    )
    group.add_argument("--dllm-logit-softcap", type=float, default=None, help="c of logits c tanh(l / c).")
    group.add_argument(
        "--dllm-train-router",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Train what chooses experts; default: it stays as it is, as in the published recipe.",
    )

    add_lora_arguments(parser)
    group = parser.add_argument_group("diffusion data")
    group.add_argument("--sft-data-path", nargs="+", default=None, help="Chat data: JSONL or parquet with `messages`.")
    group.add_argument("--sft-valid-data-path", nargs="+", default=None, help="Chat data for validation.")
    group.add_argument(
        "--sft-last-turn-only",
        action="store_true",
        help="Supervise the last assistant turn only; default: every one.",
    )
    group.add_argument(
        "--dllm-padding",
        choices=("ignore", "supervise"),
        default="ignore",
        help="Padding after a chat sample is neither attended nor scored, or (LLaDA's recipe) is part of the answer.",
    )
    group.add_argument(
        "--dllm-pad-block-size",
        type=int,
        default=None,
        help="Fill every chat sample with supervised EOS up to a multiple of this before padding the batch.",
    )
    group.add_argument(
        "--pad-seq-len-divisible",
        type=int,
        default=None,
        help="Pad chat batches to a multiple of this instead of the least that the layout needs.",
    )
    group.add_argument(
        "--dllm-cross-document-attention",
        action="store_true",
        help="Let packed documents attend to each other, with positions running on; default: kept apart.",
    )
    long_runs.add_arguments(parser)
    for name, mode in MODES.items():
        mode.add_args(parser.add_argument_group(f"mode {name}"))

    for action in parser._actions:
        if action.dest == "tokenizer_type":
            action.choices = [*action.choices, "ByteLevelTokenizer"]
        elif action.dest == "chat_template":
            action.help = "File with a Jinja chat template; default: the tokenizer's own."
        elif action.dest == "cp_comm_type":
            action.help = "How context parallelism communicates: a2a (exchange heads) or all_gather (gather K/V)."
        elif action.dest == "moe_paged_stash_buffer_size_factor_cuda":  # a bare % makes --help fail
            action.help = action.help.replace("10%)", "10%%)")
    parser.set_defaults(**_defaults())
    parser.set_defaults(**chosen_defaults())
    return parser


def _rope_scaling(text: str) -> dict:
    try:
        return parse_scaling(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _defaults() -> dict:
    """Today's usual architecture, so that a command names only what is special about it."""
    defaults = dict(
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        cp_comm_type=["a2a"],
        dataloader_type="external",
        moe_token_dispatcher_type="alltoall",  # the only one that exchanges batches of different lengths
        eval_interval=1000,
        dist_ckpt_optim_fully_reshardable=True,  # the optimizer state loads at any other layout too
        apply_rope_fusion=False,  # positions differ by row
        masked_softmax_fusion=False,  # belongs to Megatron's own core attention
    )
    if not _has_fused_gradient_accumulation():
        defaults |= dict(gradient_accumulation_fusion=False)
    if not torch.cuda.is_available():
        defaults |= dict(
            distributed_backend="gloo",
            use_cpu_initialization=True,
            bias_swiglu_fusion=True,  # not jitted on a CPU, but it saves less for backward
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            num_workers=0,
        )
    return defaults


def _has_fused_gradient_accumulation() -> bool:
    from megatron.core.tensor_parallel.layers import _grad_accum_fusion_available

    return torch.cuda.is_available() and _grad_accum_fusion_available


def parse_arguments() -> tuple[argparse.Namespace, Tokenizer]:
    """Parse and check `sys.argv`, set Megatron's global variables. Raises ValueError (one sentence)."""
    from megatron.training.global_vars import set_global_variables

    args, tokenizer = read_command_line()
    check_transformer_engine(args)
    if target_layers(args) is not None and args.dllm_mode != "dflash":
        raise ValueError(
            f"--hf-model {args.hf_model} is a draft, which is trained beside the model whose hidden states it reads: "
            "use --dllm-mode dflash and --dflash-target."
        )
    set_global_variables(args, build_tokenizer=False)
    return args, tokenizer


def read_command_line(
    extend: Callable | None = None, adapt: Callable | None = None
) -> tuple[argparse.Namespace, Tokenizer]:
    """(args, tokenizer) of `sys.argv`, checked. Raises ValueError (one sentence).

    For tools that read a training command without training: `extend(parser)` adds their flags, `adapt(args)`
    changes what was given before it is checked.
    """
    args, given = parse_command_line(extend)
    if adapt is not None:
        adapt(args)
    tokenizer = check_arguments(args, given)
    check_with_megatron(args)
    return args, tokenizer


def parse_command_line(extend: Callable | None = None) -> tuple[argparse.Namespace, set[str]]:
    """(args, which of them were given) of `sys.argv`, unchecked but for what a parser sees."""
    from megatron.training.arguments import parse_args

    given: set[str] = set()

    def provider(parser):
        parser = add_arguments(parser)
        if extend is not None:
            extend(parser)
        names = {word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
        options = parser._option_string_actions
        for action in {options[name] for name in names if name in options}:
            given.add(action.dest)
            if len(twice := sorted(names.intersection(action.option_strings))) > 1:
                raise ValueError(f"{' and '.join(twice)} are one flag: give it once.")
        return parser

    return parse_args(provider), given


def check_arguments(args: argparse.Namespace, given: set[str], tokenizer: Tokenizer | None = None) -> Tokenizer:
    """Our own checks, in place: all that does not need Megatron's. tokenizer: if it is known already."""
    mode = get_mode(args.dllm_mode)
    check_flags(args, given)
    check_conversion(args, given)
    check_precision(args, given)
    long_runs.check(args, given)
    check_layout(args, mode)
    check_gemma(args, given)
    check_widths(args)
    check_lora(args, given)
    tokenizer = tokenizer or build_tokenizer(args)
    resolve_vocabulary(args, tokenizer, mode)
    mode.validate(args)
    set_model_length(args, mode)
    args.dllm_state = {}  # what a mode learns from one step for the next
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.dllm_sequence_length
    return tokenizer


def check_with_megatron(args: argparse.Namespace) -> None:
    """Megatron's own checks, of arguments that have passed ours; in place."""
    from megatron.training.arguments import validate_args

    longest = args.max_position_embeddings
    args.max_position_embeddings = max(longest, args.seq_length)  # several streams share positions
    ranks_of_experts = args.expert_model_parallel_size
    if args.num_experts is None:
        args.expert_model_parallel_size = 1  # those of a draft's target, which Megatron does not know of
    try:
        validate_args(args)
    except AssertionError as error:
        condition = traceback.extract_tb(error.__traceback__)[-1].line  # many of Megatron's have no text
        raise ValueError(f"Megatron refuses this combination of flags: {str(error) or condition}") from error
    args.max_position_embeddings, args.expert_model_parallel_size = longest, ranks_of_experts
    long_runs.settle(args)


def fail(error: Exception) -> None:
    """Print one sentence and exit with code 2. Rank 0 speaks for all; another rank only if rank 0 has not ended
    the job by then, so that a fault of one node (a missing file) is seen."""
    rank = int(os.environ.get("RANK", "0"))
    where = ""
    if rank:
        time.sleep(5)
        where = f" (rank {rank} on {socket.gethostname()})"
    print(f"{os.path.basename(sys.argv[0])}: error{where}: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
