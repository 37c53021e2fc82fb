"""``paceline calibrate``, ``cluster`` and ``doctor``: what machines are, and whether this one is fit for runs."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import Overrides, check_entry, print_json, tells_for_host, write_output
from paceline.errors import ConfigError, PacelineError, UsageError
from paceline.terminal import echo, plain
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.calibrate.doubts import Halved
    from paceline.calibrate.entry import Refit
    from paceline.calibrate.machine import MachineFigures
    from paceline.cluster.devices import Cluster
    from paceline.doctor.findings import MachineCheck, MachineFinding


def calibrate(
    overrides: Overrides = None,
    *,
    device: str = typer.Option("auto", help="cpu or cuda.  [default: cuda where there is a GPU]"),
    ranks: int | None = typer.Option(None, min=1, help="Ranks that compute at once.  [default: one a GPU; 1 on a CPU]"),
    name: str | None = typer.Option(None, help="The entry's name.  [default: after the device]"),
    output: Path | None = typer.Option(
        None, "--output", "-o", callback=check_entry, metavar="FILE.yaml", help="Write the entry to this file."
    ),
    compiled: bool = typer.Option(True, help="Also measure launches of a compiled block: half a minute more."),
    noisy: bool = typer.Option(False, "--noisy", help="Take what was measured, however much it spreads."),
    as_json: bool = typer.Option(False, "--json", help="Print what was measured as JSON."),
    run: Path | None = typer.Option(None, "--from", metavar="RUN", help="Measure nothing: fit an entry to a run."),
    config: Path | None = typer.Option(None, "--for", metavar="CONFIG", help="Halve the doubt about a step of it."),
    cluster: Path | None = typer.Option(
        None, metavar="FILE.yaml", help="The entry that --from and --for begin with.  [default: the catalog's]"
    ),
) -> None:
    """Measure this machine, so that steps on it can be predicted."""
    given = {"--device": device != "auto", "--ranks": ranks is not None, "--name": name is not None}
    given |= {"--no-compiled": not compiled, "--noisy": noisy, "--cluster": cluster is not None}
    _check_options(run, config, {option for option, is_given in given.items() if is_given}, name)
    if config is not None:
        _halve_doubt(config, overrides or [], cluster, output, as_json=as_json)
        return
    if overrides:
        raise UsageError(f"{' '.join(overrides)} without a config\n  they are changes of one\n  name it: --for CONFIG")
    if run is not None:
        _refit(run, cluster, output, as_json=as_json)
        return
    import torch

    from paceline.calibrate.entry import entry_of
    from paceline.calibrate.machine import Wanted, check_wanted, measure_machine

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    count = ranks or (max(1, torch.cuda.device_count()) if device == "cuda" else 1)
    more = (2 * count,) if device == "cpu" and count > 1 else ()
    how: Any = {"with_compiled": compiled, "accepts_noise": noisy, "alone": True}
    wanted = Wanted(device=device, ranks=count, more_ranks=more, **how)
    check_wanted(wanted)
    if not as_json:
        echo(f"measuring {count} {'rank' if count == 1 else 'ranks'} on {device}, for about a minute", err=True)
    measured = measure_machine(wanted)
    command = f"paceline calibrate --device {device} --ranks {count}{'' if compiled else ' --no-compiled'}"
    entry_name, text = entry_of(measured, command, torch.__version__, name)
    if output is not None:
        write_output(output, text, "entry")
    if as_json:
        print_json({"name": entry_name, **asdict(measured)})
        return
    _show_measured(measured)
    wrote = f"wrote {output}: use it as --cluster {output}\n"
    echo(f"\n{text if output is None else wrote}", nl=False)


def _check_options(run: Path | None, config: Path | None, given: set[str], name: str | None) -> None:
    if run is not None and config is not None:
        raise UsageError("--from beside --for\n  an entry is fitted to a run, or measured for a config\n  take one")
    if run is None and config is None and "--cluster" in given:
        rule = "it is what is fitted to a run, or what is measured for a config goes into"
        raise UsageError(f"--cluster without --from or --for\n  {rule}\n  name one: --from RUN or --for CONFIG")
    unread = sorted(given - {"--cluster"})
    if (run is not None or config is not None) and unread:
        fix, what = f"leave out {' and '.join(unread)}", f"--from {run}" if config is None else f"--for {config}"
        rule = "nothing is measured" if config is None else "the config says what is measured"
        raise UsageError(f"{', '.join(unread)} beside {what}\n  {rule}\n  {fix}, or {what.split()[0]}")
    if name is not None and not any(letter.isalnum() for letter in name):
        raise UsageError(f"--name {name!r}\n  it is found by the letters and digits of its name\n  try my-host")


def _refit(run: Path, base: Path | None, output: Path | None, *, as_json: bool) -> None:
    from paceline.calibrate.entry import refit
    from paceline.cluster.detect import detect_machine

    found = refit(run, detect_machine(), base)
    lines = [f"measured          {1e3 * found.measured_s:10.4g} ms a step"]
    for name, seconds in (("before", found.before_s), ("fitted", found.after_s)):
        lines.append(f"{name:<17} {1e3 * seconds:10.4g} ms predicted: {100 * found.error(seconds):+.1f} %")
    lines.append(f"kernels           {found.compute:10.4g} times what the entry said")
    lines.append(f"collectives       {found.communication:10.4g} times")
    _hand_out(found, lines, output, as_json=as_json)
    for doubt in () if as_json else found.doubts():
        echo(f"paceline: doubtful: {doubt}", err=True)


def _hand_out(found: Refit | Halved, lines: list[str], output: Path | None, *, as_json: bool) -> None:
    """Writes the entry or shows it, below what is told of it; or all of it as JSON."""
    if output is not None:
        write_output(output, found.text, "entry")
    if as_json:
        print_json(found.to_json())
        return
    wrote = f"wrote {output}: use it as --cluster {output}, or for all runs here: PACELINE_MACHINE={output}\n"
    echo("\n".join([*lines, "", found.text if output is None else wrote]), nl=False)


def _halve_doubt(path: Path, overrides: list[str], base: Path | None, output: Path | None, *, as_json: bool) -> None:
    from paceline.calibrate.doubts import halve_doubt
    from paceline.cluster.detect import detect_machine
    from paceline.config import Config, load_config
    from paceline.run.decide import decide_run
    from paceline.run.location import RunOptions
    from paceline.run.processes import machine_entry
    from paceline.run.train import train

    def run(config: Config, folder: Path) -> Path:
        changes = config.with_values("monitor", folder=str(folder)).with_values("checkpoint", at_end=False)
        result = train(changes, options=RunOptions(is_quiet=True))
        assert result is not None
        return result.folder

    config = decide_run(load_config(path, overrides), checks_memory=False).config
    machine = detect_machine(with_gpus=config.parallel.device == "cuda")
    tell = partial(echo, err=True)
    found = halve_doubt(config, machine, base or machine_entry(), tell, train=run)
    lines = [f"{'measured':<60} {'a step':>7} {'predicted':>12} {'measured':>12}"]
    for each in found.measured:
        times = f"{1e3 * each.predicted_s:9.4g} ms {1e3 * each.measured_s:9.4g} ms"
        lines.append(f"{each.name:<60} {each.count:>6}x {times}")
    lines.append("")
    for name, step in (("before", found.before), ("now", found.after)):
        told = f"{name:<7} {1e3 * step.seconds:10.4g} ms a step, of which {found.part} may be off by "
        lines.append(f"{told}{step.doubts[found.part] / step.seconds:.1%} of it")
    _hand_out(found, [*lines, f"next    {found.after.doubt}"], output, as_json=as_json)


def _show_measured(measured: MachineFigures) -> None:
    from paceline.calibrate.entry import best_rates

    kernels = measured.kernels
    for dtype, rate in best_rates(kernels.rates).items():
        echo(f"products in {dtype:<5} {rate / 1e12:10.4g} TFLOP/s at most")
    if attention := [rate.flops for rate in kernels.rates if rate.kind == "attention"]:
        echo(f"attention         {max(attention) / 1e12:10.4g} TFLOP/s at most")
    echo(f"memory            {kernels.memory_bandwidth / 1e9:10.4g} GB/s")
    echo(f"launch, eager     {kernels.launch_s * 1e6:10.4g} us")
    if kernels.compiled_launch_s is not None:
        echo(f"launch, compiled  {kernels.compiled_launch_s * 1e6:10.4g} us")
    for kind, link in measured.links.items():
        shown = f"{link.bandwidth / 1e9:10.4g} GB/s, {link.latency_s * 1e6:.4g} us a hop"
        echo(f"{kind:<17} {shown}; the fit is off by {100 * link.worst:.0f} % at worst")
    echo(f"samples spread    {100 * measured.spread:10.1f} %")


cluster_app = typer.Typer(no_args_is_help=True, help="List known machines, and show what one is made of.")


@cluster_app.command("ls")
def list_known(as_json: bool = typer.Option(False, "--json", help="Print the names as JSON.")) -> None:
    """List the devices, nodes and networks of the catalog."""
    from paceline.cluster.devices import Catalog
    from paceline.cluster.entries import shipped

    known = shipped()
    if as_json:
        print_json({kind: list(getattr(known, kind)) for kind in ("devices", "nodes", "networks", "links")})
        return
    echo(f"{'device':<20} {'memory':>10} {'bandwidth':>11} {'most':>18}  generation")
    for name in known.devices:
        device = Catalog().device(name)
        dtype = "fp32" if device.is_cpu else "bf16" if "bf16" in device.peak_flops else "fp16"
        rate = f"{device.ceiling(dtype) / 1e12:.4g} TFLOP/s"
        memory = f"{device.memory_bytes / 2**30:6.4g} GiB {device.memory_bandwidth / 1e9:6.4g} GB/s"
        echo(f"{name:<20} {memory} {rate:>13} {dtype}  {device.generation}")
    echo(f"\n{'node':<20} devices")
    for name, entry in known.nodes.items():
        node = Catalog().node(name)
        echo(f"{name:<20} {node.devices}x {node.device.name}, {node.inside.name}; {entry.network or 'no network'}")
    echo(f"\n{'network':<29} one way, a node")
    for name in known.networks:
        echo(f"{name:<29} {Catalog().network(name).bandwidth / 1e9:7.4g} GB/s")


@cluster_app.command()
def show(
    name: str | None = typer.Argument(None, metavar="NAME", help="Such as dgx-h100, or a file; none: this machine."),
    as_json: bool = typer.Option(False, "--json", help="Print it as JSON."),
) -> None:
    """Show a cluster: its devices, links and network. Without a name: this machine."""
    from paceline.cluster.detect import detect_cluster, detect_machine
    from paceline.cluster.devices import load_cluster

    detected = detect_cluster(detect_machine()) if name is None else None
    cluster = detected.cluster if detected is not None else load_cluster(str(name))
    if as_json:
        found: dict[str, Any] = {} if cluster is None else {**asdict(cluster), "devices": cluster.devices}
        if detected is not None:
            found |= {"machine": asdict(detected.machine), "assumed": list(detected.assumed)}
        print_json(found)
        return
    if detected is not None:
        machine = detected.machine
        gpus, memory = ", ".join(machine.gpus) or "no GPU", format_bytes(machine.memory_bytes)
        echo(f"this machine: {machine.processor}, {machine.cores} cores, {memory}, {gpus}")
        for line in detected.assumed:
            echo(f"  assumed: {line}")
    if cluster is not None:
        _show_cluster(cluster)


def _show_cluster(cluster: Cluster) -> None:
    device, inside, between = cluster.device, cluster.node.inside, cluster.between
    echo(f"{cluster.name}: {cluster.devices} devices, {cluster.nodes} x {cluster.node.devices} ({cluster.node.name})")
    echo(f"  device   {device.name}, {device.vendor} {device.generation}, {device.memory_bytes / 2**30:.4g} GiB")
    echo(f"  memory   {device.memory_bandwidth / 1e9:.4g} GB/s, of which kernels reach {device.memory_share:.0%}")
    for dtype, peak in device.peak_flops.items():
        most = device.matmul_ceiling.get(dtype)
        shown = f"{most / 1e12:.4g} measured" if most is not None else "not measured"
        echo(f"  {dtype:<8} {peak / 1e12:.4g} TFLOP/s dense, {shown}")
    echo(f"  launch   {device.launch_s * 1e6:.3g} us eager, {device.compiled_launch_s * 1e6:.3g} us compiled")
    one_way, ring = inside.bandwidth / 1e9, inside.ring_bandwidth(cluster.node.devices) / 1e9
    echo(f"  inside   {inside.name} ({inside.kind}): {one_way:.4g} GB/s one way, a ring reaches {ring:.4g}")
    if between is not None:
        echo(f"  between  {between.name}: {between.bandwidth / 1e9:.4g} GB/s one way per node")


_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


def doctor(
    config: Path = typer.Argument(None, metavar="CONFIG", help="A YAML file: checks the machine for this run too."),
    overrides: Overrides = None,
    quick: bool = typer.Option(False, "--quick", help="Start no ranks, and compile nothing."),
    ranks: int = typer.Option(0, min=0, help="Also test so many ranks; under torchrun, those that it started."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Check this machine: what is there, and what to do about it."""
    from paceline.doctor.findings import DoctorInputs, examine, missing_packages

    findings = missing_packages()
    if not findings:
        from paceline.config import load_config
        from paceline.doctor.network import problem_finding

        inputs = DoctorInputs(environment=dict(os.environ), is_quick=quick)
        try:
            loaded = None if config is None else load_config(config, overrides or [])
            inputs = inputs if loaded is None else replace(inputs, config=loaded, runs=Path(loaded.monitor.folder))
        except ConfigError as error:  # the machine is looked at all the same
            findings = [problem_finding("config", problem) for problem in error.problems]
        reports = os.environ.get("RANK", "0") == "0" or (not ranks and tells_for_host())
        if reports:
            findings += examine(_checks(), inputs)
        if ranks:
            findings += _test_ranks(ranks)
        if not reports:
            return  # one rank of each host does, and of those that talk the first
    is_well = all(each.status != "problem" for each in findings)
    if as_json:
        print_json({"ok": is_well, "findings": [asdict(each) for each in findings]})
        raise typer.Exit(0 if is_well else 1)
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
    raise typer.Exit(0 if is_well else 1)


def _checks() -> list[MachineCheck]:
    from paceline.doctor import machine, network, self_test

    return [
        *(machine.python, machine.torch_build, machine.driver, machine.gpus, machine.processors, machine.memory),
        *(machine.half_precision, machine.shared_memory, machine.compiler, machine.open_files, machine.locked_memory),
        *(machine.disk, machine.packages, network.launcher, network.interfaces, network.host_name),
        *(network.chosen_interfaces, network.ports, network.listening, network.variables, network.nccl_files),
        *(network.run, self_test.handshake),
    ]


def _test_ranks(ranks: int) -> list[MachineFinding]:
    """Lets ranks talk: new ones on this host, or those of a launcher, of which this process is one."""
    from paceline.comm.torch_dist import connect, disconnect
    from paceline.doctor.self_test import PATIENCE_S, failed_test, report_findings, self_test
    from paceline.run.function_ranks import run_processes

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
