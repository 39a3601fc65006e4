"""Nothing that README, docs and examples tell people to run has rotted: flags exist, files exist, layouts are legal.

The launch scripts are run with a `torchrun` that only writes down how it was called; what it was to run is then
parsed and checked as the program itself would, GPU scripts included.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_dllm.modes import MODES
from tests.gemma import make_folder
from tests.hf_models import make

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LAUNCHERS = sorted(path for path in (ROOT / "examples").glob("*/*.sh") if path.parent.name != "slurm")
RUNS_IT = tuple(f"examples/{mode}/" for mode in MODES)  # scripts that take pretrain_dllm.py's flags

_RECORD = """#!/usr/bin/env python
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""

# Parses command lines in one process (imports take seconds); prints one JSON line for each: an error, or null.
_PARSE = """
import contextlib, io, json, os, sys
import megatron_dllm
from megatron_dllm.arguments import read_command_line  # all checks but those of this machine
from megatron.training import training

for line in sys.stdin:
    case = json.loads(line)
    os.environ.update(WORLD_SIZE=str(case["processes"]), LOCAL_WORLD_SIZE=str(case["processes"]), RANK="0")
    sys.argv = ["pretrain_dllm.py", *case["argv"]]
    error, output = None, io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            read_command_line()
        except (Exception, SystemExit) as e:
            error = f"{type(e).__name__}: {e}: {output.getvalue()[-500:]}"
        training.destroy_global_state()
    print("RESULT", json.dumps(error))
"""


