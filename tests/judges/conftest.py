"""The judges: other people's tests and catalogues, run against ours. See docs/judges.md, and ``make judges``.

By default a tenth of the cases runs, another one each day, and of a case with many inputs a few of these:
``--judges-day N`` runs those of another day, so that ten runs see all cases. ``--all-judges`` runs them all, and
``--judges-record FILE`` keeps what came out.
"""

from __future__ import annotations

import datetime
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

TURNS = 10
MOST_INPUTS = 8  # of a case in the default run: one of torch's losses has 857
NO_GPU = "needs a CUDA device"
HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leaves to ``make judges`` the cases whose turn it is not."""
    yield
    definition, is_all = metafunc.definition, metafunc.config.getoption("--all-judges")
    turn = day_of(metafunc.config) % TURNS
    for case in metafunc._calls if definition.get_closest_marker("judge") and not is_all else ():
        if zlib.crc32(f"{definition.nodeid}[{case.id}]".encode()) % TURNS != turn:
            case.marks.append(pytest.mark.exhaustive.mark)


def day_of(config: pytest.Config) -> int:
    asked = config.getoption("--judges-day")
    return datetime.datetime.now(tz=datetime.UTC).toordinal() if asked is None else int(asked)


@pytest.fixture
def of_turn(pytestconfig: pytest.Config) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes from a case's inputs those whose turn it is; all of them with ``--all-judges``."""
    if pytestconfig.getoption("--all-judges"):
        return lambda inputs: inputs

    def some(inputs: Sequence[Any]) -> Sequence[Any]:
        stride = min(len(inputs), max(TURNS, -(-len(inputs) // MOST_INPUTS)))
        first = day_of(pytestconfig) // TURNS  # others at the case's next turn
        return inputs[first % stride :: stride] if inputs else inputs

    return some


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Writes the record: for each judge how many cases passed, failed, were refused or skipped, and why."""
    path = config.getoption("--judges-record")
    if not path:
        return
    outcomes: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    for kind in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(kind, []):
            judge = judge_of(report.nodeid)
            reason = report.longrepr[2] if kind == "skipped" and isinstance(report.longrepr, tuple) else ""
            if judge.startswith("on_gpu") and reason == f"Skipped: {NO_GPU}":
                continue  # it says nothing about us
            is_refusal = reason.startswith("Skipped: refused: ")
            outcome = "refused" if is_refusal else kind
            outcomes.setdefault(judge, Counter())[outcome] += 1
            if kind != "passed":
                text = reason.removeprefix("Skipped: ").removeprefix("refused: ") or report.nodeid
                reasons.setdefault(judge, Counter())[f"{outcome}: {text.partition(chr(10))[0]}"] += 1
    found: dict[str, Any] = {
        judge: {"outcomes": counts, "reasons": reasons.get(judge, {})} for judge, counts in sorted(outcomes.items())
    }
    if any(judge.startswith("on_gpu") for judge in found):
        found = {"machine": machine(config), **found}
    Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def machine(config: pytest.Config) -> dict[str, str]:
    """What the judges for a GPU ran on."""
    import torch

    is_gpu = config.getoption("--judges-device") == "cuda"
    return {"device": torch.cuda.get_device_name() if is_gpu else "cpu", "torch": torch.__version__}


def judge_of(nodeid: str) -> str:
    """The folder below ``judges`` that a case stands in; those for a GPU are several, each a file of one folder."""
    path = Path(nodeid.partition("::")[0])
    judge = path.parts[path.parts.index("judges") + 1]
    return f"{judge}/{path.stem.removeprefix('test_')}" if judge == "on_gpu" else judge
