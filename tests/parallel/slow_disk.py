"""pretrain_dllm.py where a checkpoint takes a second to write, so that a test can meet it half written:
python -m tests.parallel.slow_disk [flags]. Writers of checkpoints import this again."""

import functools
import time

from pretrain_dllm import main  # first: it holds the signal

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # isort: skip


def slowly(write):
    @functools.wraps(write)
    def slowed(*args, **kwargs):
        time.sleep(1)
        return write(*args, **kwargs)

    return slowed


FileSystemWriterAsync.write_preloaded_data = staticmethod(slowly(FileSystemWriterAsync.write_preloaded_data))

if __name__ == "__main__":
    main()
