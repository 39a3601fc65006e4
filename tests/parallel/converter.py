"""tools/convert_checkpoint.py, many times in one process: its start takes longer than its work.

`Converter.run` sends a command line and returns what the tool printed; the module itself is the process.
"""

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/convert_checkpoint.py"


class Converter:
    def __init__(self):
        self.process = None

    def run(self, *argv, code: int = 0) -> str:
        """What `convert_checkpoint.py *argv` prints. AssertionError with all of it unless it ends with that code."""
        if self.process is None:
            command = [sys.executable, "-m", "tests.parallel.converter"]
            environment = os.environ | dict(OMP_NUM_THREADS="1")
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        self.process.stdin.write(json.dumps([str(word) for word in argv]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the converter died"
        answer = json.loads(line)
        assert answer["code"] == code, answer["output"]
        return answer["output"]

    def stop(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


def main() -> None:
    spec = importlib.util.spec_from_file_location("convert_checkpoint", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    from tests.parallel.worker import clean_up

    # Answers have a pipe of their own: a library may keep the standard output it met (logging does under CI=1).
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        sys.argv = [str(TOOL), *json.loads(line)]
        output, code = io.StringIO(), 0
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                tool.main()
        except SystemExit as end:
            code = end.code
        except Exception:
            code = 1
            output.write(traceback.format_exc())
        with contextlib.redirect_stdout(io.StringIO()):
            clean_up()
        os.environ.pop("MASTER_PORT", None)  # the next one gets a port of its own
        print(json.dumps(dict(code=code, output=output.getvalue())), file=answers, flush=True)


if __name__ == "__main__":
    main()
