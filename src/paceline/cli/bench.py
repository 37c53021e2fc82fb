"""``paceline bench``: ours beside the best of the others, interleaved in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

app = typer.Typer(no_args_is_help=True, help="Time ours beside the best of the others, interleaved in one run.")


@app.callback()
def _root() -> None:
    """Keeps ``bench`` a group while it has one verb."""


@app.command()
def engines(
    models: str = typer.Option(None, help="Comma-separated: mlp, gpt-11m on a CPU; gpt-124m, gpt-1.1b on CUDA."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    ranks: int = typer.Option(2, help="Gloo ranks on a CPU, beside world size 1.", min=2),
    rounds: int = typer.Option(None, help="Rounds in which every arm takes a turn.", min=2),
    output: Path = typer.Option(None, help="Also write the record to this file."),
    as_json: bool = typer.Option(False, "--json", help="Print the record as JSON."),
) -> None:
    """Time one training step of ours and of torch DDP, and of the plain loop at world size 1.

    The arms take turns in one run; the ratio to the baseline is what counts.

    Examples:

      paceline bench engines --json

      paceline bench engines --models mlp --rounds 100 --output bench/results/engines-cpu.json

      paceline bench engines --device cuda --models gpt-124m,gpt-1.1b
    """
    import dataclasses
    import sys

    import torch

    from paceline.bench.engines import CPU_WORKLOADS, CUDA_WORKLOADS, bench_alone, bench_ranks
    from paceline.bench.record import make_record
    from paceline.errors import UsageError

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"--device {device} is not here\n  use cpu, or cuda on a machine with a GPU")
    known = CUDA_WORKLOADS if device == "cuda" else CPU_WORKLOADS
    wanted = models.split(",") if models else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"--models {','.join(unknown)}: on {device} they are {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    protocols = {}
    for name in wanted:
        workload, protocol = known[name]
        if rounds:
            protocol = dataclasses.replace(protocol, rounds=rounds)
        protocols[name] = dataclasses.asdict(protocol)
        if device == "cpu":
            typer.echo(f"{name} on {ranks} Gloo ranks ...", err=True)
            rows += bench_ranks(workload, protocol, ranks)
        typer.echo(f"{name} at world size 1 ...", err=True)
        rows += bench_alone(workload, protocol, torch.device(device))
    command = _command(sys.argv)
    record = make_record("engines", command, rows, {"device": device, "protocols": protocols})
    if output is not None:
        record.write(output)
    if as_json:
        typer.echo(record.to_json())
    else:
        _show(rows)


@app.command()
def loop(
    rounds: int = typer.Option(None, help="Rounds in which both arms take a turn.", min=2),
    ranks: int = typer.Option(2, help="Gloo ranks with one thread each.", min=1),
    output: Path = typer.Option(None, help="Also write the record to this file."),
    as_json: bool = typer.Option(False, "--json", help="Print the record as JSON."),
) -> None:
    """Time what the trainer adds to a bare step: timing, records, TensorBoard, hooks.

    Example:  paceline bench loop --rounds 300
    """
    import dataclasses
    import sys

    from paceline.bench.loop import PROTOCOLS, bench_loop
    from paceline.bench.record import make_record

    rows: list[dict[str, Any]] = []
    protocols = {}
    for name, protocol in PROTOCOLS.items():
        if rounds:
            protocol = dataclasses.replace(protocol, rounds=rounds)
        protocols[name] = dataclasses.asdict(protocol)
        typer.echo(f"{name} ...", err=True)
        rows += bench_loop(name, protocol, ranks)
    command = _command(sys.argv)
    record = make_record("loop", command, rows, {"device": "cpu", "protocols": protocols})
    if output is not None:
        record.write(output)
    if as_json:
        typer.echo(record.to_json())
    else:
        _show([{**row, "items_per_s": 1e3 / row["median_ms"]} for row in rows])


def _command(argv: list[str]) -> str:
    """Returns the command to repeat a measurement: what was typed, less where the record went."""
    words = argv[1:]
    if "--output" in words:
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    return " ".join(["paceline", *words])


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("model", "ranks", "arm"):
        table.add_column(title)
    for title in ("step", "spread", "ratio", "quartiles", "items/s"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["ranks"]),
            row["arm"],
            f"{row['median_ms']:.2f} ms",
            f"{row['spread_ms']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}",
            f"{row['items_per_s']:,.0f}",
        )
    Console().print(table)
