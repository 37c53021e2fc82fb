"""How fast the page of a large run opens and pans, in Chromium: python bench/page.py [--ranks 64] [--steps 10000].

Writes records of a run that was never made, serves them with ``paceline watch``'s server, and measures in the browser:

    first     from opening the page to the first charts, while the server reads the records for the first time
    whole     from the first opening to all records drawn
    again     from opening the page to charts, map and timeline of all ranks, when the server has read everything
    pan       a move along all charts, as the page draws it; median of 20
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pool"))

from browser import Browser
from made_records import RUN
from view_runs import write_run

from paceline.records.records import RunRecord, parse_line, to_line
from paceline.view.server import Follower, listen, make_app, make_server
from paceline_bench.timing import BenchRecord

_DRAWN = "document.body.dataset.drawn && page.heat.found && page.timeline.found"
_WHOLE = f"{_DRAWN} && page.run().read === 1 && page.heat.found.ranks.length === page.run().facts.world_size"
_PAN = "(() => { const start = performance.now(); page._move(0.05); return performance.now() - start; })()"


def make_run(folder: Path, ranks: int, steps: int) -> None:
    """Writes the steps of one rank, and the same for every other."""
    write_run(folder, ranks=1, steps=steps)
    path = folder / "records" / "rank-0.jsonl"
    first, rest = path.read_bytes().split(b"\n", 1)
    run = parse_line(first)
    assert isinstance(run, RunRecord)
    for rank in range(ranks):
        own = replace(run, rank=rank, world_size=ranks, time=RUN.time)
        (folder / "records" / f"rank-{rank}.jsonl").write_bytes(to_line(own).encode() + rest)


def measure(folder: Path) -> dict[str, float]:
    """Opens the page twice, and moves along it."""
    found = listen("127.0.0.1", None)
    server = make_server(make_app(Follower([folder])))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [found]})
    url = f"http://127.0.0.1:{found.getsockname()[1]}/"
    with Browser() as browser:
        browser.page("about:blank").__exit__()  # the first window of a browser takes longer
        thread.start()
        times = {}
        start = time.perf_counter()
        with browser.page(url) as page:
            page.wait(_DRAWN)
            times["first_s"] = time.perf_counter() - start
            page.wait(_WHOLE)
            times["whole_s"] = time.perf_counter() - start
        start = time.perf_counter()
        with browser.page(url) as page:
            page.wait(_WHOLE)
            times["again_s"] = time.perf_counter() - start
            page.ask("page.zoomTo([page._bounds()[0], page._bounds()[1] / 3])")
            times["pan_ms"] = median(page.ask(_PAN) for _ in range(20))
            assert page.errors == [], page.errors
    server.should_exit = True
    thread.join()
    return {name: round(value, 3) for name, value in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder) / "run", asked.ranks, asked.steps)
        times = measure(Path(folder) / "run")
    config = {"ranks": asked.ranks, "steps": asked.steps}
    record = BenchRecord(name="page", command="python bench/page.py", rows=[times], config=config)
    if asked.output is not None:
        record.write(asked.output)
    print(record.to_json())


if __name__ == "__main__":
    main()
