"""Which decoding loops there are, what models they fit, and which options they read."""

from argparse import Namespace
from dataclasses import dataclass, fields

from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.generation import dflash, diffusion_gemma, dream, idlm, llada, llada2, nemotron, scdd
from megatron_dllm.generation.config import GenerationConfig, flag
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Row
from megatron_dllm.models.weights import target_layers

_ALWAYS = {"max_new_tokens", "sampler", "temperature", "top_k", "top_p", "seed", "batch_size", "gap_length"}
_DRAWING = {"temperature", "top_k", "top_p"}
_STEPS = {"steps", "steps_per_block", "remasking", "threshold", "stop_at_eos"}


@dataclass(frozen=True)
class Sampler:
    """rows: kind of row by `--mode`, the first is the default (None: it has no modes); trained: with which --dllm-mode;
    options: what it reads of a GenerationConfig, beyond what all do; causal: it continues at least one token;
    ladder: its temperature falls from step to step, and nothing else says what is drawn."""

    rows: dict[str | None, type[Row]]
    trained: tuple[str, ...]
    options: frozenset[str] | set[str]
    causal: bool = False
    ladder: bool = False

    @property
    def reads(self) -> set[str]:
        """Of a GenerationConfig."""
        return (_ALWAYS - _DRAWING if self.ladder else _ALWAYS) | self.options


SAMPLERS = {
    "llada": Sampler(
        {None: llada.LLaDARow},
        ("mdlm", "scdd"),
        _STEPS | {"gen_block_length", "factor", "cache", "cfg_scale", "infill"},
    ),
    "dream": Sampler(
        {None: dream.DreamRow}, ("mdlm",), {"steps", "algorithm", "algorithm_temperature", "infill", "stop_at_eos"}
    ),
    "scdd": Sampler({None: scdd.CorrectingRow}, ("scdd",), {"steps", "infill"}),
    "llada2": Sampler(
        {None: llada2.BlockRow},
        ("bd3lm", "hybrid"),
        _STEPS | {"gen_block_length", "editing_threshold", "max_post_steps", "cache"},
    ),
    "nemotron": Sampler(
        dict(diffusion=nemotron.DiffusionRow, ar=nemotron.AutoregressiveRow, speculative=nemotron.SpeculativeRow),
        ("hybrid",),
        _STEPS | {"mode", "gen_block_length", "cache"},
        causal=True,
    ),
    "idlm": Sampler(
        dict(speculative=idlm.StridedRow, ar=nemotron.AutoregressiveRow),
        ("idlm",),
        {"mode", "gen_block_length", "cache", "stop_at_eos"},
        causal=True,
    ),
    "dflash": Sampler(
        dict(speculative=dflash.DraftedRow, ar=dflash.DraftedRow), ("dflash",), {"mode", "stop_at_eos"}, causal=True
    ),
    "diffusion_gemma": Sampler(
        {None: diffusion_gemma.DenoisedRow},
        ("block_diffusion",),
        {"steps", "steps_per_block", "cache", "stop_at_eos", "t_min", "t_max", "entropy_bound"}
        | {"stability_threshold", "confidence_threshold"},
        ladder=True,
    ),
}
_OF_DIFFUSION = {"steps", "steps_per_block", "remasking", "threshold"}  # what the other modes of a causal model ignore
_DEFAULTS = dict(
    mdlm="llada",
    scdd="scdd",
    bd3lm="llada2",
    hybrid="nemotron",
    idlm="idlm",
    dflash="dflash",
    block_diffusion="diffusion_gemma",
)


def sampler_name(args: Namespace, config: GenerationConfig) -> str:
    """The one asked for, or that of the mode that the model was trained with."""
    if config.sampler is None and llada.shifted(args):
        return "dream"
    return config.sampler or _DEFAULTS.get(args.dllm_mode, "")


def row_type(args: Namespace, config: GenerationConfig) -> type[Row]:
    rows = SAMPLERS[sampler_name(args, config)].rows
    return rows[config.mode or next(iter(rows))]


def stops_at_eos(args: Namespace, tokenizer: Tokenizer) -> bool:
    """Whether the default sampler of a model can end an answer at its first EOS, and there is one."""
    return tokenizer.eos_id is not None and "stop_at_eos" in SAMPLERS[sampler_name(args, GenerationConfig())].options


def has_ladder(args: Namespace) -> bool:
    """Whether the default sampler of a model has temperatures of its own in place of one."""
    return SAMPLERS[sampler_name(args, GenerationConfig())].ladder


