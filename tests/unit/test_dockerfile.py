"""The steps of the Dockerfile, without Docker: on a copy of this Python that has packages, as the image's has."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def steps(text: str) -> list[tuple[str, str]]:
    """(instruction, argument), continued lines joined, in order."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line.strip()]


def ignored(folder: str, names: list[str]) -> set[str]:
    """What .dockerignore says: names in the repository's own folder; with **/ in all."""
    patterns = (ROOT / ".dockerignore").read_text().split()
    here = [p.removeprefix("**/") for p in patterns if p.startswith("**/") or Path(folder) == ROOT]
    return {name for name in names for pattern in here if fnmatch(name, pattern)}


@pytest.mark.slow
@pytest.mark.skipif(sys.base_prefix == "/usr", reason="a Python to copy must have a folder of its own")
def test_the_steps_of_the_dockerfile_keep_pytorch_and_add_the_program(tmp_path):
    image, work = tmp_path / "image", tmp_path / "work"
    ignore = lambda folder, names: {"test", "__pycache__"}.intersection(names)
    shutil.copytree(sys.base_prefix, image, symlinks=True, ignore=ignore)
    site = next(image.glob("lib/python3.*/site-packages"))
    (site / "image.pth").write_text(sysconfig.get_path("purelib") + "\n")  # PyTorch and much more
    shutil.copytree(ROOT, work, ignore=ignored)
    keep = tmp_path / "keep.txt"
    ours = ("PYTHON", "VIRTUAL", "VENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= dict(PATH=f"{image}/bin:{os.environ['PATH']}", PIP_CONSTRAINT="/no/such/file")
    run = []
    for instruction, argument in steps((ROOT / "Dockerfile").read_text()):
        argument = argument.replace("/etc/megatron_dllm_keep.txt", str(keep)).replace("/opt/megatron_dllm", str(work))
        if instruction == "ENV":
            for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', argument):
                environment[name] = value.strip('"').replace("${PATH}", environment["PATH"])
        elif instruction == "RUN":
            command = ["bash", "-o", "pipefail", "-c", argument]
            cwd = work if run else tmp_path
            done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, f"{argument}\n{done.stdout}{done.stderr}"
            run.append(argument)
        else:
            assert instruction in ("ARG", "FROM", "SHELL", "WORKDIR", "COPY"), instruction
    assert len(run) == 3 and re.search(r"^torch==", keep.read_text(), re.M)
    program = "import sys, torch, megatron_dllm, megatron_dllm.training as training\n"
    program += "print(sys.prefix, torch.__file__, training.__file__, sep='\\n')"
    done = subprocess.run(
        ["python", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    prefix, torch, program = done.stdout.splitlines()
    assert prefix == str(work / ".venv") and program == str(work / "megatron_dllm/training.py")
    assert not torch.startswith(str(work))
    subprocess.run(["python", "-m", "pytest", "--version"], env=environment, check=True, capture_output=True)
