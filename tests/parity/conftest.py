import pytest

from tests.one_process import one_process


@pytest.fixture(scope="module")
def parallel_state():
    with one_process():
        yield