def parse(cases: list[dict]) -> list[str | None]:
    done = subprocess.run(
        [sys.executable, "-c", _PARSE],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A SentencePiece model and a Hugging Face folder, both with a mask token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    tool = [sys.executable, "tools/train_tokenizer.py", "--vocab-size", "34"]
    subprocess.run(
        [*tool, "--input", folder / "text.txt", "--output-prefix", folder / "tokenizer"], cwd=ROOT, check=True
    )
    words = {"<unk>": 0, "<eos>": 1, "<mask>": 2, "a": 3}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        eos_token="<eos>",
        mask_token="<mask>",
        unk_token="<unk>",
    ).save_pretrained(folder / "hf")
    return {"sp": str(folder / "tokenizer.model"), "hf": str(folder / "hf")}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder with a model that drafts are trained for."""
    return make("qwen3", tmp_path_factory.mktemp("target"), shape=dict(max_position_embeddings=4096))[0]


@pytest.fixture(scope="module")
def encoder_and_canvas(tmp_path_factory):
    """A folder with a DiffusionGemma."""
    return make_folder(str(tmp_path_factory.mktemp("gemma") / "hf"), max_position_embeddings=4096)


def recorder(folder: Path):
    """What runs a script, with the recording torchrun of `folder` on PATH, and lists the recorded calls."""
    stub = folder / "bin" / "torchrun"
    stub.parent.mkdir(parents=True)
    stub.write_text(_RECORD.replace("/usr/bin/env python", sys.executable))
    stub.chmod(0o755)
    record = folder / "calls"
    path = os.pathsep.join([str(stub.parent), str(Path(sys.executable).parent), os.environ["PATH"]])

    def run(command: list, **environment) -> list[list[str]]:
        environment = os.environ | dict(PATH=path, RECORD=str(record)) | environment
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300, capture_output=True)
        return [json.loads(line) for line in record.read_text().splitlines()]

    return run


def case(call: list[str], tokenizer_of: dict) -> dict:
    """What a call of torchrun trains: (processes, flags), with a tokenizer that exists."""
    program = call.index("pretrain_dllm.py")
    launcher, argv = call[:program], call[program + 1 :]
    if "--tokenizer-model" in argv:
        kind = argv[argv.index("--tokenizer-type") + 1]
        argv[argv.index("--tokenizer-model") + 1] = tokenizer_of["hf" if kind == "HuggingFaceTokenizer" else "sp"]
    return dict(processes=int(launcher[launcher.index("--nproc-per-node") + 1]), argv=argv)


@pytest.fixture(scope="module")
def refusals(tokenizers, target, encoder_and_canvas, tmp_path_factory):
    """{launch script: why its command is refused, or None}"""
    cases = []
    for script in LAUNCHERS:
        folder = tmp_path_factory.mktemp(script.parent.name)
        environment = dict(CHAT=str(folder / "chat.jsonl"), TARGET=target, MASK_TOKEN="2", MODEL=encoder_and_canvas)
        cases.append(case(recorder(folder)(["bash", str(script)], **environment)[-1], tokenizers))
    return dict(zip(LAUNCHERS, parse(cases), strict=True))


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_launch_script_is_a_legal_command(script, refusals):
    assert refusals[script] is None


@pytest.fixture
def slurm(tmp_path):
    """Runs a batch script as task 9 of 64, on the second of eight nodes; its `python` only writes down its call.

    Returns that call, and who it was told to be.
    """
    stubs = dict(
        srun='while [[ $1 == --* ]]; do shift; done; exec "$@"',
        scontrol="if [ $2 = hostnames ]; then printf 'node%d\\n' 0 1 2 3 4 5 6 7; else echo JobState=RUNNING x; fi",
        getent='[ "$2" != nowhere ]',
        python='printf "%s\\n" $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT "$@" >$RECORD',
    )
    (tmp_path / "bin").mkdir()
    for name, body in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    place = dict(NTASKS="64", NTASKS_PER_NODE="8", PROCID="9", LOCALID="1", JOB_NODELIST="node[0-7]")
    place |= dict(JOB_ID="12345", JOB_NAME="dllm", CPUS_PER_TASK="8", SUBMIT_DIR=str(ROOT))

    def run(script: str, *words: str, **environment: str) -> tuple[list[str], list[str], subprocess.CompletedProcess]:
        told = dict(VENV=str(tmp_path), LOGS=str(tmp_path / "logs"), RECORD=str(tmp_path / "call"))
        environment = told | {f"SLURM_{name}": value for name, value in place.items()} | environment
        done = subprocess.run(
            ["bash", ROOT / f"examples/slurm/{script}.sbatch", *words],
            cwd=tmp_path,
            env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"} | environment,
            timeout=300,
            capture_output=True,
            text=True,
        )
        record = tmp_path / "call"
        lines = record.read_text().splitlines() if record.exists() else []
        return lines[5:], lines[:5], done

    return run


def test_the_slurm_script_starts_the_ranks_of_all_nodes(slurm, tokenizers, tmp_path):
    call, place, done = slurm("pretrain", "--seed", "5", SAVE=str(tmp_path / "run"))
    assert place == ["9", "1", "64", "8", "node0:22345"]
    argv = case(["--nproc-per-node", "64", *call], tokenizers)["argv"]
    assert "--exit-signal-handler" in argv and argv[-2:] == ["--seed", "5"]
    assert parse([dict(processes=64, argv=argv)]) == [None]
    # it ended at once and saved nothing: it would do so again
    assert done.returncode == 1 and "nothing was gained since iteration 0" in done.stderr


def test_a_slurm_job_without_its_environment_says_how_to_make_it(slurm, tmp_path):
    (tmp_path / "bin" / "python").unlink()
    call, _, done = slurm("pretrain")
    assert not call and done.returncode == 2 and "examples/environment.sh" in done.stderr


@pytest.mark.parametrize("script", ("pretrain", "convert", "generate"))
def test_a_slurm_job_from_another_folder_asks_for_the_repository(slurm, tmp_path, script):
    call, _, done = slurm(script, SLURM_SUBMIT_DIR=str(tmp_path), PROMPTS="prompts.jsonl", OUTPUT="answers")
    assert not call and done.returncode == 2
    assert done.stderr == f"{tmp_path} is not the repository: submit from there, or set REPOSITORY to its path.\n"


def test_a_slurm_job_runs_its_own_repository_in_an_environment_of_another(slurm, tmp_path):
    environment = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "megatron_dllm").mkdir()
    (packages / "megatron_dllm" / "__init__.py").write_text("raise SystemExit('the other one')")
    _, _, done = slurm("convert", "import", "--help", VENV=str(environment), PYTHONPATH="")
    assert done.returncode == 0 and "--hf-model" in done.stdout, done.stderr


def test_slurm_ranks_must_find_the_first_node(slurm, tmp_path):
    call, _, done = slurm("pretrain", HEAD_NODE="nowhere", SAVE=str(tmp_path / "run"))
    assert not call and done.returncode == 2 and "set HEAD_NODE" in done.stderr and not (tmp_path / "run").exists()


def test_a_slurm_job_does_not_take_the_folder_that_another_took_meanwhile(slurm, tmp_path):
    holder = tmp_path / "slurm_job"
    holder.write_text("7\n")
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f'#!/bin/bash\nif [ "$3" = 8 ]; then echo RUNNING; else echo 8 >{holder}; fi\n')
    squeue.chmod(0o755)
    call, _, done = slurm("pretrain", SAVE=str(tmp_path))
    assert not call and holder.read_text() == "8\n" and done.stderr.startswith("Job 8 trains into")


@pytest.fixture
def generate(slurm, tmp_path):
    """Runs task `task` of an array `--array FIRST-LAST`; returns the flags of tools/generate.py, and the process."""
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers"
    prompts.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(8)))

    def run(first: int, last: int, task: int, count: int | None = None, **environment: str):
        place = dict(JOB_ID="77", TASK_ID=task, TASK_MIN=first, TASK_MAX=last, TASK_COUNT=count or last - first + 1)
        environment |= {f"SLURM_ARRAY_{name}": str(value) for name, value in place.items()}
        call, _, done = slurm("generate", **dict(PROMPTS=str(prompts), OUTPUT=str(answers)) | environment)
        return call, done

    return run


def test_one_share_of_a_slurm_array_is_done_again_alone(generate, tmp_path):
    first, _ = generate(0, 3, task=2)
    again, _ = generate(2, 2, task=2)
    assert first == again and first[first.index("--output") + 1] == f"{tmp_path}/answers/00003.jsonl"
    (tmp_path / "call").unlink()
    call, done = generate(0, 7, task=4)
    assert not call and done.returncode == 2 and "is made by the array 0-3, without 4" in done.stderr


def test_slurm_arrays_that_cannot_share_the_prompts_are_refused(generate, tmp_path):
    call, done = generate(1, 5, task=3, count=3)
    assert not call and done.returncode == 2 and "from its first to its last" in done.stderr
    call, done = generate(0, 3, task=0, PROMPTS="missing.jsonl")
    assert not call and done.returncode == 2 and "There is no file of prompts at missing.jsonl" in done.stderr
    assert not list((tmp_path / "answers").iterdir())


# --- what the documents say ---------------------------------------------------------------------------------------


def commands(document: Path) -> list[str]:
    """Lines of the ```bash blocks, continued ones joined, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text(), re.S)
    lines = re.sub(r"\\\n\s*", " ", "\n".join(blocks)).splitlines()
    return [line for line in (re.sub(r"(^|\s)# .*", "", line).strip() for line in lines) if line]


COMMANDS = [(document.name, command) for document in DOCUMENTS for command in commands(document)]


def test_the_readme_has_commands():
    assert len([name for name, _ in COMMANDS if name == "README.md"]) > 3


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_exist(document):
    text = document.read_text()
    named = re.findall(r"`((?:megatron_dllm|tools|examples|tests|docs)/[\w./-]*)`", text)
    named += re.findall(r"(?<![\w/])((?:tools|examples|tests)/[\w/.-]+\.(?:py|sh|sbatch))", text)
    named += [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    for name in named:
        assert (ROOT / name).exists() or (document.parent / name).exists(), f"{document.name} names {name}"


# Runs programs (JSON lists of words) with --help, each in a copy of one process (imports take seconds).
_HELP = """
import json, os, runpy, sys, traceback
import megatron_dllm
from megatron_dllm import generation, training
helps = []
for words in json.load(sys.stdin):
    out, into = os.pipe()
    if os.fork() == 0:
        os.dup2(into, 1)
        os.close(out)
        sys.argv, sys.path[0] = [*words, "--help"], os.path.dirname(words[0])
        code = 0
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            code = int(end.code not in (0, None))
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    os.close(into)
    helps.append(open(out).read())
    assert os.wait()[1] == 0, words
print("RESULT", json.dumps(helps))
"""


def flags_of(calls: list[tuple[str, ...]]) -> list[set[str]]:
    """The flags in the help of each program."""
    command = [sys.executable, "-c", _HELP]
    done = subprocess.run(command, input=json.dumps(calls), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    helps = json.loads(done.stdout.rpartition("RESULT ")[2])
    return [set(re.findall(r"--[a-z][\w-]+", text)) for text in helps]


def test_documents_use_flags_that_exist():
    """In commands, flags of the program that is called; in prose, flags of any program."""
    programs = [ROOT / "pretrain_dllm.py", *sorted((ROOT / "tools").glob("*.py"))]
    commands = ("import", "export", "check")
    calls = [*((str(p),) for p in programs), ("examples/unigram_entropy.py",)]
    calls += [("tools/convert_checkpoint.py", command) for command in commands]
    helps = flags_of(calls)
    known = {Path(call[0]).name: flags for call, flags in zip(calls, helps, strict=True) if len(call) == 1}
    converts = dict(zip(commands, helps[-3:], strict=True))
    known["convert_checkpoint.py"] |= set().union(*converts.values())
    for name, command in COMMANDS:
        words = command.split()
        program = next((Path(w).name for w in words if Path(w).name in known), None)
        if program is None and any(w.startswith(RUNS_IT) for w in words):
            program = "pretrain_dllm.py"
        if program is None:
            continue
        start = next(i for i, w in enumerate(words) if Path(w).name == program or w.startswith(RUNS_IT))
        flags = converts[words[start + 1]] if program == "convert_checkpoint.py" else known[program]
        for flag in (w.split("=")[0] for w in words[start:] if w.startswith("--")):
            assert flag in flags, f"{name}: {program} has no {flag} ({command})"
    anything = set().union(*known.values())
    for document in DOCUMENTS:
        prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
        for flag in re.findall(r"`(--[a-z][\w-]+)", prose):
            assert flag in anything, f"{document.name} names {flag}"


def test_python_docs_chat_is_chat_data(tmp_path):
    from megatron_dllm.data.chat_files import JsonLines

    path = tmp_path / "chat.jsonl"
    subprocess.run([sys.executable, "examples/python_docs_chat.py", path], cwd=ROOT, check=True)
    assert len(JsonLines(str(path))) > 50


def test_unigram_entropy_of_a_corpus_with_known_frequencies(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "0 1 2 3"}\n' * 9 + '{"text": "0 0 1 1"}\n')
    corpus = [str(tmp_path / "a")]
    tool = [sys.executable, "tools/preprocess_data.py", "--tokenizer-type", "NullTokenizer", "--vocab-size", "5"]
    subprocess.run(
        [*tool, "--input", tmp_path / "a.jsonl", "--output-prefix", *corpus], cwd=ROOT, check=True, capture_output=True
    )
    done = subprocess.run(
        [sys.executable, "examples/unigram_entropy.py", f"{corpus[0]}_text_document", "--split", "90,10,0"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    # corpus: frequencies 11, 11, 9, 9 of 40; held out: tokens that were a quarter each in training
    assert "corpus: 1.381 nats" in done.stdout and "documents: 1.386 nats" in done.stdout
