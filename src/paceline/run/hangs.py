"""What launchers of several hosts make of a verdict: torch's agents start ranks again, and these know whether to go on.

    health/hang-<n>.json     one for each attempt that ended with a verdict: what happened, and how far it had come
    logs/hung                the ranks were started once more, and left at once: the run is over

A rank that finds a verdict leaves a note before it ends the others; every host's leader writes the same one. The agents
know nothing of it and start the ranks again; these ask ``train/survive/recovery.py`` as a single launcher does, and
where the answer is to stop, they leave with success, which no agent takes for another failure. The launchers then tell
the verdict. All read the same notes, and so decide alike without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.comm.ledger.file import LedgerReader, ledger_path
from paceline.health.verdict import Verdict
from paceline.run.failure import read_failures
from paceline.run.looking import looking
from paceline.run.supervise import attempt_of, sentence_of
from paceline.run.watch import failure_of, note_mismatch
from paceline.train.survive.recovery import Attempt, Incident, RestartPolicy, Stop, after_failure

_LOOK_S = 0.2


def note_hang(folder: Path, verdict: Verdict) -> None:
    """Leaves word of an attempt that ends with a verdict; of a rank that died, its launcher knows itself.

    The name is that of the attempt, by rank 0's ledger, so that those who write it at the same time write one.
    """
    if verdict.kind == "dead":
        return
    ledger = LedgerReader.open(ledger_path(folder, 0))
    attempt = attempt_of(failure_of(verdict, min(verdict.ranks, default=0), folder), folder)
    path = folder / "health" / f"hang-{0 if ledger is None else ledger.born_ns:020d}.json"
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # the verdict matters more than whether there is another attempt
        partial.write_text(json.dumps(asdict(attempt)) + "\n", encoding="utf-8")
        partial.replace(path)


def note_own_mismatch(folder: Path, world: int) -> bool:
    """Says whether ranks that have failed by themselves had called different operations, and leaves word if so."""
    verdict = note_mismatch(folder, range(world))
    if verdict is not None:
        note_hang(folder, verdict)
    return verdict is not None or any(failure.kind == "hang" for failure in read_failures(folder))


def hung_attempts(folder: Path) -> list[Attempt]:
    """Returns the attempts of this run that ended with a verdict, the last one last."""
    found = []
    for path in sorted((folder / "health").glob("hang-*.json")):
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found.append(Attempt(first_step=values["first_step"], incident=Incident(**values["incident"])))
    return found


def is_over(folder: Path, policy: RestartPolicy) -> bool:
    """Says whether a run that hung is not to go on."""
    attempts = hung_attempts(folder)
    return bool(attempts) and isinstance(after_failure(policy, attempts), Stop)


def note_over(folder: Path) -> None:
    """Leaves word for the launchers that the ranks left because the run hung."""
    (folder / "logs" / "hung").touch()


def was_hung(folder: Path) -> bool:
    """Says whether ranks left such word."""
    return (folder / "logs" / "hung").exists()


def forget_hangs(folder: Path) -> None:
    """Removes what an earlier start of the run left."""
    for path in [*(folder / "health").glob("hang-*"), folder / "logs" / "hung"]:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def telling_restarts(folder: Path, policy: RestartPolicy, say: Callable[[str], None]) -> Iterator[None]:
    """Tells each verdict after which ranks are started again; the last one is the launcher's error."""
    known = len(hung_attempts(folder))

    def tell() -> None:
        nonlocal known
        attempts = hung_attempts(folder)
        for number in range(known + 1, len(attempts) + 1):
            if not isinstance(after_failure(policy, attempts[:number]), Stop):
                what = sentence_of(attempts[number - 1].incident)
                say(f"{what}; restarting from the newest checkpoint (restart {number} of {policy.max_restarts})")
        known = len(attempts)

    def look(_: threading.Event) -> bool:
        tell()
        return False

    try:
        with looking(look, every_s=_LOOK_S, name="verdicts"):
            yield
    finally:
        tell()
