"""What to generate, and what comes out."""

from dataclasses import dataclass

REMASKING = ("low_confidence", "random")
CACHES = ("auto", "none", "prefix", "dual")
ALGORITHMS = ("origin", "maskgit_plus", "topk_margin", "entropy")
DECODING_MODES = ("diffusion", "ar", "speculative")


@dataclass(frozen=True)
class GenerationConfig:
    """How to decode. Raises ValueError for a value that means nothing.

    max_new_tokens    tokens of every answer, neither more nor less (not used when infilling)
    sampler           the decoding loop (samplers.py); default: that of the model's mode
    mode              of a model that is autoregressive too: diffusion, ar or speculative (nemotron.py, idlm.py)
    steps             most denoising steps in all, spread evenly over the blocks; default: one for each token
    steps_per_block   instead: most steps of a block
    gen_block_length  blocks are finished from left to right, each within its share of the steps; default 128, or the
                      block size that the model was trained with, if it was trained in blocks
    temperature       0 takes the likeliest token; else tokens are drawn from softmax(logits / temperature)
    top_k, top_p      draw only from the likeliest k tokens, or from the likeliest that have this probability together
    remasking         which tokens stay masked: those of low confidence, or random ones
    threshold         also commit every token at least this confident, beyond what the step's quota asks for
    factor            also commit as many tokens as are trusted together (llada.py)
    editing_threshold, max_post_steps   overwrite tokens of the block that was just written (llada2.py)
    algorithm, algorithm_temperature    which tokens Dream commits (dream.py)
    t_min, t_max      temperatures at the last and the first of a canvas's most steps (diffusion_gemma.py)
    entropy_bound     accept the surest tokens of a canvas as long as the entropies of those before add up to this
    stability_threshold, confidence_threshold   a canvas is finished once its likeliest tokens have stayed the same for
                      so many steps, and the mean entropy is below this
    cache             auto: keep keys and values where that changes nothing; none; prefix, dual: approximate (llada.py)
    cfg_scale         classifier-free guidance w: logits u + (w + 1)(c - u), u with the given tokens masked too
    stop_at_eos       a row is finished once its answer has an EOS with no mask before it; EOS fills the rest
    infill            prompts have gaps, which are filled in place
    gap_length        tokens of a gap written `[MASK]`; `[MASK:12]` says 12
    seed              of the sampler; temperature 0 with low_confidence draws nothing
    batch_size        prompts that are decoded together; changes no answer, but how much memory it takes
    """

    max_new_tokens: int = 128
    sampler: str | None = None
    mode: str | None = None
    steps: int | None = None
    steps_per_block: int | None = None
    gen_block_length: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    remasking: str = "low_confidence"
    threshold: float | None = None
    factor: float | None = None
    editing_threshold: float | None = None
    max_post_steps: int = 16
    algorithm: str = "entropy"
    algorithm_temperature: float = 0.0
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    cache: str = "auto"
    cfg_scale: float = 0.0
    stop_at_eos: bool = False
    infill: bool = False
    gap_length: int = 20
    seed: int = 1234
    batch_size: int = 8

    def __post_init__(self):
        counts = "max_new_tokens steps steps_per_block gen_block_length gap_length batch_size top_k max_post_steps"
        for name in counts.split():
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}: give at least 1.")
        numbers = "temperature cfg_scale factor algorithm_temperature t_min t_max entropy_bound confidence_threshold"
        for name in numbers.split():
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{flag(name)} is {value}: give a finite number that is not negative.")
        for name in ("threshold", "editing_threshold", "top_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{flag(name)} is {value}: give a probability.")
        choices = dict(remasking=REMASKING, cache=CACHES, algorithm=ALGORITHMS, mode=(None, *DECODING_MODES))
        for name, known in choices.items():
            if getattr(self, name) not in known:
                known = [value for value in known if value is not None]
                raise ValueError(f"{flag(name)} {getattr(self, name)} is unknown: choose one of {', '.join(known)}.")
        if self.stability_threshold < 0:
            raise ValueError(f"--stability-threshold is {self.stability_threshold}: give a number of steps, or 0.")
        if not self.t_min <= self.t_max or self.t_max == 0:
            raise ValueError(
                f"--t-min {self.t_min} is the last temperature of a canvas and --t-max {self.t_max} its first: give "
                "one above 0 that is not below the last."
            )
        if self.top_p == 0:
            raise ValueError("--top-p 0 leaves no token to draw: give a number above 0, or --top-k 1.")
        if self.steps is not None and self.steps_per_block is not None:
            raise ValueError("--steps counts all steps and --steps-per-block those of a block: give one of them.")
        if self.remasking == "random":
            for name in ("threshold", "factor"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{flag(name)} compares confidences and --remasking random ignores them: drop one."
                    )
        if self.threshold is not None and self.factor is not None:
            raise ValueError("--threshold and --factor are two rules for the same choice: drop one.")
        if self.temperature == 0:
            for name in ("top_k", "top_p"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{flag(name)} says what to draw from, and --temperature 0 draws nothing: drop one."
                    )
        if self.infill and self.stop_at_eos:
            raise ValueError("--stop-at-eos ends an answer, and --infill has none: drop one.")


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Completion:
    """One prompt's answer, or, when infilling, the whole filled sequence.

    text               decoded without special tokens; an answer up to its first EOS
    ids                exactly max_new_tokens ids, or the whole sequence
    steps              rounds of the network that this prompt took part in
    forwards           sequences of this prompt that went through the network: steps, twice as many under guidance
    tokens_per_second  generated tokens over the time from the start of its batch until this prompt was finished
    """

    text: str
    ids: list[int]
    steps: int
    forwards: int
    tokens_per_second: float
