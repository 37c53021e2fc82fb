"""``paceline chaos``: a run with faults, on the recovery path of every run, and what it cost."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.options import ConfigPath, Overrides, grouped, print_json
from paceline.errors import UsageError
from paceline.health.exit_codes import REFUSED
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.chaos.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What goes wrong, and how the run is judged."""

    faults: str = typer.Option(None, metavar="KIND:rank=R@step=S,...", help="What goes wrong; see docs/chaos.md.")
    random: int = typer.Option(0, min=0, help="So many faults instead, drawn by --seed.")
    seed: int = typer.Option(0, help="Says at which byte or bit, and which random faults.")
    backend: str = typer.Option(
        None, metavar="virtual|gloo", help="Ranks in one process, or one each; else the config's."
    )
    compare: bool = typer.Option(False, "--compare", help="Train undisturbed too, and compare every loss.")
    mtbf: float = typer.Option(None, min=1e-6, help="Hours between failures to recommend for; else as in this run.")


@grouped
def chaos(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    asked: ChaosOptions,
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Train with faults, recover, and report what that cost."""
    from paceline.chaos.experiment import plan_faults, prepare_run, run_with_faults
    from paceline.chaos.faults import parse_faults
    from paceline.config.load import load_config_with_sources
    from paceline.run.scratch import scratch_folder
    from paceline.run.warm import CPU_RANKS

    if (asked.faults is None) == (asked.random == 0):
        raise UsageError("--faults or --random\n  one of them says what goes wrong\n  try --faults kill:rank=1@step=20")
    changes = [*(overrides or []), *_backend(asked.backend)]
    run = prepare_run(
        load_config_with_sources(config, changes),
        config,
        changes,
        num_faults=asked.random if asked.faults is None else len(parse_faults(asked.faults)),
        may_hang=asked.faults is None or "hang" in asked.faults or "stop" in asked.faults,
        ranks=CPU_RANKS,
        environment=os.environ,
        say=lambda text: echo(f"chaos: {text}", err=True),
    )
    plan = plan_faults(run, asked.faults, num_random=asked.random, seed=asked.seed)
    mtbf_s = None if asked.mtbf is None else asked.mtbf * 3600.0
    with scratch_folder() as scratch:
        report = run_with_faults(run, plan, scratch, seed=asked.seed, compare=asked.compare, mtbf_s=mtbf_s)
    if report is None:
        raise typer.Exit(REFUSED)
    _show(report, run.folder, as_json=as_json)
    raise typer.Exit(0 if report.is_good else 1)


def _backend(name: str | None) -> list[str]:
    if name is None:
        return []
    if name not in ("virtual", "gloo"):
        raise UsageError(
            f"--backend {name}\n  ranks are threads of one process, or processes\n  choose virtual or gloo"
        )
    return [f"comm.backend={name}", "parallel.device=cpu"]


def _show(report: Report, folder: Path, *, as_json: bool) -> None:
    from paceline.chaos.report import report_lines

    if as_json:
        print_json(report.to_json())
        return
    echo("")
    for line in report_lines(report):
        echo(line)
    verdict = "every fault was handled as its policy says" if report.is_good else "not everything was handled"
    echo(f"\n{verdict}; the run is in {folder}")
