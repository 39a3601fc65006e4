"""Writes text with a trained diffusion language model.

    python tools/generate.py --load checkpoints/run --prompt "Once upon a time" --max-new-tokens 64 --stream
    python tools/generate.py --load checkpoints/run --infill --prompt "The capital of [MASK:7] is Paris."
    python tools/generate.py --load checkpoints/run --prompts-file questions.jsonl --output answers.jsonl
    python tools/generate.py --hf-model LLaDA-8B-Instruct --preset llada --prompt "Why?" --trace why.html
    torchrun --nproc-per-node 2 tools/generate.py --tensor-model-parallel-size 2 --load ... --prompt ...

The checkpoint may come from any parallel layout. A model trained on chat data, or a Hugging Face folder whose tokenizer
has a chat template, answers through that template; any other continues the text, as does every model with --raw.
Answers appear in the order of the prompts, a batch at a time. docs/generation.md says which sampler is for which model.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TextIO

import megatron_dllm  # noqa: F401  (installs the CPU backend where there is no GPU; before any megatron)
from megatron_dllm.arguments import fail
from megatron_dllm.display import check_writable, say, whole_file
from megatron_dllm.generation.config import Completion, GenerationConfig
from megatron_dllm.generation.options import add_decoding_flags, decoding_config
from megatron_dllm.generation.requests import Request, collect
from megatron_dllm.launch import quiet, with_hyphens

# flags of the model, and what `generation.load.plan` calls them
_PLAN = dict(
    hf_model="hf_model",
    target="target",
    ckpt_step="step",
    dllm_mode="mode",
    tensor_model_parallel_size="tensor_model_parallel_size",
    pipeline_model_parallel_size="pipeline_model_parallel_size",
    tokenizer_model="tokenizer_model",
    chat_template="chat_template",
    dllm_mask_token_id="mask_token_id",
    bf16="bf16",
    fp32="fp32",
    trust_remote_code="trust_remote_code",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        fail(ValueError(f"{message}: see --help."))


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """What was given, and nothing else but the flags that `main` reads without asking."""
    parser = _Parser(
        description=__doc__,
        usage="%(prog)s (--load DIR | --hf-model DIR) (--prompt TEXT | --messages-file FILE | --prompts-file FILE) ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    default = GenerationConfig()
    add = parser.add_argument_group("model (--load or --hf-model)").add_argument
    add("--load", default=None, metavar="DIR", help="a training run's folder, or an iter_ folder in it")
    add("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    add("--hf-model", default=None, metavar="DIR", help="a Hugging Face folder of one of the families instead")
    add("--target", metavar="DIR", help="of a draft: the model it drafts for; default: the one of its training")
    add(
        "--dllm-mode",
        metavar="MODE",
        help="as what --hf-model is to be decoded; default: what its family was trained as",
    )
    add("--tensor-model-parallel-size", type=int, metavar="N", help="processes that share each layer (1)")
    add("--pipeline-model-parallel-size", type=int, metavar="N", help="groups of processes that share the layers (1)")
    add("--tokenizer-model", metavar="PATH", help="where the tokenizer is now, if not where it was at training")
    add("--chat-template", metavar="FILE", help="where the chat template is now, or another one")
    add("--dllm-mask-token-id", type=int, metavar="ID", help="must be the id that the model was trained with")
    add("--bf16", action="store_true", help="compute in bf16; default: the precision of training")
    add("--fp32", action="store_true", help="compute in fp32")
    add("--trust-remote-code", action="store_true", help="run the Python code of a tokenizer that comes with some")
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--messages-file", default=None, metavar="FILE", help='JSONL: a conversation {"messages": [...]} per line')
    add(
        "--prompts-file",
        default=None,
        metavar="FILE",
        help='JSONL: {"prompt": ...}, {"messages": [...]} or {"tokens": [...]} per line; other fields are carried over '
        "to the answers, which are JSONL too",
    )
    add("--raw", action="store_true", default=False, help="continue the prompt as text, without a chat template")
    add(
        "--infill",
        action="store_true",
        default=False,
        help="fill the gaps [MASK] and [MASK:length] of the prompts (as text)",
    )
    add("--gap-length", type=int, metavar="N", help=f"tokens of a [MASK] ({default.gap_length})")
    add_decoding_flags(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", default=False, help="one object per prompt: text, ids, steps, ...")
    add("--output", default=None, metavar="FILE", help="write these objects to a file, once all answers are there")
    add(
        "--compare-plain",
        action="store_true",
        default=False,
        help="of a draft: let the target write everything alone too, and say how much sooner it comes with the draft",
    )
    add("--stream", action="store_true", default=False, help="show the text while it is denoised, prompt after prompt")
    add("--trace", default=None, metavar="FILE", help="write a page that plays the denoising")
    return parser.parse_args([with_hyphens(word) for word in argv])


def check_options(options: argparse.Namespace) -> GenerationConfig:
    """How to decode. Raises ValueError (one sentence) for flags that do not go together; `plan` checks the model's."""
    if options.messages_file is not None and (options.raw or options.infill):
        raise ValueError("--messages-file needs the chat template: leave out --raw and --infill.")
    objects = options.json or options.prompts_file is not None
    if options.stream and objects and options.output is None:
        raise ValueError(
            "--stream shows text where --json and --prompts-file write objects: leave it out, or give --output."
        )
    config = decoding_config(vars(options))
    if options.stream:
        if getattr(options, "batch_size", 1) > 1:
            raise ValueError("--stream shows one prompt after the other: leave out --batch-size.")
        config = replace(config, batch_size=1)
    if _is_first_rank():
        files = dict(output=options.output, trace=options.trace)
        for name, path in files.items():
            if path is not None:
                check_writable(f"--{name}", path)
        paths = [os.path.realpath(path) for path in (*files.values(), options.prompts_file) if path is not None]
        if len(set(paths)) < len(paths):
            raise ValueError("--prompts-file, --output and --trace must be different files: rename one.")
    return config


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def answers_in_chat(options: argparse.Namespace, planned) -> bool:
    """Whether a text is what a user says: the model was trained on conversations, or its folder says so."""
    if options.raw or options.infill:
        return False
    if options.hf_model is not None:
        return planned.tokenizer.chat_template is not None
    return planned.args.sft_data_path is not None


