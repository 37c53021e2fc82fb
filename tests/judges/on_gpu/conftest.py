"""The judges on a GPU: ranks that share it, virtual ones and those of NCCL; without a GPU each case is skipped.

    python -m pytest -m "gpu and judge" --all-judges tests/judges -n 8 --dist loadgroup --judges-record FILE

``--judges-device cpu`` rehearses them: on a CPU, with Gloo in the place of NCCL. ``--dist loadgroup`` gives the cases
of NCCL ranks to a few workers, with a pair of ranks each: more pairs only take turns on the one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from judging import on_pool, outcome_of
from nccl_pool import NcclPool

from paceline.comm.virtual.communicator import run_virtual

PAIRS = 3
LOADS_S = 150.0  # that a rank may take to load a library
TwoRanks = Callable[..., list[Any]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups the cases of NCCL ranks by the pair that they run on."""
    here = [item for item in items if "/on_gpu/" in item.nodeid]
    paired = [item for item in here if "nccl" in getattr(getattr(item, "callspec", None), "params", {}).values()]
    for number, item in enumerate(paired):
        item.add_marker(pytest.mark.xdist_group(f"pair-{number % PAIRS}"))


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Where there is no GPU, one case of a test stands for all: each would be skipped."""
    yield
    if lacks_gpu(metafunc.config):
        metafunc._calls = metafunc._calls[:1]


def lacks_gpu(config: pytest.Config) -> bool:
    return config.getoption("--judges-device") == "cuda" and not torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a case where there is no GPU, before anything is started for it."""
    if lacks_gpu(item.config):
        pytest.skip("needs a CUDA device")  # in these words: the record leaves it out


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where the cases compute: ``cuda``, or in a rehearsal ``cpu``."""
    return str(pytestconfig.getoption("--judges-device"))


@pytest.fixture(scope="session")
def pair(device: str, forks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:  # noqa: ARG001
    """Two real ranks that live for the whole session."""
    pool = NcclPool(tmp_path_factory.mktemp("nccl"), ranks=2) if device == "cuda" else GlooPool()
    yield pool
    pool.close()


@pytest.fixture
def two_ranks(request: pytest.FixtureRequest, device: str) -> TwoRanks:
    """Runs ``work(comm, *args)`` on two ranks of the kind that a case names; a refusal ends the test."""
    if request.param == "nccl":
        pool: GlooPool = request.getfixturevalue("pair")
        return lambda work, *args: outcome_of(lambda: on_pool(pool, work, *args))
    told = {"device": device, "timeout_s": LOADS_S}
    return lambda work, *args: outcome_of(lambda: run_virtual(lambda comm: work(comm, *args), 2, **told))
