import pytest

from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster():
    with Cluster() as cluster:
        yield cluster
