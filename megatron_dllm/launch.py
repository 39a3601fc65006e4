"""Start without torchrun: a plain `python script.py` is a job of one process, and says only what it is asked."""

import contextlib
import io
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator


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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron reports every step of its start on stdout, which belongs to the answer."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def with_hyphens(word: str) -> str:
    """`--max_new_tokens=8` is `--max-new-tokens=8`; a prompt such as "--a_b c" is no flag."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if re.fullmatch(r"--[\w-]+", name) else word