class Report:
    """What becomes of the answers on the first rank; other ranks compute them only."""

    def __init__(self, options: argparse.Namespace, config: GenerationConfig, tokenizer, out: TextIO):
        """comparison: of what a draft helps to write, set before `write`."""
        from megatron_dllm.generation.streaming import Appended, Redrawn
        from megatron_dllm.generation.trace import Recorder

        self._options, self._config, self._tokenizer, self._out = options, config, tokenizer, out
        self._display = (Redrawn if out.isatty() else Appended)(tokenizer, out) if options.stream else None
        self._recorder = Recorder() if options.trace is not None else None
        self._objects = options.json or options.prompts_file is not None
        self.comparison = None

    def observe(self, rows) -> None:
        for watching in (self._display, self._recorder):
            if watching is not None:
                watching.observe(rows)

    def write(self, requests: Sequence[Request], completions: Iterator[Completion]) -> None:
        """Goes through all completions. Files get their names at the end, if nothing went wrong."""
        output = contextlib.nullcontext() if self._options.output is None else whole_file(self._options.output)
        with output as file:
            for number, (request, completion) in enumerate(zip(requests, completions, strict=True), 1):
                measured = None if self.comparison is None else self.comparison.add(completion)
                if file is not None:
                    file.write(request.line(completion, measured))
                self._show(request, completion, measured, last=number == len(requests))
        if self.comparison is not None:
            say(f"{self.comparison.summary()}\n", sys.stderr)
        if self._recorder is not None:
            from megatron_dllm.generation.trace import render

            with whole_file(self._options.trace) as file:
                file.write(render(self._recorder.traces(), self._tokenizer, self._config))

    def _show(self, request: Request, completion: Completion, measured: dict | None, last: bool) -> None:
        if self._display is not None:
            self._display.finish(completion.text)
        elif self._options.output is not None:
            return
        elif self._objects:
            return say(request.line(completion, measured), self._out)
        else:
            say(completion.text + "\n", self._out)
        if not last:  # a blank line between texts
            say("\n", self._out)


def quietly(completions: Iterator) -> Iterator:
    """The same ones, each computed in `quiet`."""
    while True:
        with quiet():
            completion = next(completions, None)
        if completion is None:
            return
        yield completion


def main() -> None:
    options = parse_args(sys.argv[1:])
    try:
        config = check_options(options)
        requests = collect(options.prompt, options.messages_file, options.prompts_file)
        with quiet():
            from megatron_dllm.generation import comparison, prepare, stream
            from megatron_dllm.generation.load import build, plan
            from megatron_dllm.models.target import UnusableTarget

            given = {_PLAN[name]: value for name, value in vars(options).items() if name in _PLAN and value is not None}
            planned = plan(options.load, **given)
        if answers_in_chat(options, planned):
            requests = [request.in_chat() for request in requests]
        prompts, names = [request.prompt for request in requests], [request.name for request in requests]
        prepare(prompts, planned.tokenizer, config, planned.args, names)
        drafted = comparison.is_drafted(planned.args, config)
        if options.compare_plain and not drafted:
            raise ValueError("--compare-plain compares a draft and its target with the target alone: leave it out.")
    except ValueError as error:
        fail(error)
    report = Report(options, config, planned.tokenizer, sys.stdout) if _is_first_rank() else None
    with quiet():
        try:
            loaded = build(planned)
        except UnusableTarget as error:
            fail(error)
        plain = None
        if options.compare_plain:
            plain = comparison.alone(loaded.model, planned.tokenizer, prompts, config)
        observe = None
        if report is not None:
            observe = report.observe
            report.comparison = comparison.Comparison(planned.tokenizer, config, plain) if drafted else None
        completions = stream(loaded.model, planned.tokenizer, prompts, config, observe)
    if report is None:
        for _ in quietly(completions):
            pass
    else:
        try:
            report.write(requests, quietly(completions))
        except OSError as error:  # a full disk
            fail(error)
    import torch

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
