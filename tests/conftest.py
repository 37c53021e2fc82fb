"""What all tests share: the pool of real ranks, hypothesis without time limits, and little garbage to look through."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

# Worker processes get these paths, so that both sides import the pool's module under one name. Scripts of the top-level
# bench/ import the packages beside them, and so do tests.
sys.path[:0] = [str(Path(__file__).parent / "pool"), str(Path(__file__).parents[1] / "bench")]

if TYPE_CHECKING:
    from gloo_pool import GlooPool

# A deadline would be an assertion about time. The same examples every time: a change is judged by what it changed;
# `pytest --hypothesis-profile=explore` looks for new ones, `make test-all` takes ten times as many.
_TIMED = [HealthCheck.too_slow]  # likewise: a machine that is busy for a while is no fault of a test
settings.register_profile("paceline", deadline=None, suppress_health_check=_TIMED, max_examples=10, derandomize=True)
settings.register_profile("all", deadline=None, suppress_health_check=_TIMED, max_examples=100, derandomize=True)
settings.register_profile("explore", deadline=None, suppress_health_check=_TIMED, max_examples=500)
settings.load_profile("paceline")

# torch asks for the name of every client of a store, and a name server that loses a packet costs 5 s: here 1 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:4")

# Three workers on two cores (a test that waits leaves its core to another), with virtual ranks that are threads: more
# threads for an operation only take turns.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has them ignore Ctrl-C, and with them all processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The judges of tests/judges: all cases, a file for what came out, and where those for a GPU compute."""
    parser.addoption("--all-judges", action="store_true", help="run all cases of the judges, not only today's part")
    parser.addoption("--judges-day", type=int, metavar="N", help="run the part of the judges of day N, not today's")
    parser.addoption("--judges-record", metavar="FILE", help="write what each judge found to this file")
    parser.addoption("--judges-device", default="cuda", choices=["cuda", "cpu"], help="cpu: rehearse those for a GPU")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Has the workers of pytest-xdist forked too, from the server that they then share."""
    if sys.platform == "linux" and getattr(session.config.option, "tx", None):
        import fork_server

        fork_server.install()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Has a worker of pytest-xdist tell what is of interest: two of three reports say that nothing happened.

    They are those of a setup or teardown that passed, which are asked for only where times are.
    """
    options = config.option
    worker = next((each for each in config.pluginmanager.get_plugins() if hasattr(each, "sendevent")), None)
    if worker is None or options.durations is not None or options.xmlpath:
        return
    send = worker.sendevent

    def send_of_interest(name: str, **told: Any) -> None:
        report = told.get("data", {})
        if name != "testreport" or report["when"] == "call" or report["outcome"] != "passed":
            send(name, **told)

    worker.sendevent = send_of_interest


