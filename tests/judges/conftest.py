"""The judges: other people's tests and catalogues, run against ours. See docs/judges.md, and ``make judges``.

By default a tenth of the cases runs, another one each day, and of a case with many inputs a few of these;
``--all-judges`` runs them all, and ``--judges-record FILE`` keeps what came out.
"""

from __future__ import annotations

import datetime
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

TURNS = 10
MOST_INPUTS = 8  # of a case in the default run: one of torch's losses has 857
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves to ``make judges`` the cases whose turn it is not."""
    if config.getoption("--all-judges"):
        return
    for item in items:
        if item.get_closest_marker("judge") and zlib.crc32(item.nodeid.encode()) % TURNS != today() % TURNS:
            item.add_marker(pytest.mark.exhaustive)


def today() -> int:
    return datetime.datetime.now(tz=datetime.UTC).toordinal()


@pytest.fixture
def of_turn(pytestconfig: pytest.Config) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes from a case's inputs those whose turn it is; all of them with ``--all-judges``."""
    if pytestconfig.getoption("--all-judges"):
        return lambda inputs: inputs

    def some(inputs: Sequence[Any]) -> Sequence[Any]:
        stride = min(len(inputs), max(TURNS, -(-len(inputs) // MOST_INPUTS)))
        return inputs[today() // TURNS % stride :: stride] if inputs else inputs  # others at the case's next turn

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
            is_refusal = reason.startswith("Skipped: refused: ")
            outcome = "refused" if is_refusal else kind
            outcomes.setdefault(judge, Counter())[outcome] += 1
            if kind != "passed":
                text = reason.removeprefix("Skipped: ").removeprefix("refused: ") or report.nodeid
                reasons.setdefault(judge, Counter())[f"{outcome}: {text.partition(chr(10))[0]}"] += 1
    found = {
        judge: {"outcomes": counts, "reasons": reasons.get(judge, {})} for judge, counts in sorted(outcomes.items())
    }
    Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def judge_of(nodeid: str) -> str:
    """The folder below ``judges`` that a case stands in."""
    parts = Path(nodeid.partition("::")[0]).parts
    return parts[parts.index("judges") + 1]
