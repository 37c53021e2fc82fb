"""``paceline predict``: what a step of a config takes on a cluster, from the engine that would run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.destination import check_file

if TYPE_CHECKING:
    from paceline.cluster.devices import Cluster
    from paceline.config import Config
    from paceline.planner.replayed import Replay


def predict(
    config: Path = typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/gpt_7b.yaml."),
    overrides: list[str] = typer.Argument(None, metavar="SECTION.KEY=VALUE", help="Changes to the config."),
    cluster: str = typer.Option(
        ..., "--cluster", "-c", metavar="NAME", help="Such as '4x dgx-h100' or '32x h100-sxm'; see paceline cluster ls."
    ),
    ranks: int = typer.Option(None, min=1, help="Ranks; else as many as the cluster has devices."),
    rank: int = typer.Option(
        None, min=0, help="The rank to tell of; else the one that computes most, of rank 0 and those it passes work to."
    ),
    slow: list[str] = typer.Option(
        [], metavar="rank=2:1.5x", help="A rank that computes more slowly; may be repeated."
    ),
    trace: Path = typer.Option(
        None, callback=check_file, help="Write the step's time line here, for Chrome or ui.perfetto.dev."
    ),
    price: float = typer.Option(None, min=0.0, metavar="USD", help="What a device costs an hour."),
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """Predict a step: the real engine runs one rank without values, and what it issues is timed on the cluster.

    Overlap, prefetch, bubbles, stragglers and launch times come out of the order in which the engine issues kernels
    and collectives. Nothing is computed, and no GPU is needed. Exit code 1: it does not fit into memory.

    Examples:

      paceline predict configs/gpt_7b.yaml parallel.strategy=fsdp train.microbatch=2 --cluster "4x dgx-h100"

      paceline predict configs/digits.yaml --cluster "8x h100-sxm" --slow rank=2:1.5x --trace step.json

      paceline predict configs/gpt_7b.yaml parallel.pipeline=4 parallel.tensor=2 train.microbatch=1 -c "1x dgx-h100"

      paceline predict configs/resnet_images.yaml --cluster "1x p4d.24xlarge" --price 4.1 --json
    """
    from paceline.cli.simulate import read_slow
    from paceline.cluster.devices import load_cluster
    from paceline.config import load_config
    from paceline.errors import UsageError

    slow_ranks, slow_links = read_slow(slow)
    if slow_links:
        raise UsageError(
            "--slow link=...\n  a prediction has slow ranks alone\n  take paceline simulate for slow links"
        )
    where = load_cluster(cluster)
    count = where.devices if ranks is None else ranks
    asked = load_config(config, [*(overrides or []), f"parallel.ranks={count}"])
    if rank is not None and rank >= count:
        raise UsageError(f"--rank {rank} of {count} ranks\n  ranks are 0 to {count - 1}\n  try --rank {count - 1}")
    found = _replay(asked, where, count, slow_ranks, rank=rank, keeps_spans=trace is not None)
    if trace is not None:
        from paceline.planner.trace import write_trace

        write_trace(found, trace)
    if as_json:
        import json

        cost = {} if price is None else {"usd_per_step": found.usd_per_step(price)}
        typer.echo(json.dumps(found.to_json() | cost, indent=2))
    else:
        for line in describe(found, price):
            typer.echo(line)
        if trace is not None:
            typer.echo(f"\nThe time line is in {trace}: open it in ui.perfetto.dev.")
    if not found.fits:
        raise typer.Exit(1)


def _replay(
    config: Config, cluster: Cluster, ranks: int, slow: dict[int, float], *, rank: int | None, keeps_spans: bool
) -> Replay:
    from paceline.dryrun.record import record_stages
    from paceline.planner.replay import replay

    if cluster.device.is_cpu and config.parallel.device == "auto":  # engines do some things otherwise there
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"device": "cpu"})})
    programs = record_stages(config, ranks=ranks, rank=rank or 0, node_ranks=min(ranks, cluster.node.devices))
    return replace(replay(programs, cluster, slow=slow, keeps_spans=keeps_spans, with_loop=True), shown=rank)


def describe(found: Replay, price: float | None = None) -> list[str]:
    """Returns what there is to say about a step, line by line."""
    from paceline.units import format_seconds

    low, high = found.band
    lines = [
        f"{found.name} on {found.cluster}: {found.ranks} x {found.device}, {found.strategy}, {found.framework}",
        "",
        f"step          {format_seconds(found.seconds)}, between {format_seconds(low)} and {format_seconds(high)} "
        "in nine of ten runs of this kind",
        f"{found.element:<13} {found.elements_per_s:,.0f} per second",
        f"MFU           {found.mfu:.1%}",
    ]
    if price is not None:
        lines.append(f"cost          {found.usd_per_step(price):.4g} USD a step at {price:g} USD an hour and device")
    lines += ["", *_breakdown(found), "", *_memory(found), "", f"What binds: {found.binds}."]
    lines += [f"Outside the calibrated domain: {each}." for each in found.outside]
    return lines


def _breakdown(found: Replay) -> list[str]:
    rank, step = found.longest, found.seconds
    rows = [
        ("compute", rank.compute, "kernels of forward, backward and the optimizer"),
        ("  slowed", rank.contention, "by communication that runs beside them"),
        ("exposed", rank.exposed, "communication that compute waits for"),
        ("bubble", rank.bubble, "waiting for other stages of the pipeline"),
        ("launches", rank.launch_wait, "the device waits for the host"),
        ("loop", rank.loop, "the next batch, times, records and hooks"),
        ("on the host", rank.on_host, "the host computes itself: it updates what is offloaded"),
        ("hidden", rank.hidden, "communication beside compute, on top of the above: it costs nothing more"),
    ]
    lines = [f"{'where it goes':<13} {'seconds':>10} {'share':>7}  of rank {rank.rank}"]
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


def _memory(found: Replay) -> list[str]:
    lines = [f"{'memory':<13} {'GiB':>10}  of a rank at its worst moment"]
    for name, size in found.memory.items():
        if size:
            lines.append(f"  {name:<11} {size / 2**30:>10.3f}")
    verdict = "fits" if found.fits else "OUT OF MEMORY"
    lines.append(f"  {'all':<11} {found.total_memory / 2**30:>10.3f}  of {found.memory_bytes / 2**30:.1f}: {verdict}")
    return lines
