"""How soon a step is on the live page, and what it costs a run to be followed: python bench/live.py [--rounds 12].

One real run trains all the time. Meanwhile three arms take turns, in rotating order, for some seconds each:

    nobody      the server of ``paceline watch`` stands still
    page        the server answers what a page asks that somebody has open on another machine; nothing is drawn here
    browser     the page is open in Chromium on this machine, and draws

A step counts for the arm in whose turn it was made; the first second of a turn counts for none. The ratio of an arm is
that of its median step to the median step of ``nobody`` in the same round. A step is on the page when its number is the
last of the loss chart, by the clock of this machine; ``delay_s`` is the time since the rank had finished it.

The run is one rank with one thread, so that the server and the browser have a core of their own where there are two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pool"))

from browser import Browser, Page

from paceline.records.records import StepRecord, read_records
from paceline_bench.timing import BenchRecord

CONFIG = Path(__file__).parents[1] / "configs" / "gpt_pydoc.yaml"
ARMS = ("nobody", "page", "browser")
_SETTLES_S = 1.0
_PATIENCE_S = 300.0
_NOTE_STEPS = """
window.seen = [];
setInterval(() => {
  const steps = page.charts.get("loss")?.plot?.data[0], last = steps && steps[steps.length - 1];
  if (last && last !== window.seen.at(-1)?.[0]) window.seen.push([last, Date.now() / 1000]);
}, 10);
"""

Turn = tuple[str, float, float]  # arm, and when its steps began and ceased to count


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Path]:
    """Trains until the block ends; returns the file of the rank's records once it has steps."""
    words = ["parallel.ranks=1", "train.global_batch=1", "train.steps=10000000", "train.eval_every=null", "name=run"]
    words += [f"monitor.folder={folder}", "monitor.tensorboard=false"]
    command = [sys.executable, "-m", "paceline", "train", str(CONFIG), *words, "--quiet"]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            path, until = folder / "run" / "records" / "rank-0.jsonl", time.monotonic() + _PATIENCE_S
            while not (path.exists() and len(steps_of(path)) > 20):
                assert process.poll() is None, "the run has ended"
                assert time.monotonic() < until, "the run makes no steps"
                time.sleep(0.2)
            yield path
        finally:
            process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """Serves the page as ``paceline watch`` does; returns its address and the server's process."""
    command = [sys.executable, "-m", "paceline", "watch", str(folder), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://" in line, f"the server says {line!r}"
            yield "http" + line.partition("http")[2].strip(), process.pid
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


def steps_of(path: Path) -> list[StepRecord]:
    return [record for record in read_records(path) if isinstance(record, StepRecord)]


def answer_for(url: str, seconds: float) -> None:
    """Asks what the page asks: the stream of events, and with each of them curves, map and timeline of the run."""
    over = time.monotonic() + seconds
    get = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    with get(f"{url}api/events", timeout=20) as stream:
        for line in stream:
            if time.monotonic() > over:
                return
            if line.startswith(b"data: "):
                run = json.loads(line[6:])[0]["id"]
                for path in (f"runs?ids={run}&points=850", f"heat?id={run}&name=step_s&points=600"):
                    get(f"{url}api/{path}", timeout=20).read()
                time.sleep(0.25)


def take_turn(arm: str, url: str, server: int, browser: Browser, seconds: float) -> tuple[Turn, list[list[float]]]:
    """Lets an arm have its turn; returns when it was, and which steps the browser saw when."""
    os.kill(server, signal.SIGSTOP if arm == "nobody" else signal.SIGCONT)
    start, seen = time.time(), []
    if arm == "browser":
        with browser.page(url) as page:
            seen = _watch(page, start + seconds)
    else:
        follower = threading.Thread(target=answer_for, args=(url, seconds)) if arm == "page" else None
        if follower is not None:
            follower.start()
        time.sleep(seconds)
        if follower is not None:
            follower.join()
    return (arm, start + _SETTLES_S, start + seconds), seen


def _watch(page: Page, until: float) -> list[list[float]]:
    page.wait("document.body.dataset.drawn")
    page.ask(_NOTE_STEPS)
    page.wait("window.seen.length")
    time.sleep(max(0.0, until - time.time()))
    seen: list[list[float]] = page.ask("window.seen")
    assert page.errors == [], page.errors
    return seen


def delays(steps: list[StepRecord], seen: list[list[list[float]]]) -> list[float]:
    """Returns how long after its end each step was on the page; the first seen was there before anybody looked."""
    found = []
    for turn in filter(None, seen):
        place = 1
        for step in steps:
            if step.step > turn[0][0]:
                while place < len(turn) and turn[place][0] < step.step:
                    place += 1
                if place == len(turn):
                    break
                found.append(turn[place][1] - step.time)
    return found


def ratios(steps: list[StepRecord], turns: list[Turn]) -> dict[str, list[tuple[float, float]]]:
    """Returns the median step of each arm in each round, and its ratio to that of ``nobody``."""
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for place in range(0, len(turns), len(ARMS)):
        medians = {}
        for arm, start, end in turns[place : place + len(ARMS)]:
            own = [step.step_s for step in steps if start <= step.time - step.step_s and step.time <= end]
            assert own, f"no step was made in a turn of {arm}: take longer ones (--seconds)"
            medians[arm] = median(own)
        for arm in ARMS:
            found[arm].append((medians[arm], medians[arm] / medians["nobody"]))
    return found


def measure(rounds: int, seconds: float) -> list[dict[str, object]]:
    turns, seen = [], []
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        folder = Path(name)
        with training(folder) as path, serving(folder) as (url, server):
            for number in range(rounds):
                for place in range(len(ARMS)):
                    arm = ARMS[(number + place) % len(ARMS)]
                    turn, shown = take_turn(arm, url, server, browser, seconds)
                    turns.append(turn)
                    seen.append(shown)
            time.sleep(1.5)  # the last steps reach the file
            steps = steps_of(path)
        found, waited = ratios(steps, turns), sorted(delays(steps, seen))
    rows: list[dict[str, object]] = []
    for arm in ARMS:
        low, _, high = quantiles([ratio for _, ratio in found[arm]], n=4)
        middle = median(ratio for _, ratio in found[arm])
        step_ms = 1e3 * median(length for length, _ in found[arm])
        rows.append({"arm": arm, "step_ms": round(step_ms, 3), "ratio": round(middle, 4)})
        rows[-1] |= {"ratio_low": round(low, 4), "ratio_high": round(high, 4)}
    times = {"median": median(waited), "p99": waited[int(0.99 * (len(waited) - 1))], "most": waited[-1]}
    rows.append({"delay_s": {key: round(value, 3) for key, value in times.items()}, "steps": len(waited)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run, the server and the browser too
    rows = measure(asked.rounds, asked.seconds)
    settings = {"config": f"configs/{CONFIG.name}", "ranks": 1, "global_batch": 1}
    config = {"rounds": asked.rounds, "seconds": asked.seconds, **settings}
    record = BenchRecord(name="live", command="python bench/live.py", rows=rows, config=config)
    if asked.output is not None:
        record.write(asked.output)
    print(record.to_json())


if __name__ == "__main__":
    main()