def pytest_unconfigure() -> None:
    """Ends the server after the workers."""
    if "fork_server" in sys.modules:
        sys.modules["fork_server"].end()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Spares the collector what is loaded now, which stays; afterwards it looks for garbage less often than usual."""
    gc.disable()
    try:
        compile_share(session.config)
        return (yield)  # type: ignore[return-value]
    finally:
        gc.set_threshold(20_000, 10, 20)
        gc.enable()


def compile_share(config: pytest.Config) -> None:
    """Has a worker of pytest-xdist compile its share of the files that nobody has compiled yet, before it loads any.

    In a fresh clone each worker would compile all of them, at the same time, which is a tenth of a whole run.
    """
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if not worker or sys.dont_write_bytecode or config.args != config.getini("testpaths"):
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[number::count]:
        compiled = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if not compiled.exists() and rewrite.try_makedirs(compiled.parent):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, compilers and drivers warn in ways that differ by version: such warnings fail no test."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leaves to the exhaustive run all but ``some(n)`` cases of a test, spread evenly over them.

    A run without exhaustive tests drops their cases here, and those for a GPU where there is none: they are thousands,
    and to build a test only to leave it out takes a millisecond. One stays, as a test without cases would be another.
    """
    yield
    cases = metafunc._calls
    is_whole = any(mark.name == "exhaustive" for mark in metafunc.definition.iter_markers())
    others = [case for case in cases if not is_whole and not is_exhaustive(case)]
    if marker := metafunc.definition.get_closest_marker("some"):
        count = min(marker.args[0], len(others))
        taken = {place * (len(others) - 1) // max(count - 1, 1) for place in range(count)}
        for case in (case for place, case in enumerate(others) if place not in taken):
            case.marks.append(pytest.mark.exhaustive.mark)
    config = metafunc.config
    if metafunc.definition.get_closest_marker("gpu") and not has_gpu(config):
        others = others[:1]
    if "not exhaustive" in config.getoption("markexpr") and not any("[" in each for each in config.args):
        metafunc._calls = [case for case in others if not is_exhaustive(case)] or cases[:1]


def has_gpu(config: pytest.Config) -> bool:
    """Says whether tests for a GPU can run, or are rehearsed: else all cases of one are skipped for the same reason."""
    import torch

    return torch.cuda.is_available() or config.getoption("--judges-device") == "cpu"


def is_exhaustive(case: Any) -> bool:
    """Says whether a case of a test is left to the exhaustive run."""
    return any(mark.name == "exhaustive" for mark in case.marks)


FROZEN_MODULES = pytest.StashKey[int]()
TESTS_SINCE = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Spares the collector what was there before the test, which is a million objects: a look at all takes a second.

    Done again when a test has loaded another large library, and after some tests, whose reports stay.
    """
    stash = item.config.stash
    stash[TESTS_SINCE] = stash.get(TESTS_SINCE, 0) + 1
    if len(sys.modules) > stash.get(FROZEN_MODULES, 0) + 100 or stash[TESTS_SINCE] > 150:
        gc.collect()
        gc.freeze()
        stash[FROZEN_MODULES], stash[TESTS_SINCE] = len(sys.modules), 0


class _Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the test logs, by any logger.

    pytest's own ``caplog`` is switched off: for every test it visits all loggers that keep their records to themselves,
    and torch has dozens.
    """
    kept = _Kept()
    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    chosen = [logging.root, *(each for each in known if not each.propagate)]
    for logger in chosen:
        logger.addHandler(kept)
    yield kept.records
    for logger in chosen:
        logger.removeHandler(kept)


@pytest.fixture
def plain_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares torch's agent the names of its own callers in events that nobody reads.

    It looks them up in whole stacks, dozens of times a launch, which under pytest and among thousands of modules takes
    seconds.
    """
    place = "torch.distributed.elastic.rendezvous.dynamic_rendezvous.get_method_name"
    monkeypatch.setattr(place, lambda *_, **__: "", raising=False)


@pytest.fixture(scope="session", autouse=True)
def plain_seeds() -> Iterator[None]:
    """Spares ``torch.manual_seed`` what it notes for devices that are not there.

    It keeps the seed for when they are first used, three times, each time with the text of the whole stack, which under
    pytest takes milliseconds.
    """
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cuda", "xpu", "mtia"):
            if not getattr(torch, kind).is_available():
                patch.setattr(f"torch.{kind}.manual_seed_all", lambda _: None, raising=False)  # not every torch has it
        yield


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Has processes of Paceline forked from one that has torch loaded: see ``tests/pool/fork_server.py``."""
    if sys.platform != "linux":
        yield
        return
    import fork_server

    fork_server.install()
    yield
    fork_server.end()


@pytest.fixture
def real_starts() -> Iterator[None]:
    """Starts every process from nothing, for tests of what loading does."""
    import fork_server

    fork_server.uninstall()
    yield
    fork_server.install()


@pytest.fixture(scope="session")
def gloo_pool(forks: None) -> Iterator[GlooPool]:  # noqa: ARG001
    """Real Gloo ranks, started when first needed: see ``tests/pool/gloo_pool.py`` for how a test uses them."""
    from gloo_pool import GlooPool

    pool = GlooPool()
    yield pool
    pool.close()
