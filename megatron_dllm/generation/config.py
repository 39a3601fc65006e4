"""What to generate, and what comes out."""

from dataclasses import dataclass

REMASKING = ("low_confidence", "random")


@dataclass(frozen=True)
class GenerationConfig:
    """How to decode. Raises ValueError for a value that means nothing.

    max_new_tokens    tokens of every answer, neither more nor less (not used when infilling)
    steps             most denoising steps in all, spread evenly over the blocks
    gen_block_length  blocks are finished from left to right, each within its share of the steps; default 128, or the
                      block size that the model was trained with, if it was trained in blocks
    temperature       0 takes the likeliest token; else tokens are drawn from softmax(logits / temperature)
    remasking         which tokens stay masked: those of low confidence, or random ones
    threshold         also commit every token at least this confident, beyond what the step's quota asks for
    cfg_scale         classifier-free guidance w: logits u + (w + 1)(c - u), u with the given tokens masked too
    stop_at_eos       a row is finished once its answer has an EOS with no mask before it; EOS fills the rest
    infill            prompts have gaps, which are filled in place
    gap_length        tokens of a gap written `[MASK]`; `[MASK:12]` says 12
    seed              of the sampler; temperature 0 with low_confidence draws nothing
    batch_size        prompts that are decoded together; changes no answer, but how much memory it takes
    """

    max_new_tokens: int = 128
    steps: int = 128
    gen_block_length: int | None = None
    temperature: float = 0.0
    remasking: str = "low_confidence"
    threshold: float | None = None
    cfg_scale: float = 0.0
    stop_at_eos: bool = False
    infill: bool = False
    gap_length: int = 20
    seed: int = 1234
    batch_size: int = 8

    def __post_init__(self):
        for name in ("max_new_tokens", "steps", "gen_block_length", "gap_length", "batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}: give at least 1.")
        for name in ("temperature", "cfg_scale"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}: give a finite number that is not negative.")
        if self.remasking not in REMASKING:
            raise ValueError(f"{_flag('remasking')} {self.remasking} is unknown: choose one of {', '.join(REMASKING)}.")
        if self.threshold is not None:
            if not 0 <= self.threshold <= 1:
                raise ValueError(f"{_flag('threshold')} is {self.threshold}: give a probability.")
            if self.remasking == "random":
                raise ValueError("--threshold compares confidences and --remasking random ignores them: drop one.")
        if self.infill and self.stop_at_eos:
            raise ValueError("--stop-at-eos ends an answer, and --infill has none: drop one.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Completion:
    """One prompt's answer, or, when infilling, the whole filled sequence.

    text               decoded without special tokens; an answer up to its first EOS
    ids                exactly max_new_tokens ids, or the whole sequence
    steps              denoising steps that this prompt took
    forwards           sequences of this prompt that went through the network: steps, twice as many under guidance
    tokens_per_second  generated tokens over the time from the start of its batch until this prompt was finished
    """

    text: str
    ids: list[int]
    steps: int
    forwards: int
    tokens_per_second: float
