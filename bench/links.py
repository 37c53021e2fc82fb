"""Measures collectives, compression and training steps on hosts whose links have a known speed. Needs root.

    sudo python bench/links.py --json --output bench/results/links.json
    sudo python bench/links.py --quick
    sudo python bench/links.py --speed 100 --output table.json      (for comm.algorithm_table: one link)

Hosts are network namespaces joined by veth pairs and shaped by tc tbf; they are removed when the run ends, however it
ends. A record without --quick is what docs/links.md quotes. Exit code 2: bad arguments; 3: no root, or no ip or tc.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import NoReturn

from paceline_bench.timing import BenchRecord
from slow_links.network import TCP, NoNetworkError, check_able
from slow_links.plot import draw
from slow_links.speed_ups import speed_ups
from slow_links.suite import FULL, GIGABIT, PLACEMENTS, QUICK, Row, Schedule, measure
from slow_links.table import show

NOT_ABLE = 3


def main() -> int:
    """Runs the measurement and returns the exit code."""
    arguments = _parse()
    schedule = _schedule(arguments)
    try:
        check_able()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)  # as an exception, so that everything is torn down
        rows = _measure(schedule)
    except NoNetworkError as error:
        print(f"bench/links.py: {error}", file=sys.stderr)
        return NOT_ABLE
    except KeyboardInterrupt:
        print("bench/links.py: interrupted; the hosts are gone", file=sys.stderr)
        return 128 + signal.SIGINT
    config = {
        "schedule": dataclasses.asdict(schedule),
        "tcp": TCP,
        "compared": "link_bytes with theory_bytes",
        "is_real_time": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),  # chrt before the command
    }
    record = BenchRecord(name="links", command=shlex.join(["python", *sys.argv]), rows=rows, config=config)
    if arguments.output is not None:
        record.write(arguments.output)
    if arguments.plot is not None:
        draw(rows, arguments.plot)
    print(record.to_json() if arguments.json else show(rows))
    return 0


def _measure(schedule: Schedule) -> list[Row]:
    rows = [row for where in PLACEMENTS for row in measure(where, schedule)]
    return rows + speed_ups(rows)


def _schedule(arguments: argparse.Namespace) -> Schedule:
    asked = QUICK if arguments.quick else FULL
    if arguments.speed is None:
        return asked
    speed = arguments.speed * 10**6
    return dataclasses.replace(asked, sizes={speed: asked.sizes.get(speed, FULL.sizes[GIGABIT])})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Collectives on hosts whose links have a known speed. Needs root.")
    parser.add_argument("--json", action="store_true", help="print the record as JSON, and not as a table")
    parser.add_argument("--output", type=Path, help="also write the record to this file")
    parser.add_argument("--plot", type=Path, help="also draw the rows into this SVG file")
    parser.add_argument("--speed", type=_speed, metavar="MBIT", help="of one link alone, in Mbit/s")
    parser.add_argument("--quick", action="store_true", help="1 Gbit/s alone, fewer sizes, policies and repeats")
    return parser.parse_args()


def _speed(text: str) -> int:
    speed = int(text)
    if speed < 1:
        raise argparse.ArgumentTypeError(f"{speed} Mbit/s: a link carries at least 1")
    return speed


def _leave(number: int, frame: object) -> NoReturn:
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
