import pytest

from .ranks import RankPool


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool()
    yield pool
    pool.close()
