"""``paceline calibrate``: measure the present device, and write it down as an entry of the catalog."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.destination import check_file
from paceline.cli.options import grouped, print_json
from paceline.errors import UsageError
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.calibrate.machine import MachineFigures


def _check_entry(path: Path | None) -> Path | None:
    """Returns the path of an entry to write. Raises UsageError for one that no --cluster would read."""
    path = check_file(path)
    if path is not None and path.suffix not in (".yaml", ".yml"):
        raise UsageError(
            f"--output {path} does not end in .yaml\n  --cluster and PACELINE_MACHINE take files by that ending\n"
            f"  write to {path.with_suffix('.yaml')}"
        )
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What is measured, and where it is written."""

    device: str = typer.Option("auto", help="cpu or cuda.  [default: cuda where there is a GPU]")
    ranks: int | None = typer.Option(None, min=1, help="Ranks that compute at once.  [default: one a GPU; 1 on a CPU]")
    name: str | None = typer.Option(None, help="The entry's name.  [default: after the device]")
    output: Path | None = typer.Option(
        None, "--output", "-o", callback=_check_entry, metavar="FILE.yaml", help="Write the entry to this file."
    )
    compiled: bool = typer.Option(True, help="Also measure launches of a compiled block: half a minute more.")
    noisy: bool = typer.Option(False, "--noisy", help="Take what was measured, however much it spreads.")


@grouped
def calibrate(
    *,
    asked: CalibrateOptions,
    as_json: bool = typer.Option(False, "--json", help="Print what was measured as JSON."),
    run: Path | None = typer.Option(
        None, "--from", metavar="RUN", help="Measure nothing: fit an entry to a finished run's folder."
    ),
    cluster: Path | None = typer.Option(
        None, metavar="FILE.yaml", help="The entry that --from fits.  [default: the catalog's cpu-host]"
    ),
) -> None:
    """Measure this machine, so that steps on it can be predicted."""
    given = {"--device": asked.device != "auto", "--ranks": asked.ranks is not None, "--name": asked.name is not None}
    given |= {"--no-compiled": not asked.compiled, "--noisy": asked.noisy, "--cluster": cluster is not None}
    _check_options(run, {option for option, is_given in given.items() if is_given}, asked.name)
    if run is not None:
        _refit(run, cluster, asked.output, as_json=as_json)
        return
    import torch

    from paceline.calibrate.entry import entry_of, write_entry
    from paceline.calibrate.machine import Wanted, check_wanted, measure_machine

    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if asked.device == "auto" else asked.device
    count = asked.ranks or (max(1, torch.cuda.device_count()) if chosen == "cuda" else 1)
    more = (2 * count,) if chosen == "cpu" and count > 1 else ()
    wanted = Wanted(
        device=chosen, ranks=count, with_compiled=asked.compiled, accepts_noise=asked.noisy, more_ranks=more, alone=True
    )
    check_wanted(wanted)
    if not as_json:
        echo(f"measuring {count} {'rank' if count == 1 else 'ranks'} on {chosen}, for about a minute", err=True)
    measured = measure_machine(wanted)
    command = f"paceline calibrate --device {chosen} --ranks {count}{'' if asked.compiled else ' --no-compiled'}"
    entry_name, text = entry_of(measured, command, torch.__version__, asked.name)
    if asked.output is not None:
        write_entry(text, asked.output)
    if as_json:
        print_json({"name": entry_name, **asdict(measured)})
        return
    _show(measured)
    echo(
        f"\n{text}" if asked.output is None else f"\nwrote {asked.output}: use it as --cluster {asked.output}\n",
        nl=False,
    )


def _check_options(run: Path | None, given: set[str], name: str | None) -> None:
    """Raises UsageError for options that nobody would read, and for a name that is none."""
    if run is None and "--cluster" in given:
        raise UsageError(
            "--cluster without --from\n  what is measured starts from no entry\n  name a run to fit it to: --from RUN"
        )
    unread = sorted(given - {"--cluster"})
    if run is not None and unread:
        raise UsageError(
            f"{', '.join(unread)} beside --from {run}\n  a run has its ranks and its device, and nothing is measured\n"
            f"  leave out {' and '.join(unread)}, or --from"
        )
    if name is not None and not any(letter.isalnum() for letter in name):
        raise UsageError(
            f"--name {name!r}\n  an entry is found by the letters and digits of its name\n  try --name my-host"
        )


def _refit(run: Path, base: Path | None, output: Path | None, *, as_json: bool) -> None:
    from paceline.calibrate.entry import write_entry
    from paceline.calibrate.refit import refit, to_json
    from paceline.cluster.detect import detect_machine

    found = refit(run, detect_machine(), base)
    if output is not None:
        write_entry(found.text, output)
    if as_json:
        print_json(to_json(found))
        return
    echo(f"measured          {1e3 * found.measured_s:10.4g} ms a step")
    for name, seconds in (("before", found.before_s), ("fitted", found.after_s)):
        echo(f"{name:<17} {1e3 * seconds:10.4g} ms predicted: {100 * found.error(seconds):+.1f} %")
    echo(f"kernels           {found.compute:10.4g} times what the entry said")
    echo(f"collectives       {found.communication:10.4g} times")
    for doubt in found.doubts():
        echo(f"paceline: doubtful: {doubt}", err=True)
    if output is None:
        echo(f"\n{found.text}", nl=False)
    else:
        echo(f"\nwrote {output}: use it as --cluster {output}, or for all runs here: PACELINE_MACHINE={output}")


def _show(measured: MachineFigures) -> None:
    from paceline.calibrate.entry import best_rates

    kernels = measured.kernels
    for dtype, rate in best_rates(kernels.rates).items():
        echo(f"products in {dtype:<5} {rate / 1e12:10.4g} TFLOP/s at most")
    attention = [rate.flops for rate in kernels.rates if rate.kind == "attention"]
    if attention:
        echo(f"attention         {max(attention) / 1e12:10.4g} TFLOP/s at most")
    echo(f"memory            {kernels.memory_bandwidth / 1e9:10.4g} GB/s")
    echo(f"launch, eager     {kernels.launch_s * 1e6:10.4g} us")
    if kernels.compiled_launch_s is not None:
        echo(f"launch, compiled  {kernels.compiled_launch_s * 1e6:10.4g} us")
    for kind, link in measured.links.items():
        shown = f"{link.bandwidth / 1e9:10.4g} GB/s, {link.latency_s * 1e6:.4g} us a hop"
        echo(f"{kind:<17} {shown}; the fit is off by {100 * link.worst:.0f} % at worst")
    echo(f"samples spread    {100 * measured.spread:10.1f} %")
