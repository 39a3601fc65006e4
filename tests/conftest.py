import pytest

import megatron_dllm  # noqa: F401  (the CPU backend, before anything imports megatron)
from tests.parallel.pool import Pool


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()
