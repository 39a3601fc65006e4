"""A preempted run saves: SLURM sends its signal to every process of the job, torchrun and loader workers too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.parallel.cases import TINY, write_text

ROOT = Path(__file__).parents[2]


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid for child in children for pid in (int(child), *descendants(int(child)))]


def test_sigterm_to_all_processes_saves_and_exits_with_zero(tmp_path):
    text = write_text(tmp_path)
    log, save = tmp_path / "log", tmp_path / "run"
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 --signals-to-handle SIGINT pretrain_dllm.py"
    flags = f"--data-path {text} --split 70,30,0 --num-workers 2 --exit-signal-handler --train-iters 100000"
    flags += f" --save {save} --save-interval 100000 --tensor-model-parallel-size 2"
    with open(log, "w") as output:
        run = subprocess.Popen(
            [sys.executable, *launcher.split(), *TINY, *flags.split()],
            cwd=ROOT,
            env=os.environ | dict(OMP_NUM_THREADS="1"),
            stdout=output,
            stderr=output,
            # as examples/slurm/pretrain.sbatch starts torchrun
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        )
    try:
        deadline = time.monotonic() + 120
        while " 3/" not in log.read_text() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        processes = [run.pid, *descendants(run.pid)]
        assert len(processes) >= 1 + 2 + 4  # torchrun, two ranks, two loader workers each
        for pid in processes:
            os.kill(pid, signal.SIGTERM)
        assert run.wait(120) == 0, log.read_text()[-3000:]
    finally:
        run.kill()
    assert int((save / "latest_checkpointed_iteration.txt").read_text()) >= 3
