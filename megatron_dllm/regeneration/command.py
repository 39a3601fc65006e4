"""The command line of tools/regenerate.py."""

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from collections import Counter

from megatron_dllm.display import can_hold_files
from megatron_dllm.regeneration import manifest
from megatron_dllm.regeneration.client import Server, ServerGone
from megatron_dllm.regeneration.loop import Run, remaining
from megatron_dllm.regeneration.shards import Shards
from megatron_dllm.regeneration.source import Source

_FILES_BESIDE_CONNECTIONS = 128
_OWN_FIELDS = {"model", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "tools", "n", "stream"}
_SHOW_SCAN_ROWS = 20_000
_KEY_VARIABLE = "OPENAI_API_KEY"


def json_object(text: str) -> dict:
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object.")
    if taken := sorted(_OWN_FIELDS & found.keys()):
        raise argparse.ArgumentTypeError(f"{', '.join(taken)} cannot be given here: it is set by the tool or a flag.")
    return found


def part(text: str) -> tuple[int, int]:
    """(i, n) of "i/n"."""
    words = text.split("/")
    whole = len(words) == 2 and all(word.isascii() and word.isdigit() for word in words)
    if not whole or int(words[0]) >= int(words[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: write i/n with i from 0 to n-1, like 0/4.")
    return int(words[0]), int(words[1])


def parser(description: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("what").add_argument
    add("--input-data", nargs="+", required=True, metavar="FILE", help="chat data: JSONL or .parquet")
    add("--messages-column", default="messages", metavar="NAME", help="default: %(default)s")
    add("--output-dir", required=True, metavar="DIR", help="for shard-000000.parquet and so on")
    add("--turns", choices=("last", "all"), default="last", help="answers to replace: what the assistant says at the "
        "end, or each of its turns, one after the other; default: %(default)s")
    add("--shuffle-seed", type=int, metavar="N", help="another order of the rows; default: the input's")
    add("--shard-size", type=int, default=1000, metavar="N", help="rows of the input a shard; default: %(default)s")
    add = parser.add_argument_group("how it is sampled").add_argument
    add("--model", required=True, metavar="NAME", help="as the server calls it")
    add("--max-new-tokens", type=int, default=1024, metavar="N", help="what is longer is dropped; default: %(default)s")
    add("--temperature", type=float, default=0.0, help="default: %(default)s")
    add("--top-p", type=float, default=1.0, help="default: %(default)s")
    add("--top-k", type=int, default=0, help="not every server knows it; default: %(default)s, not sent")
    add("--seed", type=int, metavar="N", help="gives each answer a seed of its own; default: not sent")
    add("--reasoning", choices=("none", "save", "disable"), default="none", help="what the model thinks before it "
        "answers: left away, saved as reasoning_content, or asked not to; default: %(default)s")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of the request")
    add = parser.add_argument_group("how it is asked").add_argument
    add("--target-server", default="http://localhost:30000/v1", metavar="URL", help="default: %(default)s")
    add("--api-key-variable", metavar="NAME", help="environment variable that holds the key, if the server wants one; "
        f"default: {_KEY_VARIABLE}, if it is set")
    add("--concurrency", type=int, default=32, metavar="N", help="requests at once; default: %(default)s")
    add("--timeout-s", type=float, default=600.0, metavar="SECONDS", help="for one answer; default: %(default)s")
    add("--max-retries", type=int, default=3, metavar="N", help="of one request; default: %(default)s")
    add("--stop-after", type=int, default=100, metavar="N", help="end the run when so many conversations fail in a "
        "row, which looks like the server's fault; 0: never; default: %(default)s")
    add = parser.add_argument_group("which part").add_argument
    add("--resume", action="store_true", help="go on with what is in --output-dir")
    add("--retry-failed", action="store_true", help="with --resume: ask again for what has failed")
    add("--num-workers-shard", type=part, default=(0, 1), metavar="i/n", help="this is process i of n (from 0), which "
        "makes every n-th shard; all get the same other flags")
    return parser


def check(options: argparse.Namespace) -> str | None:
    """The API key, if there is one. Raises ValueError for flags that make no sense."""
    least = dict(shard_size=1, concurrency=1, max_new_tokens=1, max_retries=0, stop_after=0, temperature=0, top_k=0)
    for name, low in least.items():
        if not low <= getattr(options, name) < float("inf"):
            raise ValueError(f"{_flag(name)} {getattr(options, name)} must be a number from {low}.")
    if not 0 < options.timeout_s < float("inf"):
        raise ValueError(f"--timeout-s {options.timeout_s:g} must be a number above 0.")
    if not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p {options.top_p:g} must be above 0 and at most 1.")
    if options.reasoning == "disable" and "chat_template_kwargs" in options.extra_body:
        raise ValueError("--reasoning disable and --extra-body both set chat_template_kwargs: leave one away.")
    if options.retry_failed and not options.resume:
        raise ValueError("--retry-failed asks again in a folder that exists: give --resume too.")
    if os.path.lexists(options.output_dir) and not os.path.isdir(options.output_dir):
        raise ValueError(f"--output-dir {options.output_dir} is not a folder: choose another.")
    if not can_hold_files(options.output_dir):
        raise ValueError(f"--output-dir {options.output_dir} is not a folder that can be written to: choose another.")
    try:
        import httpx2
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install 'megatron-dllm[regenerate]'.") from error
    try:
        url = httpx2.URL(options.target_server)
    except httpx2.InvalidURL as error:
        raise ValueError(f"--target-server {options.target_server!r} is not a URL ({error}).") from error
    if url.userinfo:
        raise ValueError("--target-server holds a password, which others can see: give a key by environment variable.")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ValueError(f"--target-server {options.target_server!r} must be like http://localhost:30000/v1.")
    _allow_files(options.concurrency + _FILES_BESIDE_CONNECTIONS)
    variable = options.api_key_variable or _KEY_VARIABLE
    key = os.environ.get(variable, "").strip() or None
    if key is None and options.api_key_variable is not None:
        raise ValueError(f"--api-key-variable {variable} is not set or empty: export it, or leave out the flag.")
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(f"The value of {variable} cannot be an API key: it holds white space or more.")
    return key


def prepare(options: argparse.Namespace) -> tuple[Shards, list[int], dict]:
    """(shards, numbers of this process's, manifest). Writes nothing. Raises ValueError for input or output that does
    not fit."""
    from tqdm import tqdm

    scan = lambda rows: tqdm(rows, "check columns", unit="rows", unit_scale=True, disable=len(rows) < _SHOW_SCAN_ROWS)
    source = Source(options.input_data, options.messages_column, options.shuffle_seed, scan)
    shards = Shards(options.output_dir, source, options.shard_size, options.reasoning == "save")
    wanted = manifest.manifest(options, source.digest(), len(source))
    i, n = options.num_workers_shard
    mine = list(range(i, len(shards), n))
    agrees, begun = manifest.agree(options.output_dir, wanted), any(map(shards.begun, mine))
    if not agrees and (foreign := manifest.foreign(options.output_dir)):
        raise ValueError(
            f"--output-dir {options.output_dir} holds something else ({foreign}): choose an empty or a new folder."
        )
    if begun and not agrees:
        raise ValueError(f"{options.output_dir} has shards but no {manifest.NAME}: choose another --output-dir.")
    if begun and not options.resume:
        raise ValueError(
            f"{options.output_dir} has shards of an earlier run: go on with --resume, or choose another --output-dir."
        )
    return shards, mine, wanted


def main(argv: list[str] | None = None, description: str | None = None) -> int:
    """Exit code: 0, all shards of this process are done; 1, ended before; 2, wrong flags or input; 130, interrupted."""
    options = parser(description).parse_args(argv)
    try:
        key = check(options)
        shards, mine, wanted = prepare(options)
        count = remaining(shards, mine, options.retry_failed)
        if shards.source.left_out:
            print(f"note: not kept: {', '.join(sorted(shards.source.left_out))}", file=sys.stderr)
        os.makedirs(options.output_dir, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"regenerate.py: error: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(_run(options, key, shards, mine, wanted, count))
    except (ServerGone, ValueError, OSError) as error:
        print(f"regenerate.py: error: {error}\nThe answers so far are kept: go on with --resume.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("regenerate.py: interrupted. The answers so far are kept: go on with --resume.", file=sys.stderr)
        return 130
    print(summary(shards, mine))
    return 0


async def _run(
    options: argparse.Namespace, key: str | None, shards: Shards, mine: list[int], wanted: dict, count: int
) -> None:
    """count: rows to ask for."""
    from tqdm import tqdm

    done_before = sum(len(shards.rows(shard)) for shard in mine) - count
    options.concurrency = min(options.concurrency, max(1, count))
    start = time.monotonic()
    terminal = sys.stderr.isatty()
    with tqdm(  # a log file gets a line now and then
        total=count + done_before, initial=done_before, unit="rows", mininterval=0.2 if terminal else 30.0
    ) as bar:

        def progress(done: int, failed: int, tokens: int) -> None:
            rate = tokens / max(1e-9, time.monotonic() - start)
            bar.set_postfix_str(f"{failed} failed, {rate:.0f} tokens/s", refresh=False)
            bar.update(done + done_before - bar.n)

        async with Server(options, key) as server:
            await Run(server, shards, mine, options, lambda: manifest.write(options.output_dir, wanted), progress)()


def summary(shards: Shards, mine: list[int]) -> str:
    """What became of this process's shards."""
    reports = [shards.report(shard) for shard in mine]
    kinds = Counter(failure["kind"] for report in reports if report for failure in report["failed"])
    answered, skipped = (sum(report[key] for report in reports if report) for key in ("answered", "skipped"))
    told = f"{shards.folder}: {answered} answered, {kinds.total()} failed"
    if kinds:
        told += f" ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})"
    return told + (f", {skipped} without a user turn" if skipped else "") + f"; {len(reports)} shards"


def _allow_files(count: int) -> None:
    """Raises ValueError where the system does not let a process have so many connections open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ValueError(
            f"--concurrency {count - _FILES_BESIDE_CONNECTIONS} needs {count} open files, but the system allows "
            f"{hard}: lower it, or start several processes with --num-workers-shard."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
