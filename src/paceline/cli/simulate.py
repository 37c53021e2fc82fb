"""``paceline simulate``: the training of a config on virtual ranks, timed by their clocks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import ConfigPath, NoMemoryCheck, Overrides, check_file, load_and_tell, print_json
from paceline.errors import RunFolderError, UsageError
from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.records.report import RunSummary
    from paceline.rehearse.simulate.run import Conditions, Simulation

_SLOW = re.compile(r"^(rank|link)=(\d+):(\d+(?:\.\d*)?|\.\d+)x?$")
_UNUSED = ("checkpoints", "logs")  # of a run's folder
_MARK = "simulation.json"  # what tells a simulation's folder from a run's: it may be replaced


def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    ranks: int = typer.Option(None, min=1, help="Virtual ranks; else parallel.ranks, or 4."),
    cluster: str = typer.Option(None, help='Whose network they have: "4x dgx-h100"; else processes of one host.'),
    slow: list[str] = typer.Option([], metavar="rank=2:1.5x", help="A slow rank, or link=2:3x; may be repeated."),
    compute: str = typer.Option("measured", help="measured here, or modelled for the cluster's device."),
    device: str = typer.Option(None, help="Where to compute: cpu, or one GPU that all ranks share (cuda)."),
    trace: Path = typer.Option(None, callback=check_file, help="Write the time line here too, for ui.perfetto.dev."),
    force: bool = typer.Option(False, "--force", help="Replace a run's folder of the same name."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON, and no progress."),
    no_memory_check: NoMemoryCheck = False,
) -> None:
    """Train on virtual ranks, with the times of other machines."""
    changes = [*(overrides or []), *([] if ranks is None else [f"parallel.ranks={ranks}"])]
    loaded = load_and_tell(config, changes).config
    slow_ranks, slow_links = read_slow(slow)
    from paceline.cluster.devices import load_cluster
    from paceline.rehearse.simulate.run import Conditions, prepare

    where = None if cluster is None else load_cluster(cluster)
    settled = prepare(loaded, ranks=ranks, device=device, source=str(config), cluster=where)
    if not no_memory_check:
        from paceline.run.decide import check_virtual

        check_virtual(settled)
    conditions = Conditions(
        cluster=where,
        backend=loaded.comm.backend,
        compute=compute,  # type: ignore[arg-type]
        slow=slow_ranks,
        slow_links=slow_links,
    )
    _run(settled, conditions, trace=trace, force=force, as_json=as_json)


def read_slow(texts: list[str]) -> tuple[dict[int, float], dict[int, float]]:
    """Reads ``rank=2:1.5x`` and ``link=0:3x``. Raises UsageError for anything else."""
    found: dict[str, dict[int, float]] = {"rank": {}, "link": {}}
    for text in texts:
        match = _SLOW.match(text.replace(" ", ""))
        if match is None or float(match[3]) <= 0:
            raise UsageError(
                f"--slow {text}\n  it names a rank or a link, and how many times as long it takes\n"
                "  write --slow rank=2:1.5x or --slow link=0:3x"
            )
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
    error = find_write_error(folder.parent)
    if error is not None:
        raise RunFolderError(
            f"cannot make the run's folder {folder}: {error.strerror or error}\n  it is made when training is over\n"
            "  set monitor.folder=... elsewhere"
        )
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
        _show(found, summarize(folder), as_json=as_json)


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


def _show(found: Simulation, summary: RunSummary, *, as_json: bool) -> None:
    from paceline.records.report import render
    from paceline.rehearse.simulate.recording import LEGEND, draw_step
    from paceline.terminal import new_console

    if as_json:
        print_json(summary.to_json() | {"simulation": describe(found)})
        return
    console = new_console()
    console.print(render(summary))
    drawn = draw_step(found.clocks, found.steps)
    totals = found.summary
    hidden = sum(each.hidden_share for each in totals.by_rank) / len(totals.by_rank)
    memory = "Memory is not known: the model is of your own code. paceline predict counts it."
    if any(getattr(record, "memory_bytes", 0) for record in found.records[0]):  # of a rank: all share one process
        gpu = found.conditions.gpu or "this device"
        memory = f"Memory is estimated for {gpu}, as the upper bound of paceline predict is."
    lines = [
        "",
        f"the last step on the clocks of the ranks; a median step takes {format_seconds(totals.step_s)}",
        *drawn,
        LEGEND,
        "",
        f"Ranks compute {100 * totals.efficiency:.0f}% of the time; {100 * hidden:.0f}% of communication is hidden.",
        f"Times are simulated: {_where(found.conditions)}.",
        memory,
        f"The run is in {summary.folder}: records, trace.json for ui.perfetto.dev, config.",
    ]
    console.print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)


def _where(conditions: Conditions) -> str:
    """Says in a few words what the times are those of."""
    cluster = conditions.cluster
    network = "processes of one host" if cluster is None else cluster.name
    compute = "compute as measured here" if conditions.compute == "measured" else f"compute of {conditions.rates.name}"
    slow = [f"rank {rank} {factor:g} x slower" for rank, factor in conditions.slow.items()]
    slow += [f"the link of rank {rank} {factor:g} x slower" for rank, factor in conditions.slow_links.items()]
    network += "" if conditions.backend in ("auto", "virtual") else f" over {conditions.backend}"
    return ", ".join([compute, f"network of {network}", *slow])
