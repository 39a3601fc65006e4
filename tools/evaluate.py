"""Asks a trained diffusion language model the questions of lm-eval (the Language Model Evaluation Harness).

    python tools/evaluate.py --load checkpoints/run --tasks local_mc --include-path tests/evaluation/tasks
    torchrun --nproc-per-node 4 tools/evaluate.py --load checkpoints/run --tasks arc_easy,gsm8k --output-path out.json

Multiple choice and perplexity need likelihoods: exact for models with an autoregressive stream (hybrid, idlm), else the
bound that the model was trained with, estimated with --num-draws passes. Tasks that generate use the model's sampler.
Every process, or every --tensor-model-parallel-size processes, hold a copy of the model and answer a share of the
requests; the results are the same. Needs the extra: pip install -e '.[eval]'.
"""

import argparse
import json
import os
import sys
import time

import megatron_dllm  # noqa: F401  (installs the CPU backend where there is no GPU; before any megatron)
from megatron_dllm.arguments import fail
from megatron_dllm.display import check_writable, whole_file
from megatron_dllm.evaluation import AUTO, BOUND, LIKELIHOODS
from megatron_dllm.generation.config import REMASKING, GenerationConfig
from megatron_dllm.launch import quiet, with_hyphens


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = GenerationConfig()
    add = parser.add_argument_group("model").add_argument
    add("--load", required=True, metavar="DIR", help="a run's folder, or an iter_ folder in it")
    add("--ckpt-step", type=int, metavar="N", help="iteration to load; default: the latest")
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="processes that share a copy")
    add("--tokenizer-model", metavar="PATH", help="where the tokenizer is now, if not where it was at training")
    add("--chat-template", metavar="FILE", help="where the chat template is now, or another one")
    add("--dllm-mask-token-id", type=int, metavar="ID", help="must be the id that the model was trained with")
    add("--bf16", action="store_true", help="compute in bf16; default: the precision of training")
    add("--trust-remote-code", action="store_true", help="run the Python code of a tokenizer that comes with some")
    add = parser.add_argument_group("tasks").add_argument
    add("--tasks", required=True, metavar="NAMES", help="tasks, groups or patterns, separated by commas")
    add("--include-path", metavar="DIR", help="only the tasks whose YAML files are here, and no network; default: "
        "lm-eval's own tasks")  # fmt: skip
    add("--limit", type=int, metavar="N", help="only the first questions of each task")
    add("--num-fewshot", type=int, metavar="N", help="solved questions before each; default: as the task says")
    add("--apply-chat-template", action="store_true", help="ask in the chat format of training")
    add("--system-instruction", metavar="TEXT", help="the chat's system message, or text before every question")
    add("--output-path", metavar="FILE", help="write all results as JSON")
    add("--log-samples", action="store_true", help="every question and answer too, in --output-path")
    add = parser.add_argument_group("likelihood").add_argument
    add("--likelihood", choices=LIKELIHOODS, default=AUTO, help="auto: exact where the model has it (%(default)s)")
    add("--num-draws", type=int, default=128, metavar="N", help="passes a bound is estimated with (%(default)s)")
    add("--check-greedy", action="store_true", help="bounds: decode every continuation for metrics that ask whether it "
        "is the greedy one; default: it never is")  # fmt: skip
    add("--batch-size", type=int, default=default.batch_size, metavar="N", help="sequences at a time (%(default)s)")
    add("--seed", type=int, default=default.seed, help="default %(default)s")
    add = parser.add_argument_group("decoding").add_argument
    add("--max-new-tokens", type=int, metavar="N", help="at most, also where a task allows more")
    add("--steps", type=int, metavar="N", help="at most, over all blocks; default: a token a step")
    add("--gen-block-length", type=int, metavar="N", help="default 128; models trained in blocks write their own")
    add("--temperature", type=float, help="default: the task's where it samples, else 0")
    add("--remasking", choices=REMASKING, default=default.remasking, help="which tokens wait (%(default)s)")
    add("--threshold", type=float, help="also commit tokens at least this probable")
    add("--cfg-scale", type=float, default=default.cfg_scale, help="classifier-free guidance (%(default)s)")
    return parser.parse_args([with_hyphens(word) for word in argv])


def check_options(options: argparse.Namespace) -> None:
    """ValueError for values that mean nothing."""
    for name, least in dict(num_draws=1, batch_size=1, limit=1, num_fewshot=0, max_new_tokens=1, steps=1).items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: give at least {least}.")
    if options.include_path is not None and not os.path.isdir(options.include_path):
        raise ValueError(f"--include-path {options.include_path} is no folder: give that of the tasks' YAML files.")
    if options.log_samples and options.output_path is None:
        raise ValueError("--log-samples writes into --output-path: give it.")
    if options.output_path is not None:
        check_writable("--output-path", options.output_path)


