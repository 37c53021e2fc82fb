"""A soak of hosts: a launched run that loses hosts and gets them back at random moments, and what it says of it.

Eight hosts in network namespaces with real sshds train; six are enough. A ninth holds the launch. What is done to them:

    kill    all processes of a host are killed; later its sshd is started again
    power   its link goes down first, so that nobody is told, then all its processes are killed
    cut     its link goes down, and is mended after a while; its processes live
    meet    the power of the host at which the others meet goes: they meet at another one

Clocks of hosts are apart by minutes. Each cause that a launcher tells is compared with what was done. The run must end
by itself, with every sample once (the hash in its checkpoints), and no restart may be charged.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from host_network import HostNetwork, network_of, start_sshd
from launched_runs import checkpoints, make_project, set_pause, starts, steps
from recomputed import recompute

from paceline.checkpoint import open_checkpoint

HOSTS, LEAST, LOGIN = 8, 6, 8
CLOCKS_S = (0, 180, -240, 60, 0, 400, -90, 30, 0)
KINDS = ("kill", "power", "cut", "meet")
PAUSE_S, PATIENCE_S = 0.2, 200.0
GONE = re.compile(r"(h\d) \((its launcher has ended|nothing was heard of it for 5 s)\) is gone")
# Also a host that is in no round.
LOST = re.compile(r"(?m)^(h\d): (?:ssh does not reach it; it is tried again|nothing was heard of it for 8 s)")
CAME = re.compile(r"(h\d) has come")
UNREACHED = re.compile(r"host (h\d) does not reach the launcher where the hosts meet")
MOVED = re.compile(r"host (h\d) is lost: from now on the hosts meet at (h\d)")
ALONE = re.compile(r"(h\d) hears of no other host")
# What nobody did: a rank that failed, a restart that is charged, a run that is given up, a start that failed.
FALSE = re.compile(
    r".*(?:rank \d+ (?:was|left|failed)|\(restart \d|not started again|could not be started|do not reach one another).*"
)


@dataclass(slots=True, kw_only=True)
class Event:
    """What was done to a host, and what was told of it: after how many seconds, in which words."""

    kind: str
    host: str
    at_s: float
    told_s: float | None = None
    words: str = ""
    back_s: float | None = None  # until it had come again
    span: tuple[int, int | None] = (
        0,
        None,
    )  # of the log, in which it may be spoken of: to the next loss after its return


@dataclass(slots=True)
class Soak:
    network: HostNetwork
    folder: Path
    draw: random.Random
    events: list[Event] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    meets: int = 0
    away: dict[int, Event] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def log(self) -> str:
        path = self.folder / "runs" / ".launches" / "tiny" / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def now(self) -> float:
        return time.monotonic() - self.began

    def start(self, num_steps: int) -> None:
        make_project(self.folder, pause_s=PAUSE_S)
        words = [f"train.steps={num_steps}", "train.global_batch=840", "data.samples=8400", "checkpoint.every_steps=20"]
        words += ["recovery.max_restarts=1", "--nodes", f"{LEAST}:{HOSTS}", "--detach"]
        hosts = ",".join(f"h{host}" for host in range(HOSTS))
        done = self.network.launch(self.folder, *words, hosts=hosts, host=LOGIN)
        assert done.returncode == 0, done.stderr

    def wait(self, is_met: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> bool:
        deadline = time.monotonic() + patience_s
        while not is_met():
            assert not self.is_over(), f"the run has ended before {what}:\n{self.log[-4000:]}"
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def is_over(self) -> bool:
        return (self.folder / "runs" / ".launches" / "tiny" / "exit").exists()

    def members(self) -> int:
        """Returns how many hosts train, by the newest start that rank 0 has written."""
        found = starts(self.folder)
        return found[-1].world_size if found else 0

    def lose(self, kind: str) -> Event:
        """Does something to a host that is there, and waits until it is told."""
        there = [host for host in range(HOSTS) if host not in self.away and host != self.meets]
        host = self.meets if kind == "meet" else self.draw.choice(there)
        event = Event(kind=kind, host=f"h{host}", at_s=round(self.now(), 1))
        seen, start = len(self.log), self.now()
        for each in self.events:
            if each.span[1] is None and each not in self.away.values():
                each.span = each.span[0], seen
        event.span = seen, None
        self.events.append(event)
        self.away[host] = event
        if kind != "kill":
            self.network.cut(host)
        if kind != "cut":
            self.kill(host)

        def is_told() -> bool:
            news = self.log[seen:]
            found = MOVED.search(news) if kind == "meet" else None
            unreached = UNREACHED.search(news) if kind == "meet" else None
            told = [*GONE.finditer(news), *LOST.finditer(news)]
            gone = next((each for each in told if each[1] == event.host), None)
            first = unreached or gone
            if first is not None and event.told_s is None:
                event.told_s, event.words = round(self.now() - start, 1), first[0]
            if found is not None and found[1] == event.host:
                self.meets = int(found[2][1:])
                return True
            return kind != "meet" and event.told_s is not None

        self.wait(is_told, f"{event} is told", 60.0 if kind == "meet" else 40.0)
        return event

    def kill(self, host: int) -> None:
        """Kills all processes of a host; stopped first, none sees another end."""
        shown = subprocess.run(
            ["ip", "netns", "pids", self.network.network.host(host)], capture_output=True, text=True, check=False
        )
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in map(int, shown.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def give_back(self) -> None:
        """Mends what was done to the hosts that are away, in any order, and waits until all take part again."""
        start, before, returned = self.now(), len(starts(self.folder)), list(self.away.values())
        for host in self.draw.sample(sorted(self.away), len(self.away)):
            event = self.away.pop(host)
            if event.kind != "kill":
                self.network.mend(host)
            if event.kind != "cut":
                process = start_sshd(self.network, host)
                self.stack.callback(process.wait)
                self.stack.callback(process.kill)
        if self.wait(lambda: len(starts(self.folder)) > before and self.members() == HOSTS, "all are back"):
            for event in returned:
                event.back_s = round(self.now() - start, 1)

    def finish(self) -> None:
        """Lets the steps that are left take no time, and waits for the end of the run."""
        set_pause(self.folder, 0)
        deadline = time.monotonic() + 2 * PATIENCE_S
        while not self.is_over():
            assert time.monotonic() < deadline, f"the run does not end:\n{self.log[-4000:]}"
            time.sleep(0.2)

    def false_words(self) -> list[str]:
        """Returns what was told and not done, of that host and at that time."""
        log = self.log
        wrong = [found[0] for found in FALSE.finditer(log)]
        allowed = {  # what must have been done: to the host that is named, or to the one where the others meet
            GONE: (KINDS, ()),
            LOST: (KINDS, ()),
            CAME: (KINDS, ("meet",)),
            UNREACHED: (("cut",), ("meet",)),
            MOVED: (("meet",), ()),
            ALONE: (("meet",), ()),
        }
        for words, (own, others) in allowed.items():
            for found in words.finditer(log):
                near = [
                    each
                    for each in self.events
                    if each.span[0] <= found.start() and (each.span[1] is None or found.start() < each.span[1])
                ]
                if not any((each.host == found[1] and each.kind in own) or each.kind in others for each in near):
                    wrong.append(f"{found[0]} ({', '.join(f'{each.kind} {each.host}' for each in near) or 'nothing'})")
        return sorted(set(wrong))


@contextlib.contextmanager
def soaking(folder: Path, seed: int) -> Iterator[Soak]:
    """Makes the hosts of a soak. Raises NoNetworkError where that cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    with network_of(HOSTS + 1, folder / "ssh", clocks_s=CLOCKS_S) as network, contextlib.ExitStack() as stack:
        yield Soak(network, folder / "project", random.Random(f"hosts {seed}"), stack=stack)


