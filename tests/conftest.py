import pytest

from tests.parallel.pool import Pool


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()