def check_sampler(args: Namespace, config: GenerationConfig, tokenizer: Tokenizer) -> None:
    """ValueError if no decoding loop fits a model trained with `args`, or the loop cannot do what `config` asks."""
    if target_layers(args) is not None and getattr(args, "dflash_target", None) is None:
        raise ValueError(
            "the model is a draft, which guesses from the hidden states of its target and has no head of its own: name "
            "the target by --target."
        )
    name, what = sampler_name(args, config), f"a model trained with --dllm-mode {args.dllm_mode}"
    fitting = [known for known, sampler in SAMPLERS.items() if args.dllm_mode in sampler.trained]
    if not fitting:
        raise ValueError(f"{what} cannot be decoded yet; there are samplers for {', '.join(sorted(_DEFAULTS))}.")
    if config.sampler is not None and config.sampler not in SAMPLERS:
        raise ValueError(f"--sampler {config.sampler} is unknown: choose one of {', '.join(SAMPLERS)}.")
    if name not in fitting:
        raise ValueError(f"--sampler {name} does not fit {what}: choose {' or '.join(fitting)}.")
    sampler = SAMPLERS[name]
    if config.infill and "infill" not in sampler.options:
        raise ValueError(
            f"--sampler {name} sees no text after what it writes: --infill needs a model trained with mdlm or scdd."
        )
    if config.gap_length != GenerationConfig.gap_length and not config.infill:
        raise ValueError("--gap-length is the length of a [MASK] of --infill: give that too, or leave it out.")
    for field in fields(config):
        given = getattr(config, field.name) != field.default
        if not given or field.name in sampler.reads:
            continue
        if field.name in _DRAWING:
            raise ValueError(
                f"--sampler {name} draws at temperatures from --t-max down to --t-min: leave out {flag(field.name)}."
            )
        raise ValueError(f"{flag(field.name)} means nothing to --sampler {name}, which decodes {what}: leave it out.")
    _check_causal(name, sampler, args, config)
    _check_blocks(name, args, config, what)
    if config.cache in ("prefix", "dual") and name != "llada":
        raise ValueError(
            f"--cache {config.cache} is an approximation for models that attend in both directions; --sampler {name} "
            "has an exact one: leave it out."
        )
    if config.cache in ("prefix", "dual") and config.cfg_scale:
        raise ValueError(f"--cache {config.cache} holds one canvas and --cfg-scale needs two: drop one.")
    if config.stop_at_eos and tokenizer.eos_id is None:
        raise ValueError("--stop-at-eos needs a tokenizer with an EOS token, and this one has none.")


def _check_causal(name: str, sampler: Sampler, args: Namespace, config: GenerationConfig) -> None:
    if not sampler.causal:
        return
    mode = config.mode or next(iter(sampler.rows))
    if mode not in sampler.rows:
        raise ValueError(f"--mode {mode} is not one of --sampler {name}: choose {' or '.join(sampler.rows)}.")
    for field in fields(config):
        ignored = _OF_DIFFUSION if mode != "diffusion" else set()
        ignored = ignored | ({"gen_block_length"} if mode == "ar" else set())
        if field.name in ignored and getattr(config, field.name) != field.default:
            raise ValueError(f"{flag(field.name)} means nothing to --mode {mode}: leave it out.")
    if name == "nemotron" and args.ar_loss_weight == 0:
        raise ValueError(
            "the model was trained with --ar-loss-weight 0 and has learned no next token: choose --sampler llada2."
        )


def _check_blocks(name: str, args: Namespace, config: GenerationConfig, what: str) -> None:
    if name != "llada2":
        return
    if config.gen_block_length not in (None, args.dllm_block_size):
        raise ValueError(
            f"{what} writes blocks of --dllm-block-size {args.dllm_block_size} tokens: leave out --gen-block-length."
        )
    if args.dllm_block_origin == "response" and args.dllm_mode == "bd3lm":
        raise ValueError(f"{what} and --dllm-block-origin response cannot be decoded yet.")
    if config.editing_threshold is not None:
        for field in ("steps", "steps_per_block"):
            if getattr(config, field) is not None:
                raise ValueError(
                    f"with --editing-threshold a block ends when nothing changes: leave out {flag(field)}."
                )
        if config.remasking == "random":
            raise ValueError("--editing-threshold compares confidences and --remasking random ignores them: drop one.")
    elif config.max_post_steps != GenerationConfig.max_post_steps:
        raise ValueError("--max-post-steps needs --editing-threshold: give it too.")


def check_canvases(canvases: list[Canvas], args: Namespace, config: GenerationConfig) -> None:
    """ValueError for a prompt that the sampler cannot begin with."""
    name = sampler_name(args, config)
    empty = [canvas.name for canvas in canvases if canvas.start == 0]
    if SAMPLERS[name].causal and empty:
        raise ValueError(f"{empty[0]} is empty, and --sampler {name} continues a token: give at least one.")
