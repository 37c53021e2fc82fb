"""Checks the model of NCCL's collectives on measured timings: python bench/check_collectives.py TIMINGS.csv.

The table has the columns gpu, collective, n_gpus, nodes, bytes, time_us, algo (vTrain's traces, ml-engineering's runs).
Rows with NVLS switched off are left out, as the model takes it where there is one.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from pathlib import Path

from paceline.cluster.devices import load_cluster
from paceline.cluster.wires import Group, collective_seconds

NODES = {"A100": "1x dgx-a100", "V100": "1x dgx-1", "H200": "1x dgx-h200", "B200": "1x dgx-b200"}
SIZES = ((8 << 20, "up to 8 MiB"), (64 << 20, "8 to 64 MiB"), (1 << 62, "more"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    clusters = {gpu: load_cluster(name) for gpu, name in NODES.items()}
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    with parser.parse_args().file.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["gpu"] in NODES and row["algo"] in ("", "NVLS"):
                num_bytes = float(row["bytes"])
                size = next(name for most, name in SIZES if num_bytes <= most)
                group = Group(int(row["n_gpus"]), int(row["nodes"]))
                found = collective_seconds(row["collective"], num_bytes, group, clusters[row["gpu"]])  # type: ignore[arg-type]
                errors[row["gpu"], size].append(found * 1e6 / float(row["time_us"]) - 1)
    for (gpu, size), each in sorted(errors.items()):
        mean, bias = 100 * statistics.fmean(map(abs, each)), 100 * statistics.fmean(each)
        print(f"{gpu:<6}{size:<14}{len(each):>6} rows  mean error {mean:5.1f} %  bias {bias:+.1f} %")


if __name__ == "__main__":
    main()
