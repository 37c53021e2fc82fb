"""How large the records of a large run are, and how fast its report and page open: python bench/records_at_scale.py.

Writes what the ranks and hosts of a run of so many ranks and steps would have written, through the sink that ranks
write with, and measures, each in a process of its own:

    disk        bytes of records/, beside those of a line for each step and rank
    report      from the start of ``paceline report RUN`` to its end; the best of three, as all times here
    html        the same, with ``--html FILE``
    page        from the start of ``paceline watch RUN`` to the answer that has all records, as the page asks for it
    metrics     the first answer of /metrics of a run that goes on
    thin        what a rank takes of a processor to add up its older steps, and after how many steps it does so
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pool"))

from made_records import END, RUN, STEP

from paceline.records.records import CommRecord, HostRecord, Record, RunRecord, parse_line, to_line
from paceline.records.sinks import JsonlSink
from paceline.records.thin import lines_kept, thin_lines
from paceline_bench.timing import BenchRecord

_HOST_RANKS = 8
_KEEPS_BYTECODE = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # as an installed package has it
_SENSORS = ("hw.gpu.utilization", "hw.gpu.memory.usage", "hw.power", "hw.temperature")


def steps_of(steps: int, slow: float) -> list[Record]:
    """Returns a loss that falls, steps that vary by a few percent, and communication every third of them."""
    found: list[Record] = []
    for step in range(1, steps + 1):
        forward = 0.1 * slow * (1 + 0.03 * ((step * 7919) % 101) / 101)
        record = replace(
            STEP,
            step=step,
            epoch=step / 1000,
            position=4096 * step,
            loss=2 + 8 / step**0.3,
            loss_sum=8 * (2 + 8 / step**0.3),
            count=8,
            samples=8,
            step_s=0.33,
            forward_s=forward,
            backward_s=0.18,
            comm_s=0.33 - 0.2 - forward,
            time=RUN.time + 0.33 * step,
            flops_per_s=4.1e14,
            mfu=0.41,
        )
        found.append(record)
        if step % 3 == 0:
            sent = {"calls": 90, "bytes": 9 * 10**9, "seconds": 0.4, "ranks": 512}
            found.append(CommRecord(step=step, kind="all_reduce", group="world", time=record.time, **sent))
    return found


def make_run(folder: Path, ranks: int, steps: int, most: int | None) -> dict[str, float]:
    """Writes the records: two ranks' and a host's through a sink; those of the others are the same."""
    (folder / "records").mkdir(parents=True)
    for rank, slow in ((0, 1.0), (1, 1.02)):
        with contextlib.closing(JsonlSink(folder / "records" / f"rank-{rank}.jsonl", most=most)) as sink:
            sink.write(replace(RUN, rank=rank, world_size=ranks, total_steps=steps, host="node-0"))
            sink.write(*steps_of(steps, slow), replace(END, step=steps, time=RUN.time + 0.33 * steps + 1))
    for rank in range(2, ranks):
        first, rest = (folder / "records" / f"rank-{rank % 2}.jsonl").read_bytes().split(b"\n", 1)
        run = parse_line(first)
        assert isinstance(run, RunRecord)
        own = replace(run, rank=rank, host=f"node-{rank // _HOST_RANKS}")
        (folder / "records" / f"rank-{rank}.jsonl").write_bytes(to_line(own).encode() + rest)
    values = {f"{name}/{number}": 0.5 + number for name in _SENSORS for number in range(_HOST_RANKS)}
    samples = [HostRecord(host="node-0", values=values, time=RUN.time + n) for n in range(int(0.33 * steps))]
    with contextlib.closing(JsonlSink(folder / "records" / "host-node-0.jsonl", most=most)) as sink:
        sink.write(*samples)
    text = (folder / "records" / "host-node-0.jsonl").read_text()
    for host in range(1, ranks // _HOST_RANKS):
        (folder / "records" / f"host-node-{host}.jsonl").write_text(text.replace("node-0", f"node-{host}"))
    config = f"name: large\nmodel: {{kind: mlp}}\ndata: {{kind: digits}}\ntrain: {{steps: {steps}}}\n"
    (folder / "config.yaml").write_text(config)
    return {} if most is None else thin_times(folder, steps, most)


def thin_times(folder: Path, steps: int, most: int) -> dict[str, float]:
    """Times what a rank does every ``most`` / 2 steps: it adds up those that are new."""
    data = (folder / "records" / "rank-0.jsonl").read_bytes().rpartition(b'{"type":"end"')[0]
    more = [replace(STEP, step=step, time=RUN.time + 0.33 * step) for step in range(steps + 1, steps + most // 2 + 1)]
    data += "".join(map(to_line, more)).encode()
    times = []
    for _ in range(5):
        start = time.process_time()
        thin_lines(data, most)
        times.append(time.process_time() - start)
    return {"thin_ms": 1e3 * median(times), "thin_every_steps": most // 2}


def timed(name: str, *words: str) -> dict[str, float]:
    """Returns what a command takes, the best of three; and of a processor, where the machine is busy."""
    found = []
    for _ in range(3):
        start, before = time.perf_counter(), os.times()
        command = [sys.executable, "-m", "paceline", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_KEEPS_BYTECODE)
        after = os.times()
        processor = after.children_user + after.children_system - before.children_user - before.children_system
        found.append((time.perf_counter() - start, processor))
    return {f"{name}_s": min(wall for wall, _ in found), f"{name}_processor_s": min(each for _, each in found)}


def page_times(folder: Path) -> dict[str, float]:
    """Starts the server, and asks as the page does until all records are read."""
    command = [sys.executable, "-m", "paceline", "watch", str(folder), "--no-open"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_KEEPS_BYTECODE) as served:
        assert served.stdout is not None
        url = urlsplit(served.stdout.readline().split()[-1])

        def ask(path: str) -> bytes:
            connection = http.client.HTTPConnection(url.netloc, timeout=60)
            connection.request("GET", path)
            return connection.getresponse().read()

        run = json.loads(ask("/api/runs"))["list"][0]["id"]
        times = {}
        while True:
            shown = json.loads(ask(f"/api/runs?ids={run}&points=1000"))["runs"][0]
            times.setdefault("page_first_s", time.perf_counter() - start)
            if shown["read"] == 1 and len(json.loads(ask(f"/api/heat?id={run}&name=late_s"))["ranks"]) > 1:
                break
            time.sleep(0.05)
        times["page_whole_s"] = time.perf_counter() - start
        start = time.perf_counter()
        ask("/metrics")
        times["metrics_s"] = time.perf_counter() - start
        process = psutil.Process(served.pid).cpu_times()
        times["page_processor_s"] = process.user + process.system
        served.terminate()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--keep", default="auto", help="monitor.keep_steps of the run")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    most = lines_kept(int(asked.keep) if asked.keep.isdigit() else asked.keep, asked.ranks)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "large"
        row = make_run(folder, asked.ranks, asked.steps, most)
        sizes = {path.name: path.stat().st_size for path in (folder / "records").iterdir()}
        line = len(to_line(steps_of(asked.steps, 1.0)[-1]))
        row |= {"disk_mb": sum(sizes.values()) / 1e6, "rank_kb": sizes["rank-0.jsonl"] / 1e3}
        row |= {"host_kb": sizes["host-node-0.jsonl"] / 1e3, "every_step_mb": line * asked.steps * asked.ranks / 1e6}
        row |= timed("report", "report", str(folder))
        row |= timed("html", "report", str(folder), "--html", str(Path(root) / "page.html"))
        pages = [page_times(folder) for _ in range(3)]
        row |= {name: min(each[name] for each in pages) for name in pages[0]}
    row = {name: round(value, 3) for name, value in row.items()}
    config = {"ranks": asked.ranks, "steps": asked.steps, "keep_steps": asked.keep, "cores": os.cpu_count()}
    record = BenchRecord(name="records-at-scale", command="python bench/records_at_scale.py", rows=[row], config=config)
    if asked.output is not None:
        record.write(asked.output)
    print(record.to_json())


if __name__ == "__main__":
    main()
