"""``paceline predict``: what a step of a config takes on a cluster, from the engine that would run it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.destination import check_file
from paceline.cli.options import ClusterName, ConfigPath, Overrides, grouped, print_json
from paceline.errors import UsageError
from paceline.terminal import echo
from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline.config import BatchPlan, Config
    from paceline.predict.replay.replayed import ReplayedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """Which ranks a step has, and what is made of the prediction."""

    ranks: int = typer.Option(None, min=1, help="Ranks; else parallel.ranks, or as many as the cluster has devices.")
    rank: int = typer.Option(
        None, min=0, help="The rank to tell of; else the one that computes most, of rank 0 and those it passes work to."
    )
    slow: list[str] = typer.Option(
        [], metavar="rank=2:1.5x", help="A rank whose host and device take longer; may be repeated."
    )
    trace: Path = typer.Option(
        None, callback=check_file, help="Write the step's time line here, for Chrome or ui.perfetto.dev."
    )
    price: float = typer.Option(None, min=0.0, metavar="USD", help="What a device costs an hour.")


@grouped
def predict(
    config: ConfigPath,
    cluster: ClusterName,
    overrides: Overrides = None,
    *,
    asked: PredictOptions,
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """Predict the time and the memory of a step on a cluster."""
    from paceline.cli.simulate import read_slow
    from paceline.cluster.devices import load_cluster
    from paceline.config import config_batch, why_not_sharded
    from paceline.rehearse.prediction import config_on, memory_bound, predict_decided

    slow_ranks, slow_links = read_slow(asked.slow)
    if slow_links:
        raise UsageError(
            "--slow link=...\n  a prediction has slow ranks alone\n  take paceline simulate for slow links"
        )
    if asked.price is not None and not math.isfinite(asked.price):
        raise UsageError(
            f"--price {asked.price}\n  it is what a device costs an hour, in dollars\n  leave it out, or name it"
        )
    where = load_cluster(cluster)
    chosen, count = config_on(config, where, overrides=overrides or [], ranks=asked.ranks)
    keeps = asked.trace is not None
    chosen, found = predict_decided(chosen, where, count, rank=asked.rank, slow=slow_ranks, keeps_spans=keeps)
    batch, bound = config_batch(chosen, count), memory_bound(chosen, where, count)
    if asked.trace is not None:
        from paceline.predict.replay.replayed import write_trace

        write_trace(found, asked.trace)
    if as_json:
        more = {"microbatch": batch.microbatch, "accumulate": batch.accumulate, "memory_bound_bytes": bound}
        cost = {} if asked.price is None else {"usd_per_step": found.usd_per_step(asked.price)}
        print_json(found.to_json() | more | cost)
    else:
        if alone := why_not_sharded(chosen, count):
            echo(f"{alone}\n")
        for line in [*describe(found, batch, asked.price, bound), *_ways_out(found, chosen, batch, config, cluster)]:
            echo(line)
        if asked.trace is not None:
            echo(f"\nThe time line is in {asked.trace}: open it in ui.perfetto.dev.")
    if not found.fits:
        raise typer.Exit(1)


def describe(found: ReplayedStep, batch: BatchPlan, price: float | None = None, bound: int | None = None) -> list[str]:
    """Returns what there is to say about a step, line by line."""
    program, cluster, (low, high) = found.program, found.cluster, found.band
    devices = f"{program.ranks} x {cluster.device.name}"
    kind = ", the band of runs outside what was calibrated" if found.outside else " in nine of ten runs of this kind"
    lines = [
        f"{program.name} on {cluster.name}: {devices}, {program.strategy}, {found.framework}",
        "",
        f"step          {format_seconds(found.seconds)}, between {format_seconds(low)} and "
        f"{format_seconds(high)}{kind}",
        f"{program.element:<13} {found.elements_per_s:,.0f} per second",
        f"MFU           {found.mfu:.1%}",
        f"batch         {batch.global_batch} samples: microbatch {batch.microbatch} x accumulate {batch.accumulate} x "
        f"{batch.ranks} data rank{'' if batch.ranks == 1 else 's'}",
    ]
    if price is not None:
        lines.append(f"cost          {found.usd_per_step(price):.4g} USD a step at {price:g} USD an hour and device")
    lines += ["", *_breakdown(found), "", *_memory(found, bound), "", f"What binds: {found.binds}."]
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
    for phase, seconds in rank.phases.items():
        lines.append(f"  {phase:<11} {seconds:>10.4f} {seconds / step:>7.1%}")
    if rank.communication:
        lines += ["", f"{'communication':<14} {'seconds':>9} {'share':>7}  hidden or not"]
    for kind, seconds in rank.communication.items():
        moved: Any = rank.moved[kind]
        lines.append(f"  {kind:<14} {seconds:>7.4f} {seconds / step:>7.1%}  {moved / 1e6:,.1f} MB")
    return lines


def _memory(found: ReplayedStep, bound: int | None) -> list[str]:
    lines = [f"{'memory':<13} {'GiB':>10}  of a rank at its worst moment, by the dry run"]
    for name, size in found.memory.items():
        if size:
            lines.append(f"  {name:<11} {size / 2**30:>10.3f}")
    verdict = "fits" if found.fits else "OUT OF MEMORY"
    room = found.cluster.device.memory_bytes / 2**30
    lines.append(f"  {'all':<11} {found.total_memory / 2**30:>10.3f}  of {room:.1f}: {verdict}")
    if bound is not None:
        why = "what paceline plan shows: all gradients beside all activations"
        lines.append(f"  {'upper bound':<11} {bound / 2**30:>10.3f}  {why}")
    return lines


def _ways_out(found: ReplayedStep, config: Config, batch: BatchPlan, path: Path, cluster: str) -> list[str]:
    """Says what to do about a step that does not fit."""
    from paceline.config import layout_of

    if found.fits:
        return []
    ways = ["a smaller train.microbatch"] if batch.microbatch > 1 else []
    if config.memory.checkpoint_activations == "none":
        ways.append("memory.checkpoint_activations=full")
    if batch.ranks > 1 and not layout_of(config).is_fully_sharded:
        ways.append("parallel.strategy=fsdp")
    less = f"Less memory: {', '.join(ways)}. " if ways else ""
    return [f"{less}What fits:", f"  paceline plan {shlex.quote(str(path))} --cluster {shlex.quote(cluster)}"]
