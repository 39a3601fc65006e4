"""--save-hf-interval: checkpoints become Hugging Face folders while training goes on.

An export wants a model of one process, which a training process cannot also be. So rank 0 starts a process of its own
for each, on the CPU, and the run ends only when the last one has; a failed one fails the run.
"""

import os
import shutil
import subprocess
import sys
import tempfile

# What a launcher tells its processes, and would make an export wait for the others.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


class Exporter:
    """The exports of one run (rank 0 of it)."""

    def __init__(self):
        self._running: tuple[str, subprocess.Popen, object] | None = None
        self._iteration: int | None = None

    @property
    def reads(self) -> int | None:
        """The iteration whose checkpoint is being read, if any."""
        return self._iteration if self._running is not None and self._running[1].poll() is None else None

    def start(self, run: str, iteration: int) -> None:
        """Export run/iter_<iteration> to run/hf_<iteration>, after the one that may still be running."""
        self.wait()
        folder = os.path.join(run, f"hf_{iteration:07d}")
        shutil.rmtree(folder, ignore_errors=True)  # of this run, before it was resumed from an earlier iteration
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHED)}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`wait` closes it)
        command = [sys.executable, "-m", "megatron_dllm.conversion.background", run, str(iteration), folder]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
        self._running, self._iteration = (folder, process, log), iteration

    def wait(self) -> None:
        """Until nothing is running. Raises RuntimeError if an export has failed."""
        if self._running is None:
            return
        (folder, process, log), self._running = self._running, None
        with log:
            if process.wait():
                log.seek(0)
                reason = (log.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                raise RuntimeError(f"{folder} could not be written: {reason}")
        print(f"wrote {folder}", flush=True)


def main(run: str, iteration: str, folder: str) -> None:
    from megatron_dllm.conversion import exporting

    os.nice(10)
    exporting.run(exporting.plan(run, int(iteration)), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
