"""How a config scales: measured on this machine's ranks, simulated beyond them, predicted far beyond.

    strong   the global batch stays          weak   the samples of a rank stay: the global batch grows with the ranks
    speed-up       rate / (rate of the fewest ranks of the same kind / their number)
    efficiency     speed-up / ranks
    communication  the share of a step in which ranks wait for it; in a pipeline, for the other stages too
    memory         of the rank that needs most

Each row says what it is. Rows of different kinds are not compared with one another: a simulated rank has a core of its
own and the links of processes of one host, a predicted one the device and the links of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from paceline.charts import Line, draw_lines, save_picture
from paceline.cluster.detect import usable_cores
from paceline.cluster.devices import Cluster
from paceline.config import Config, check_ranks, run_checks
from paceline.config.schema import ParallelConfig
from paceline.config.train_checks import short_run
from paceline.errors import ConfigError, PacelineError, UsageError
from paceline.predict.replay.replayed import ReplayedStep
from paceline.records.summary import RunRecords, open_run
from paceline.rehearse.prediction import predict_decided
from paceline.rehearse.simulate.run import prepare, simulate
from paceline.run.location import RunOptions
from paceline.run.signals import scratch_folder
from paceline.run.train import train
from paceline.search.candidates import resized

Kind = Literal["measured", "simulated", "predicted"]
MODES = ("strong", "weak")
PIPELINE = "pipeline"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", PIPELINE)
MICROBATCHES = 4  # of each stage of a pipeline, as far as they divide the batch
MOST_SIMULATED = 16  # virtual ranks take turns on this machine
_SERIES = itemgetter("kind", "mode", "strategy", "batch")  # rows in which ranks alone differ


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCase:
    """One run: ``batch`` is the global batch of strong scaling, and that of one rank under weak scaling."""

    kind: Kind
    mode: str
    strategy: str
    batch: int
    ranks: int

    @property
    def global_batch(self) -> int:
        """The samples of a step, of all ranks."""
        return self.batch * self.ranks if self.mode == "weak" else self.batch


def own_strategy(config: Config) -> str:
    """Returns the word for how a config is spread itself; ddp where it leaves that open."""
    named = PIPELINE if config.parallel.pipeline > 1 else config.parallel.strategy.replace("zero3", "fsdp")
    return named if named in STRATEGIES else "ddp"


def kind_here(ranks: int, *, gpus: int) -> Kind:
    """Says whether this machine has a device, or a core, for each of so many ranks."""
    return "measured" if ranks <= (gpus or len(usable_cores())) else "simulated"


def cases(
    ranks: Sequence[int], strategies: Sequence[str], batches: Sequence[int], modes: Sequence[str], *, gpus: int, to: int
) -> list[ScalingCase]:
    """Lists what is run, with predictions for powers of two up to ``to``. Raises UsageError for too many ranks."""
    many = [count for count in ranks if kind_here(count, gpus=gpus) == "simulated" and count > MOST_SIMULATED]
    if many:
        raise UsageError(
            f"--ranks {many[0]}: this machine has no device for each; at most {MOST_SIMULATED} ranks are simulated\n"
            f"  more are predicted\n  give --predict-to {many[0]}"
        )
    found: list[ScalingCase] = []
    for mode, strategy, batch in product(modes, strategies, batches):
        one = ScalingCase(kind="predicted", mode=mode, strategy=strategy, batch=batch, ranks=1)
        here = [replace(one, kind=kind_here(count, gpus=gpus), ranks=count) for count in ranks]
        if any(each.kind == "simulated" for each in here):  # simulated ranks have a baseline of their kind
            here.append(replace(one, kind="simulated", ranks=1))
        predicted = [replace(one, ranks=2**power) for power in range(to.bit_length())]
        found += dict.fromkeys([*here, *predicted])
    return found


def bench_scaling(
    config: Config, todo: Sequence[ScalingCase], steps: int, cluster: Cluster | None, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Runs all cases; a case that cannot run has its reason in the place of a rate.

    On CPUs every measured rank has as many threads as one of the most ranks has, so that ranks are all that grows.
    """
    most = max((case.ranks for case in todo if case.kind == "measured"), default=1)
    if config.parallel.threads is None:
        config = config.with_values("parallel", threads=max(1, len(usable_cores()) // most))
    rows = []
    for case in todo:
        tell(f"{case.kind}: {case.strategy} on {case.ranks} ranks, {case.mode}, batch {case.global_batch} ...")
        row: dict[str, Any] = asdict(case) | {"global_batch": case.global_batch}
        try:
            rows.append(row | _measure(config_of(config, case), case, steps, cluster))
        except PacelineError as error:
            rows.append(row | {"error": error.headline})
    return list(with_speed_up(rows))


def config_of(config: Config, case: ScalingCase) -> Config:
    """Returns the config of a case. Raises ConfigError for a strategy, a batch or ranks that do not go with it.

    The ranks of a pipeline are its stages, but for those that split layers (``parallel.tensor``).
    """
    parallel, is_pipeline = config.parallel, case.strategy == PIPELINE
    stages = max(1, case.ranks // parallel.tensor) if is_pipeline else 1
    spread = {"strategy": "ddp" if is_pipeline else case.strategy, "pipeline": stages, "data": None}
    cut = ["stages", "stage_layers", "schedule_file", *(["schedule", "chunks"] if stages == 1 else [])]
    usual = {key: ParallelConfig.model_fields[key].default for key in cut}  # they are for a number of stages
    usual["expert"] = math.gcd(parallel.expert, max(1, case.ranks // (parallel.tensor * stages)))
    changed = config.with_values("parallel", ranks=case.ranks, **spread, **usual)
    parts = math.gcd(case.global_batch, MICROBATCHES * stages) if stages > 1 else None
    changed = changed.with_values("train", global_batch=case.global_batch, microbatch=None, accumulate=parts)
    if problems := run_checks(changed) or check_ranks(changed, case.ranks, parallel.node_ranks):
        raise ConfigError(problems)
    return changed


def _measure(config: Config, case: ScalingCase, steps: int, cluster: Cluster | None) -> dict[str, Any]:
    """Returns the rate, the seconds of a step, the share in which ranks wait for communication, and a rank's memory."""
    if case.kind == "predicted":
        assert cluster is not None
        return _predicted(predict_decided(config, resized(cluster, case.ranks), case.ranks)[1], case)
    short = short_run(config, steps)
    if case.kind == "simulated":
        found = simulate(prepare(short, ranks=case.ranks))
        return _totals(RunRecords.of(found.records))
    with scratch_folder() as folder:
        quiet = short.with_values("monitor", folder=str(folder), console=False, tensorboard=False, trackers=())
        result = train(quiet, options=RunOptions(is_quiet=True))
        assert result is not None
        return _totals(open_run(result.folder))


def _predicted(found: ReplayedStep, case: ScalingCase) -> dict[str, Any]:
    waits = [(each.exposed + each.bubble) / found.seconds for each in found.times]
    return {
        "samples_per_s": case.global_batch / found.seconds,
        "units_per_s": found.elements_per_s,
        "unit": found.program.element,
        "step_s": found.seconds,
        "comm_share": sum(waits) / len(waits),
        "memory_bytes": found.total_memory,
    }


def _totals(records: RunRecords) -> dict[str, Any]:
    table = records.steps.without_warm_up()
    totals, rate, run = table.totals(), table.samples_per_s or 0.0, records.run
    return {
        "samples_per_s": rate,
        "units_per_s": rate * run.units_per_sample,
        "unit": run.unit,
        "step_s": table.step_s or 0.0,
        "comm_share": totals.comm_share,
        "memory_bytes": totals.memory_bytes,
    }


def with_speed_up(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Adds speed-up and efficiency, against the fewest ranks among rows of the same kind."""
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=itemgetter("ranks")):
        if row.get("samples_per_s"):
            first.setdefault(_SERIES(row), row)
    for row in rows:
        if not row.get("samples_per_s"):
            yield row
            continue
        base = first[_SERIES(row)]
        speed_up = row["samples_per_s"] / (base["samples_per_s"] / base["ranks"])
        yield row | {"ideal": row["ranks"], "speed_up": speed_up, "efficiency": speed_up / row["ranks"]}


def draw_rows(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draws speed-up over ranks, a line for each kind and case beside the ideal. The file's ending is its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 5.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    points: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for row in rows:
        if "speed_up" in row:
            points.setdefault(_SERIES(row), []).append((row["ranks"], row["speed_up"]))
    styles, lines = {"measured": "-", "simulated": "--", "predicted": ":"}, []
    for (kind, mode, strategy, batch), found in points.items():
        places, values = zip(*sorted(found), strict=True)
        look = {"linestyle": styles[kind], "marker": "o"}
        lines.append(Line(places, values, f"{kind}: {strategy}, {mode}, batch {batch}", look))
    counts = sorted({row["ranks"] for row in rows})
    lines.append(Line(counts, counts, "ideal", {"color": "grey", "linewidth": 0.8}))
    draw_lines(axes, lines, counts=counts, xlabel="ranks", ylabel="speed-up", title=title)
    axes.set_yscale("log", base=2)
    save_picture(figure, path)
