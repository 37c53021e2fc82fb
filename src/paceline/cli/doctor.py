"""``paceline doctor``: whether ranks can run and talk on this machine, and what to do where they cannot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.options import Overrides, print_json, tells_for_host
from paceline.errors import ConfigError, PacelineError, UsageError
from paceline.terminal import echo, plain

if TYPE_CHECKING:
    from paceline.doctor.findings import DoctorInputs, MachineCheck, MachineFinding

_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


def doctor(
    config: Path = typer.Argument(None, metavar="CONFIG", help="A YAML file: checks the machine for this run too."),
    overrides: Overrides = None,
    quick: bool = typer.Option(False, "--quick", help="Start no ranks, and compile nothing."),
    ranks: int = typer.Option(0, min=0, help="Also test so many ranks; under torchrun, those that it started."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Check this machine: what is there, and what to do about it.

    Looks at Python, torch, GPUs and whether they reach one another, cores, memory, shared memory, files, disk and
    clock; at network interfaces, this host's name (a common cause of ranks that hang) and ports; and at all
    variables of NCCL and Gloo, exported or in the config. Two ranks are started that talk through Gloo.

    Leaves with exit code 1 if there is a problem, and 0 if there are only notes.

    Examples:

      paceline doctor

      paceline doctor configs/digits.yaml parallel.ranks=4

      NCCL_DEBUG=INFO paceline doctor --quick --json

      paceline doctor --ranks 4

      torchrun --nnodes 2 --nproc-per-node 8 -m paceline doctor --quick --ranks 16
    """
    from paceline.doctor.findings import examine, missing_packages

    findings = missing_packages()
    if not findings:
        surroundings, findings = _surroundings(config, overrides or [], is_quick=quick)
        reports = os.environ.get("RANK", "0") == "0" or (not ranks and tells_for_host())
        if reports:
            findings += examine(_checks(), surroundings)
        if ranks:
            findings += _test_ranks(ranks)
        if not reports:
            return  # one rank of each host does, and of those that talk the first
    is_well = all(each.status != "problem" for each in findings)
    if as_json:
        print_json({"ok": is_well, "findings": [asdict(each) for each in findings]})
    else:
        _print(findings)
    raise typer.Exit(0 if is_well else 1)


def _surroundings(
    path: Path | None, overrides: list[str], *, is_quick: bool
) -> tuple[DoctorInputs, list[MachineFinding]]:
    """Reads the config, if there is one; its problems are findings, and the machine is looked at all the same."""
    from paceline.config import load_config
    from paceline.doctor.findings import DoctorInputs
    from paceline.doctor.network import problem_finding

    inputs = DoctorInputs(environment=dict(os.environ), is_quick=is_quick)
    if path is None:
        return inputs, []
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        return inputs, [problem_finding("config", problem) for problem in error.problems]
    return replace(inputs, config=config, runs=Path(config.monitor.folder)), []


def _checks() -> list[MachineCheck]:
    from paceline.doctor import machine, network, self_test

    return [
        *(machine.python, machine.torch_build, machine.driver, machine.gpus, machine.processors, machine.memory),
        machine.half_precision,
        *(machine.shared_memory, machine.compiler, machine.open_files, machine.locked_memory, machine.disk),
        *(machine.packages, network.launcher, network.interfaces, network.host_name, network.chosen_interfaces),
        network.ports,
        *(network.listening, network.variables, network.nccl_files, network.run, self_test.handshake),
    ]


def _test_ranks(ranks: int) -> list[MachineFinding]:
    """Lets ranks talk: new ones on this host, or those of a launcher, of which this process is one."""
    from paceline.comm.torch_dist import connect, disconnect
    from paceline.doctor.self_test import PATIENCE_S, failed_test, report_findings, self_test
    from paceline.run.processes import run_processes

    try:
        if "RANK" not in os.environ:
            return list(report_findings(run_processes(self_test, ranks, timeout_s=PATIENCE_S)[0]))
        comm = connect(timeout_s=PATIENCE_S)
        if comm.size != ranks:
            raise UsageError(f"--ranks {ranks}, and the launcher started {comm.size}\n  give the number that it starts")
        reports = self_test(comm)
        disconnect()
        return list(report_findings(reports))
    except PacelineError as error:
        return [failed_test(error)]


def _print(findings: Sequence[MachineFinding]) -> None:
    width = max(len(each.name) for each in findings)
    for each in findings:
        typer.secho(f"{each.status:<9}", nl=False, bold=each.status == "problem", fg=_COLOURS[each.status])
        echo(f"{each.name:<{width}}  {each.found}")
        for line in (each.meaning, f"fix: {each.fix}" if each.fix else ""):
            if line:
                typer.secho(" " * (width + 11) + plain(line), dim=True)
    counts = {status: sum(each.status == status for each in findings) for status in ("problem", "note")}
    counted = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items() if count]
    echo(f"\n{', '.join(counted) or 'nothing is wrong'}")