def run_soak(soak: Soak, num_losses: int, num_steps: int) -> dict[str, Any]:
    """Loses and gives back hosts so many times, and returns what came of it: rows of events, and a summary."""
    soak.start(num_steps)
    assert soak.wait(lambda: soak.members() == HOSTS and checkpoints(soak.folder), "all hosts train"), soak.log
    kinds = [KINDS[number % len(KINDS)] for number in range(num_losses)]
    soak.draw.shuffle(kinds)
    for number, kind in enumerate(kinds):
        # Steps last longer where they would be over before the losses.
        is_early = steps(soak.folder)[-1] > num_steps * (number + 1) / (len(kinds) + 2)
        set_pause(soak.folder, 2 if is_early else PAUSE_S)
        time.sleep(soak.draw.random() * 6)
        soak.lose(kind)
        is_last = number == len(kinds) - 1
        if len(soak.away) == HOSTS - LEAST or is_last or soak.draw.random() < 0.2:
            time.sleep(soak.draw.random() * 6)
            soak.give_back()
    soak.finish()
    code = (soak.folder / "runs" / ".launches" / "tiny" / "exit").read_text().strip()
    consumed: dict[str, Any] = open_checkpoint(checkpoints(soak.folder)[-1]).values["consumed"]
    late = [each.told_s for each in soak.events if each.told_s is not None]
    summary = {
        "exit_code": code,
        "losses": len(soak.events),
        "told": len(late),
        "slowest_told_s": max(late, default=0.0),
        "returned": sum(each.back_s is not None for each in soak.events),
        "rounds": len(starts(soak.folder)),
        "steps": steps(soak.folder)[-1],
        "every_sample_once": recompute(consumed) == {"hash": consumed["hash"], "count": consumed["count"]},
        "samples": consumed["count"],
        "false_words": soak.false_words(),
        "seconds": round(soak.now(), 1),
    }
    rows = [{name: value for name, value in asdict(each).items() if name != "span"} for each in soak.events]
    return {"events": rows, "summary": summary}


def is_right(summary: Mapping[str, Any]) -> bool:
    """Says whether a soak went as it should: it ended by itself, and all was told, nothing false, no sample twice."""
    is_told = summary["told"] == summary["returned"] == summary["losses"]
    return summary["exit_code"] == "0" and summary["every_sample_once"] and not summary["false_words"] and is_told
