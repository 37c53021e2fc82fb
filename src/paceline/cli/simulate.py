"""``paceline simulate`` and ``schedule``: a config on virtual ranks, and who does what when in a pipeline."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from paceline.cli import options
from paceline.errors import RunFolderError, UsageError, did_you_mean
from paceline.schedule.grid import Schedule, lower
from paceline.schedule.measure import ScheduleCosts, StageCost, equal_costs, measure_schedule
from paceline.schedule.schedules import SCHEDULE_NAMES, make_schedule
from paceline.schedule.text import draw, format_csv, read_csv, render_text
from paceline.terminal import echo, new_console
from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.records.report import RunSummary
    from paceline.rehearse.simulate.run import Conditions, Simulation

_SLOW = re.compile(r"^(rank|link)=(\d+):(\d+(?:\.\d*)?|\.\d+)x?$")
_UNUSED = ("checkpoints", "logs")  # of a run's folder
_MARK = "simulation.json"  # what tells a simulation's folder from a run's: it may be replaced


def simulate(
    config: options.ConfigPath,
    overrides: options.Overrides = None,
    *,
    ranks: int = typer.Option(None, min=1, help="Virtual ranks; else parallel.ranks, or 4."),
    cluster: str = typer.Option(None, help='Whose network they have: "4x dgx-h100"; else processes of one host.'),
    slow: list[str] = typer.Option([], metavar="rank=2:1.5x", help="A slow rank, or link=2:3x; may be repeated."),
    compute: str = typer.Option("measured", help="measured here, or modelled for the cluster's device."),
    device: str = typer.Option(None, help="Where to compute: cpu, or one GPU that all ranks share (cuda)."),
    trace: Path = typer.Option(None, callback=options.check_file, help="Write the time line too, for ui.perfetto.dev."),
    force: bool = typer.Option(False, "--force", help="Replace a run's folder of the same name."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON, and no progress."),
    no_memory_check: options.NoMemoryCheck = False,
) -> None:
    """Train on virtual ranks, with the times of other machines."""
    changes = [*(overrides or []), *([] if ranks is None else [f"parallel.ranks={ranks}"])]
    loaded = options.load_and_tell(config, changes).config
    slow_ranks, slow_links = read_slow(slow)
    from paceline.cluster.devices import load_cluster
    from paceline.rehearse.simulate.run import Conditions, prepare

    where = None if cluster is None else load_cluster(cluster)
    settled = prepare(loaded, ranks=ranks, device=device, source=str(config), cluster=where)
    if not no_memory_check:
        from paceline.run.decide import check_virtual

        check_virtual(settled)
    how: dict[str, Any] = {"backend": loaded.comm.backend, "compute": compute}
    conditions = Conditions(cluster=where, slow=slow_ranks, slow_links=slow_links, **how)
    _run(settled, conditions, trace=trace, force=force, as_json=as_json)


def read_slow(texts: list[str]) -> tuple[dict[int, float], dict[int, float]]:
    """Reads ``rank=2:1.5x`` and ``link=0:3x``. Raises UsageError for anything else."""
    found: dict[str, dict[int, float]] = {"rank": {}, "link": {}}
    for text in texts:
        match = _SLOW.match(text.replace(" ", ""))
        if match is None or float(match[3]) <= 0:
            rule = "it names a rank or a link, and how many times as long it takes"
            raise UsageError(f"--slow {text}\n  {rule}\n  write --slow rank=2:1.5x or --slow link=0:3x")
        found[match[1]][int(match[2])] = float(match[3])
    return found["rank"], found["link"]


def _run(config: Config, conditions: Conditions, *, trace: Path | None, force: bool, as_json: bool) -> None:
    from paceline.config import dump_yaml
    from paceline.records.console import ProgressView
    from paceline.records.report import summarize
    from paceline.rehearse.simulate.recording import write_records, write_trace
    from paceline.rehearse.simulate.run import simulate as run_simulation
    from paceline.run.folder import check_folder, claim_folder, find_write_error

    folder = Path(config.monitor.folder) / f"{config.name}-simulated"
    may_replace = force or (folder / _MARK).is_file()
    check_folder(folder, force=may_replace)
    if (error := find_write_error(folder.parent)) is not None:
        rule, fix = "it is made when training is over", "set monitor.folder=... elsewhere"
        raise RunFolderError(f"cannot make the run's folder {folder}: {error.strerror or error}\n  {rule}\n  {fix}")
    view = ProgressView() if config.monitor.console and not as_json else None
    try:
        found = run_simulation(config, conditions, view=view)
    finally:
        if view is not None:
            view.close()
    with claim_folder(folder, dump_yaml(config), force=may_replace):  # now that it has worked
        write_records(found.records, folder, found.hosts)
        (folder / _MARK).write_text(json.dumps(describe(found), indent=2) + "\n", encoding="utf-8")
        for path in [folder / "trace.json", *([] if trace is None else [trace])]:
            write_trace(path, found.clocks, found.steps)
        for part in _UNUSED:
            (folder / part).rmdir()
        _show_simulation(found, summarize(folder), as_json=as_json)


def describe(found: Simulation) -> dict[str, Any]:
    """Returns where a simulation took place and what its clocks came to, as plain data."""
    where = found.conditions
    return {
        "cluster": None if where.cluster is None else where.cluster.name,
        "backend": where.backend,
        "compute": where.compute,
        "slow": {str(rank): factor for rank, factor in where.slow.items()},
        "slow_links": {str(rank): factor for rank, factor in where.slow_links.items()},
        **found.summary.to_json(),
    }


def _show_simulation(found: Simulation, summary: RunSummary, *, as_json: bool) -> None:
    from paceline.records.report import render
    from paceline.rehearse.simulate.recording import LEGEND, draw_step

    if as_json:
        options.print_json(summary.to_json() | {"simulation": describe(found)})
        return
    console = new_console()
    console.print(render(summary))
    drawn = draw_step(found.clocks, found.steps)
    totals = found.summary
    hidden = sum(each.hidden_share for each in totals.by_rank) / len(totals.by_rank)
    conditions = found.conditions
    network = "processes of one host" if conditions.cluster is None else conditions.cluster.name
    network += "" if conditions.backend in ("auto", "virtual") else f" over {conditions.backend}"
    compute = "compute as measured here" if conditions.compute == "measured" else f"compute of {conditions.rates.name}"
    slow = [f"rank {rank} {factor:g} x slower" for rank, factor in conditions.slow.items()]
    slow += [f"the link of rank {rank} {factor:g} x slower" for rank, factor in conditions.slow_links.items()]
    memory = "Memory is not known: the model is of your own code. paceline predict counts it."
    if any(getattr(record, "memory_bytes", 0) for record in found.records[0]):  # of a rank: all share one process
        gpu = found.conditions.gpu or "this device"
        memory = f"Memory is estimated for {gpu}, as paceline predict does by formula."
    lines = [
        "",
        f"the last step on the clocks of the ranks; a median step takes {format_seconds(totals.step_s)}",
        *drawn,
        LEGEND,
        "",
        f"Ranks compute {100 * totals.efficiency:.0f}% of the time; {100 * hidden:.0f}% of communication is hidden.",
        f"Times are simulated: {', '.join([compute, f'network of {network}', *slow])}.",
        memory,
        f"The run is in {summary.folder}: records, trace.json for ui.perfetto.dev, config.",
    ]
    console.print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)


_RINGS: dict[str, Literal["zigzag", "contiguous"]] = {"ring": "zigzag", "ring-contiguous": "contiguous"}
_MOST_RING = 64
_MOST_ACTIONS = 200_000  # of a grid that still can be looked at; a larger one takes minutes


def schedule(
    name: str = typer.Argument(metavar="NAME|FILE.csv", help="gpipe, 1f1b, interleaved, zb-h1, zb-v, ring, or yours."),
    *,
    stages: int | None = typer.Option(
        None, "--stages", "--ranks", "-s", min=1, help="Ranks, each --chunks stages.  [default: 4]"
    ),
    microbatches: int | None = typer.Option(None, "--microbatches", "-m", min=1, help="Microbatches.  [default: 8]"),
    chunks: int | None = typer.Option(None, min=1, help="Stages a rank.  [default: 2 for interleaved, zb-v; else 1]"),
    costs: str | None = typer.Option(None, metavar="C,C,...", help="What stages take; see above.  [default: equal]"),
    communication: float = typer.Option(0.0, "--communication", min=0.0, help="What a message takes, in that unit."),
    messages: bool = typer.Option(False, "--messages", help="Show sends, receives and reduces; --csv has them too."),
    csv: str | None = typer.Option(None, "--csv", metavar="FILE|-", help="Write the grid as CSV; - prints it alone."),
    png: Path | None = typer.Option(None, "--png", metavar="FILE", help="Draw the grid; .svg and .pdf go too."),
    as_json: bool = typer.Option(False, "--json", help="Print the grid and its measures as JSON."),
) -> None:
    """Show a pipeline schedule, its bubble and memory; or a ring."""
    if name in _RINGS:
        given = (microbatches, chunks, costs, communication or None, messages or None, csv, png)
        _show_ring(name, stages or 4, is_alone=given.count(None) == len(given), as_json=as_json)
        return
    from paceline.schedule.check import check_schedule

    found = _find(name, stages, microbatches, chunks)
    check_schedule(found)
    measure = measure_schedule(found, _read_costs(costs, communication, found))
    if csv is not None:
        programs, shown = lower(found) if messages else (), found
        if programs:
            slots = max(map(len, programs))
            shown = replace(found, rows=tuple((*each, *[None] * (slots - len(each))) for each in programs))
        if csv == "-":
            echo(format_csv(shown), nl=False)
        else:
            options.write_output(Path(csv), format_csv(shown), "schedule")
    if png is not None:
        draw(found, png, measure)
    if as_json:
        measured = ("makespan", "bubble", "overhead", "busy", "in_flight", "in_flight_share")
        options.print_json(
            {key: getattr(found, key) for key in ("name", "ranks", "stages", "microbatches", "placement")}
            | {key: getattr(measure, key) for key in measured}
            | {"rows": [[str(action) if action else None for action in row] for row in found.rows]}
            | {"programs": [[str(action) for action in program] for program in lower(found)]}
        )
    elif csv != "-":
        echo(render_text(found, measure, width=max(60, shutil.get_terminal_size((120, 40)).columns)))
        for rank, program in enumerate(lower(found)) if messages else ():
            echo(f"\nrank {rank} runs  {' '.join(map(str, program))}")


def _show_ring(name: str, ranks: int, *, is_alone: bool, as_json: bool) -> None:
    from paceline.schedule.ring import render_ring, ring_schedule

    if not is_alone or ranks > _MOST_RING:
        rule = f"it has up to {_MOST_RING} ranks, no microbatches, and neither file nor picture"
        raise UsageError(f"the schedule of a {name} of {ranks} ranks\n  {rule}\n  give --ranks and --json alone")
    if as_json:
        steps = [[asdict(step) for step in row] for row in ring_schedule(ranks, _RINGS[name])]
        options.print_json({"name": name, "ranks": ranks, "rows": steps})
    else:
        echo(render_ring(ranks, _RINGS[name]))


def _find(name: str, ranks: int | None, microbatches: int | None, chunks: int | None) -> Schedule:
    if name in SCHEDULE_NAMES or not (name.endswith(".csv") or Path(name).exists()):
        ranks, microbatches = ranks or 4, microbatches or 8
        if 3 * ranks * microbatches * (chunks or 1) > _MOST_ACTIONS:
            what = f"{ranks} stages and {microbatches} microbatches with {chunks or 1} chunks make a very large grid"
            rule = f"at most {_MOST_ACTIONS} actions are shown"
            raise UsageError(f"{what}\n  {rule}\n  show a smaller one with the same ratio")
        if name not in SCHEDULE_NAMES:
            fix = did_you_mean(name, known := (*SCHEDULE_NAMES, *_RINGS), cutoff=0.4)
            raise UsageError(f"there is no schedule {name!r}\n  known are {', '.join(known)}\n  {fix}".rstrip())
        return make_schedule(name, ranks, microbatches, chunks)
    asked = {"--stages": ranks, "--microbatches": microbatches, "--chunks": chunks}
    if given := [option for option, value in asked.items() if value]:
        raise UsageError(f"{', '.join(given)} beside {name}\n  the file says it\n  leave {given[0]} out")
    return read_csv(Path(name))


def _read_costs(text: str | None, communication: float, found: Schedule) -> ScheduleCosts | None:
    """Reads ``1,1.5:3,2:2:1``: a stage's forward; with its backward; or with the two parts of that."""
    if text is None:
        return replace(equal_costs(found), communication=communication)
    stages = []
    for stage, part in enumerate(text.split(",")):
        try:
            numbers = [float(number) for number in part.split(":")]
        except ValueError:
            numbers = []
        match numbers:
            case [forward]:
                inputs = weights = forward
            case [forward, backward]:
                inputs = weights = backward / 2
            case [forward, inputs, weights]:
                pass
            case _:
                what = f"--costs: {part!r} for stage {stage} is not a cost"
                rule = "it is forward, forward:backward or forward:input:weights"
                raise UsageError(f"{what}\n  {rule}\n  for four stages, the last one slower, write --costs 1,1,1,1.5:3")
        stages.append(StageCost(forward=forward, backward_input=inputs, backward_weight=weights))
    return ScheduleCosts(stages=tuple(stages), communication=communication)
