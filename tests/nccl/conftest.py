"""Ranks for the tests of this folder: real ones on Gloo, and on NCCL where there is a GPU, which they share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo_pool import GlooPool
from nccl_pool import NcclPool, sum_of_ones


@pytest.fixture(scope="session")
def nccl_pool(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NcclPool]:  # noqa: ARG001
    """Real NCCL ranks on the first GPU, started when first needed: see ``tests/pool/nccl_pool.py``.

    They are tried once: where ranks cannot share the GPU, all tests say so at once, instead of each waiting for it.
    """
    pool = NcclPool(tmp_path_factory.mktemp("nccl"))
    try:
        assert pool.run(sum_of_ones, ranks=2) == [2.0, 2.0]
        yield pool
    finally:
        pool.close()


class StartedPool(NcclPool):
    """The pool of NCCL ranks, with Gloo in its place: what it does besides can be tried without a GPU."""

    backend = "gloo"


@pytest.fixture(scope="session")
def started_pool(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NcclPool]:  # noqa: ARG001
    pool = StartedPool(tmp_path_factory.mktemp("started"), ranks=2)
    yield pool
    pool.close()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> GlooPool:
    """The pool of the backend that a test names: ``parametrize("pool", [GLOO, NCCL], indirect=True)``."""
    found: GlooPool = request.getfixturevalue(f"{request.param}_pool")
    return found
