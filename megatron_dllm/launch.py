"""Start without torchrun: a plain `python script.py` is a job of one process."""

import os
import socket


def default_to_one_process() -> None:
    """Fill in what torchrun would have set, with a free port; what is set already stays."""
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(s.getsockname()[1])
    for name, value in dict(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1"
    ).items():
        os.environ.setdefault(name, value)
