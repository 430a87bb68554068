import pytest

from .ranks import RankPool


@pytest.fixture(scope="package")
def ranks():
    pool = RankPool()
    yield pool
    pool.close()
