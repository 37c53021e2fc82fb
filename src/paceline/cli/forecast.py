"""``paceline plan``, ``predict`` and ``validate``: how to train on a cluster, what a step takes, how right that is."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import ClusterName, ConfigPath, Overrides, check_file, check_picture, print_json, write_output
from paceline.cli.simulate import read_slow
from paceline.errors import UsageError
from paceline.terminal import echo
from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline.cluster.devices import Cluster
    from paceline.config import Config
    from paceline.plan.plan import BatchPlan
    from paceline.predict.replay.replayed import ReplayedStep


def plan(
    cluster: ClusterName,
    config: str | None = typer.Argument(None, metavar="CONFIG", help="A YAML file, or one that ships: gpt_7b."),
    overrides: Overrides = None,
    *,
    hf: Path | None = typer.Option(None, metavar="FILE", help="A Hugging Face config.json or folder, not CONFIG."),
    gpus: str | None = typer.Option(None, metavar="N,N,...", help="A table over so many devices; or 1,2,4,...,64."),
    png: Path | None = typer.Option(None, callback=check_picture, metavar="FILE", help="Draw --gpus; .svg, .pdf too."),
    by: str = typer.Option("time", metavar="time|cost|memory", help="What comes first."),
    price: float | None = typer.Option(None, metavar="USD", help="What a device costs for an hour."),
    precision: str | None = typer.Option(None, metavar="auto|NAME", help="In place of the config's; auto: the best."),
    host_gb: float | None = typer.Option(None, metavar="GIB", help="Host memory of a node, for offload; else enough."),
    mtbf: float | None = typer.Option(None, min=1e-6, metavar="HOURS", help="Between failures: how often to snapshot."),
    top: int = typer.Option(5, min=1, help="How many plans to show."),
    output: Path | None = typer.Option(
        None, "-o", "--output", callback=check_file, metavar="FILE", help="Write the first plan as a config to train."
    ),
    trace: Path | None = typer.Option(None, callback=check_file, metavar="FILE", help="Write the first's time line."),
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """Find the fastest way to train a model on a cluster."""
    from paceline.rehearse.planning import plan as find
    from paceline.rehearse.planning import trace_plan

    source, changes = _source(config, list(overrides or []), hf)
    how: Any = {"by": by, "gpus": _counts(gpus, png), "precision": precision, "price": price, "host_gb": host_gb}
    found = find(source, cluster, overrides=changes, **how)
    interval = ""
    if mtbf is not None and found.winner is not None:
        found, interval = found.with_snapshots(3600.0 * mtbf)
    if output is not None and found.request.no_config:
        raise UsageError(f"{output} is not written: {found.request.no_config}\n  no config can\n  leave --output out")
    if output is not None and found.winner is not None:
        write_output(output, found.to_yaml(), "plan")
    is_drawn = png is not None and any(row.best for rows in found.scaling.values() for row in rows)
    if png is not None and is_drawn:
        from paceline.search.scaling import draw_scaling

        draw_scaling(found.scaling, png, f"{found.request.config.name} on {found.request.cluster.node.name}")
    traced_s = None if trace is None or found.winner is None else trace_plan(found, trace).seconds
    if as_json:
        replayed = {} if traced_s is None else {"replayed_s": traced_s}
        print_json(found.to_json(top) | replayed)
    else:
        echo(found.to_text(top))
        if interval:
            echo(f"\n{interval}")
        if traced_s is not None:
            echo(f"\nthe first, replayed: {traced_s:.4g} s a step; its time line is in {trace}")
        if output is not None and found.winner is not None:
            echo(f"\nwritten to {output}: paceline train {output}")
        if png is not None:
            why_not = "" if is_drawn else f"{png} is not drawn: no number of devices has a plan"
            echo(f"\n{why_not or f'drawn into {png}'}")
    if found.winner is None:
        raise typer.Exit(1)


def _source(config: str | None, overrides: list[str], hf: Path | None) -> tuple[Path, list[str]]:
    """Returns the file of the model, and what replaces its values; without CONFIG the first of these stands there."""
    from paceline.config.shipped import find_config

    if hf is None:
        if config is None:
            raise UsageError("nothing to plan\n  a plan is for a model\n  name a config, or --hf config.json")
        return Path(config), overrides
    if config is not None and "=" not in config:
        raise UsageError(f"both {config} and --hf {hf} are given\n  a plan is for one model\n  leave one of them out")
    source = hf / "config.json" if hf.is_dir() else find_config(hf)
    if source.suffix != ".json":
        raise UsageError(f"--hf {hf}\n  it is a Hugging Face config.json, or folder\n  name a file that ends in .json")
    return source, [*([config] if config else []), *overrides]


def _counts(text: str | None, png: Path | None) -> list[int] | None:
    if text is None and png is not None:
        raise UsageError(f"--png {png}: nothing to draw\n  it is for the table of --gpus\n  add --gpus 8,16,32")
    if text is None:
        return None
    found = _series(text.split(","))
    if not found:
        rule = "it is a list of whole numbers, in which ... goes on as the two before it do"
        raise UsageError(f"--gpus {text!r}\n  {rule}\n  try --gpus 1,2,4,8,16 or --gpus 1,2,4,...,64")
    return found


def _series(words: list[str]) -> list[int]:
    """Returns the numbers of a list, nothing where it is none; ``...`` goes on as the two before it do."""
    found: list[int] = []
    rest = [each.strip() for each in words]
    while rest:
        word = rest.pop(0)
        if word.isdigit():
            found.append(int(word))
        elif word == "..." and rest and rest[0].isdigit() and len(found) > 1 and found[-2] < found[-1] < int(rest[0]):
            first, number, last = found[-2], found[-1], int(rest[0])
            step, factor = number - first, number // first if first and number % first == 0 else 0
            while (number := number * factor if factor > 1 else number + step) < last:
                found.append(number)
        else:
            return []
    return found


def predict(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    cluster: str = typer.Option(None, "--cluster", "-c", metavar="NAME", help="Like '4x dgx-h100'; else this machine."),
    ranks: int = typer.Option(None, min=1, help="Ranks; else parallel.ranks, or as many as the cluster has devices."),
    rank: int = typer.Option(None, min=0, help="The rank to tell of; else the busiest of rank 0's pipeline."),
    slow: list[str] = typer.Option([], metavar="rank=2:1.5x", help="A rank that takes longer; may be repeated."),
    trace: Path = typer.Option(None, callback=check_file, help="Write the step's time line, for ui.perfetto.dev."),
    price: float = typer.Option(None, min=0.0, metavar="USD", help="What a device costs an hour."),
    longest: bool = typer.Option(False, "--longest", help="The longest sequences that fit, by what saves memory."),
    host_gb: float = typer.Option(None, min=0.0, metavar="GIB", help="--longest: host memory of a node; else enough."),
    on: str | None = typer.Option(None, metavar="gpu", help="Run a rank on this GPU, the cluster's links emulated."),
    steps: int = typer.Option(8, min=2, help="--on gpu: steps that are timed."),
    late: float = typer.Option(0.0, min=0.0, metavar="MS", help="--on gpu: how late the last rank is on average."),
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """Predict the time and the memory of a step on a cluster."""
    from paceline.cluster.devices import load_cluster
    from paceline.config import config_batch, layout_of, why_not_sharded
    from paceline.plan.workload import layout_label
    from paceline.rehearse.prediction import config_on, memory_bound, predict_decided
    from paceline.search.snapshots import describe_snapshots

    _check_place(on, cluster, slow, late)
    others = {"--rank": rank, "--slow": slow, "--trace": trace, "--price": price, "--on": on}
    _check_longest(longest, host_gb, [name for name, value in others.items() if value not in (None, [])])
    slow_ranks, slow_links = read_slow(slow)
    if slow_links:
        raise UsageError("--slow link=...\n  a prediction has slow ranks alone\n  take paceline simulate for links")
    if price is not None and not math.isfinite(price):
        raise UsageError(f"--price {price}\n  it is dollars a device and hour\n  leave it out, or name it")
    where, host_bytes = (load_cluster(cluster), math.inf) if cluster else _this_machine()
    chosen, count = config_on(config, where, overrides=overrides or [], ranks=ranks)
    if longest:
        from paceline.search.longest import longest as climb

        ladder = climb(chosen, where, count, host_bytes=host_bytes if host_gb is None else host_gb * 2**30)
        print_json(ladder.to_json()) if as_json else echo(ladder.to_text())
        return
    keeps, is_open = trace is not None and on is None, chosen.is_open
    chosen, found = predict_decided(chosen, where, count, rank=rank, slow=slow_ranks, keeps_spans=keeps)
    if on is not None:
        how = {"rank": rank or 0, "steps": steps, "lateness_s": late / 1e3, "trace": trace}
        _show_emulated(chosen, found, config, as_json=as_json, **how)
        return
    batch, bound = config_batch(chosen, count), memory_bound(chosen, where, count)
    if trace is not None:
        from paceline.predict.replay.replayed import write_trace

        write_trace(found, trace)
    if as_json:
        more = {"microbatch": batch.microbatch, "accumulate": batch.accumulate, "memory_bound_bytes": bound}
        cost = {} if price is None else {"usd_per_step": found.usd_per_step(price)}
        print_json(found.to_json() | more | cost)
    else:
        if alone := why_not_sharded(chosen, count):
            echo(f"{alone}\n")
        if is_open:
            echo(f"auto takes {layout_label(layout_of(chosen, count))}\n")
        lines = describe(found, batch, price, bound)
        lines += [] if found.fits else _ways_out(chosen, batch, config, where.name)
        lines += describe_snapshots(chosen, where, count, found.seconds)
        echo("\n".join(lines))
        if trace is not None:
            echo(f"\nThe time line is in {trace}: open it in ui.perfetto.dev.")
    if not found.fits:
        raise typer.Exit(1)


def _check_place(on: str | None, cluster: str | None, slow: Sequence[str], late: float) -> None:
    if on not in (None, "gpu"):
        raise UsageError(f"--on {on}\n  a prediction is a dry run, or runs one rank on a GPU\n  take --on gpu")
    if on is None and late:
        rule = "a dry run has ranks that take longer, and none that is late by chance"
        raise UsageError(f"--late {late:g} without --on gpu\n  {rule}\n  add --on gpu, or take --slow rank=0:1.5x")
    if on is not None and cluster is None:
        fix = "name it: --cluster '1x dgx-h200'; names: paceline cluster ls"
        raise UsageError(f"--on gpu without a cluster\n  what is emulated are the links of one, by name\n  {fix}")
    if on is not None and slow:
        rule = "one rank runs, and the others are as fast as it is"
        raise UsageError(f"--slow {' '.join(slow)} with --on gpu\n  {rule}\n  take --late MS, or leave --on out")


def _check_longest(longest: bool, host_gb: float | None, others: Sequence[str]) -> None:
    if host_gb is not None and not longest:
        raise UsageError(f"--host-gb {host_gb:g} without --longest\n  nothing else reads it\n  leave it out")
    if longest and others:
        rule = "it tells of many lengths by formula, and of no step alone"
        raise UsageError(f"--longest with {', '.join(others)}\n  {rule}\n  leave one out, or predict one length")


def _show_emulated(config: Config, found: ReplayedStep, path: Path, *, as_json: bool, **how: Any) -> None:
    from paceline.config import config_batch
    from paceline.rehearse.emulate import emulate

    emulated = emulate(config, found, **how)
    print_json(emulated.to_json()) if as_json else echo(emulated.to_text())
    if emulated.problem:
        batch = config_batch(config, found.program.ranks)
        echo("\n".join(_ways_out(config, batch, path, found.cluster.name)), err=as_json)
        raise typer.Exit(1)


def _this_machine() -> tuple[Cluster, float]:
    from paceline.cluster.detect import detect_cluster, detect_machine
    from paceline.run.processes import machine_entry

    machine = detect_machine()
    found = detect_cluster(machine, machine_entry())
    if found.cluster is None:
        rule = "a prediction is for devices of the catalog"
        raise UsageError(f"{found.assumed[0]}\n  {rule}\n  name one: --cluster h200")
    return found.cluster, machine.memory_bytes


def describe(found: ReplayedStep, batch: BatchPlan, price: float | None = None, bound: int | None = None) -> list[str]:
    """Returns what there is to say about a step, line by line."""
    program, cluster = found.program, found.cluster
    took, low, high = map(format_seconds, (found.seconds, *found.band))
    devices = f"{program.ranks} x {cluster.device.name}"
    kind = ", the band of runs outside what was calibrated" if found.outside else " in nine of ten runs of this kind"
    lines = [
        f"{program.name} on {cluster.name}: {devices}, {program.strategy}, {found.framework}",
        "",
        f"step          {took}, between {low} and {high}{kind}",
        f"{program.element:<13} {found.elements_per_s:,.0f} per second",
        f"MFU           {found.mfu:.1%}",
        f"batch         {batch.global_batch} samples: microbatch {batch.microbatch} x accumulate {batch.accumulate} x "
        f"{batch.ranks} data rank{'' if batch.ranks == 1 else 's'}",
    ]
    if price is not None:
        lines.append(f"cost          {found.usd_per_step(price):.4g} USD a step at {price:g} USD an hour and device")
    lines += ["", *_breakdown(found), "", *_memory(found, bound), "", f"What binds: {found.binds}."]
    lines += [f"What is least certain: {found.doubt}."]
    if timed := found.timed_share:
        lines += [f"Kernels that were timed one by one make {timed:.0%} of the compute."]
    lines += [f"Outside the calibrated domain: {each}." for each in found.outside]
    return lines


def _breakdown(found: ReplayedStep) -> list[str]:
    rank, step = found.longest, found.seconds
    rows = [
        ("compute", rank.compute, "kernels of forward, backward and the optimizer"),
        ("slowed", rank.contention, "what kernels take longer beside communication, on top of compute"),
        ("exposed", rank.exposed, "communication that compute waits for"),
        ("bubble", rank.bubble, "waiting for other stages of the pipeline"),
        ("launches", rank.launch_wait, "the device waits for the host"),
        ("loop", rank.loop, "the next batch, times, records and hooks"),
        ("on the host", rank.on_host, "the host computes itself: it updates what is offloaded"),
        ("hidden", rank.hidden, "communication beside compute, on top of the above: it costs nothing more"),
    ]
    slowed = "" if rank.slowed == 1 else f", {rank.slowed:g}x as slow"
    lines = [f"{'where it goes':<13} {'seconds':>10} {'share':>7}  of rank {rank.rank}{slowed}"]
    for name, seconds, what in rows:
        if seconds > 0 or name in ("compute", "exposed"):
            lines.append(f"{name:<13} {seconds:>10.4f} {seconds / step:>7.1%}  {what}")
    lines += ["", f"{'phase':<13} {'seconds':>10} {'share':>7}  with what is waited for in it"]
    lines += [f"  {phase:<11} {spent:>10.4f} {spent / step:>7.1%}" for phase, spent in rank.phases.items()]
    if rank.communication:
        lines += ["", f"{'communication':<14} {'seconds':>9} {'share':>7}  hidden or not"]
    for kind, seconds in rank.communication.items():
        moved: Any = rank.moved[kind]
        lines.append(f"  {kind:<14} {seconds:>7.4f} {seconds / step:>7.1%}  {moved / 1e6:,.1f} MB")
    return lines


def _memory(found: ReplayedStep, bound: int | None) -> list[str]:
    lines = [f"{'memory':<13} {'GiB':>10}  of a rank at its worst moment, by the dry run"]
    lines += [f"  {name:<11} {size / 2**30:>10.3f}" for name, size in found.memory.items() if size]
    verdict = "fits" if found.fits else "OUT OF MEMORY"
    room = found.cluster.device.memory_bytes / 2**30
    lines.append(f"  {'all':<11} {found.total_memory / 2**30:>10.3f}  of {room:.1f}: {verdict}")
    if bound is not None:
        why = "what paceline plan and auto go by, without a dry run"
        lines.append(f"  {'by formula':<11} {bound / 2**30:>10.3f}  {why}")
    return lines


def _ways_out(config: Config, batch: BatchPlan, path: Path, cluster: str) -> list[str]:
    from paceline.config import layout_of

    ways = ["a smaller train.microbatch"] if batch.microbatch > 1 else []
    if config.memory.checkpoint_activations == "none":
        ways.append("memory.checkpoint_activations=full")
    if batch.ranks > 1 and not layout_of(config).is_fully_sharded:
        ways.append("parallel.strategy=fsdp")
    less = f"Less memory: {', '.join(ways)}. " if ways else ""
    return [f"{less}What fits:", f"  paceline plan {shlex.quote(str(path))} --cluster {shlex.quote(cluster)}"]


_LISTED = 20
_HELD_OUT, _ALL = "dev", "all"


def validate(
    file: Path | None = typer.Argument(None, metavar="[FILE.csv]", help="Measurements.  [default: the published runs]"),
    split: str | None = typer.Option(None, metavar="NAME", help="This split, or all.  [default: dev; of FILE, all]"),
    rows: Path | None = typer.Option(None, callback=check_file, metavar="OUT.csv", help="Write every row, scored."),
    as_json: bool = typer.Option(False, "--json", help="Print the scores as JSON; errors are shares of 1."),
) -> None:
    """Score predictions on measurements that others published."""
    from paceline_bench.scored.measured_table import read_shipped, read_table
    from paceline_bench.scored.shown import show_scores
    from paceline_bench.scored.validation import rows_csv, to_json
    from paceline_bench.scored.validation import validate as score

    chosen = split or (_HELD_OUT if file is None else _ALL)
    found = score(read_shipped() if file is None else read_table(file), None if chosen == _ALL else chosen)
    if rows is not None:
        write_output(rows, rows_csv(found), "rows")
    if as_json:
        print_json(to_json(found))
    else:
        if found.has_scores:
            show_scores(found)
        for row in found.skipped[:_LISTED]:
            echo(f"skipped      {row.row.id}: {row.skipped}")
        if len(found.skipped) > _LISTED:
            echo(f"skipped      and {len(found.skipped) - _LISTED} more: --rows lists them")
    if not found.has_scores:
        echo(f"no row of {found.source} has a score: each is listed with its reason", err=True)
        raise typer.Exit(1)