def import_harness():
    """(lm_eval, its TaskManager). ValueError if it is not installed."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap would fork processes that share our sockets
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if int(os.environ.get("RANK", "0")):
        os.environ.setdefault("TQDM_DISABLE", "1")  # one progress bar a job
    try:
        import datasets
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"lm-eval cannot be imported ({error}): pip install -e '.[eval]'.") from error
    datasets.disable_progress_bars()
    return lm_eval, TaskManager


def find_tasks(TaskManager, names: str, folder: str | None):
    """(manager, names, tasks by name), with their data loaded. ValueError naming what is not there."""
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    found = []
    for name in filter(None, (name.strip() for name in names.split(","))):
        matching = manager.match_tasks([name])
        if not matching:
            known = manager.all_tasks
            there = f"there are {', '.join(known)}" if 0 < len(known) <= 20 else f"there are {len(known)}"
            raise ValueError(f"--tasks {name} is unknown ({there}): correct it, or give its folder by --include-path.")
        found += [task for task in matching if task not in found]
    if not found:
        raise ValueError("--tasks names no task: give at least one.")
    try:
        return manager, found, manager.load(found)["tasks"]
    except Exception as error:  # a task is a program that reads files, which can fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--tasks {names} cannot be loaded ({reason.rstrip('.')}): mend it or its data.") from error


def decoding_config(options: argparse.Namespace, stop_at_eos: bool) -> GenerationConfig:
    names = "gen_block_length remasking threshold cfg_scale seed batch_size".split()
    values = {name: getattr(options, name) for name in names}
    if options.temperature is not None:
        values["temperature"] = options.temperature
    return GenerationConfig(**values, stop_at_eos=stop_at_eos)


def prepare(options: argparse.Namespace):
    """(lm_eval, task manager, task names, plan of the model, decoding config): all that can be wrong is found here."""
    check_options(options)
    if options.include_path is not None:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # before anything that reads them is imported
            os.environ.setdefault(name, "1")
    lm_eval, TaskManager = import_harness()
    with quiet():
        from megatron_dllm.evaluation.likelihood import kind_of
        from megatron_dllm.evaluation.lm import answer_tokens, chat_text, check_answer
        from megatron_dllm.evaluation.replicas import plan
        from megatron_dllm.generation import check_sampler
        from megatron_dllm.generation.samplers import stops_at_eos

        planned = plan(
            options.load,
            step=options.ckpt_step,
            tensor_model_parallel_size=options.tensor_model_parallel_size,
            tokenizer_model=options.tokenizer_model,
            chat_template=options.chat_template,
            mask_token_id=options.dllm_mask_token_id,
            bf16=options.bf16,
            trust_remote_code=options.trust_remote_code,
        )
    args, tokenizer = planned.args, planned.tokenizer
    config = decoding_config(options, stop_at_eos=stops_at_eos(args, tokenizer))
    with quiet():
        manager, names, tasks = find_tasks(TaskManager, options.tasks, options.include_path)
    kinds = {task.OUTPUT_TYPE for task in tasks.values()}
    if kinds - {"generate_until"}:
        bound = kind_of(args, options.likelihood) == BOUND
        if bound and "loglikelihood" in kinds and not options.check_greedy and os.environ.get("RANK", "0") == "0":
            print(
                "Without --check-greedy no answer counts as greedy: metrics that ask for that are 0.", file=sys.stderr
            )
    if "generate_until" in kinds or options.check_greedy:
        check_sampler(args, config, tokenizer)
    for task in tasks.values():
        if task.OUTPUT_TYPE == "generate_until":
            asked = getattr(task.config, "generation_kwargs", None) or {}
            check_answer(answer_tokens(asked, options.max_new_tokens), args.max_position_embeddings)
    if options.apply_chat_template:
        turn = [dict(role="user", content="Why?"), dict(role="assistant", content="So.")]
        chat_text([*turn, turn[0]], tokenizer)  # as with --num-fewshot
    return lm_eval, manager, names, planned, config


def main() -> None:
    options = parse_args(sys.argv[1:])
    try:
        lm_eval, manager, names, planned, config = prepare(options)
    except ValueError as error:
        fail(error)
    began = time.perf_counter()
    with quiet():
        import torch

        from megatron_dllm.evaluation.lm import EvaluatedModel
        from megatron_dllm.generation.load import build

        loaded = build(planned)
        model = EvaluatedModel(
            loaded,
            likelihood=options.likelihood,
            num_draws=options.num_draws,
            batch_size=options.batch_size,
            seed=options.seed,
            check_greedy=options.check_greedy,
            decoding=config,
            max_new_tokens=options.max_new_tokens,
            steps=options.steps,
            temperature=options.temperature,
            chat=options.apply_chat_template,
        )
    loaded_at = time.perf_counter()
    try:
        with quiet():
            results = lm_eval.simple_evaluate(
                model=model,
                tasks=names,
                task_manager=manager,
                num_fewshot=options.num_fewshot,
                limit=options.limit,
                batch_size=options.batch_size,
                bootstrap_iters=1000,
                log_samples=options.log_samples,
                system_instruction=options.system_instruction,
                apply_chat_template=options.apply_chat_template,
                random_seed=options.seed,
                numpy_random_seed=options.seed,
                torch_random_seed=options.seed,
                fewshot_random_seed=options.seed,
            )
    except ValueError as error:
        fail(error)
    seconds = time.perf_counter() - loaded_at
    if int(os.environ.get("RANK", "0")) == 0:
        results["config"]["checkpoint"] = planned.folder
        report(results, options, model.statistics.forwards, loaded_at - began, seconds)
    torch.distributed.destroy_process_group()


def report(results: dict, options: argparse.Namespace, forwards: int, loading: float, seconds: float) -> None:
    """The table on standard output, how long it took on standard error, everything in --output-path."""
    from lm_eval.utils import handle_non_serializable, make_table

    if options.output_path is not None:  # first: nothing that is only shown may cost the results
        with whole_file(options.output_path) as file:
            json.dump(results, file, default=handle_non_serializable, ensure_ascii=False, indent=1)
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    asked = sum(counts["effective"] for counts in results["n-samples"].values())
    print(
        f"{asked} questions in {seconds:.1f} s ({seconds / max(asked, 1):.3f} s each), loading {loading:.1f} s. "
        f"Likelihoods took {forwards} sequences through the network.",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
