"""``paceline verify``: the proof that a distributed run computes what one process would."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.parity.certificate import Certificate

# Small enough for seconds, rich enough to have several buckets, norms, ties and convolutions.
BUILT_IN: dict[str, dict[str, Any]] = {
    "mlp": {"model": {"kind": "mlp", "hidden_dim": 64}, "data": {"kind": "digits"}},
    "gpt": {
        "model": {"kind": "gpt", "size": "gpt-nano", "context": 32, "kv_heads": 2, "heads": 4, "tied": True},
        "data": {"kind": "synthetic_tokens", "samples": 256, "vocab_size": 64, "context": 32},
    },
    "resnet": {
        "model": {"kind": "resnet", "depth": 18, "width": 8, "norm": "group", "stem": "small"},
        "data": {"kind": "synthetic_images", "samples": 256, "size": 16},
    },
}


def verify(
    config: str = typer.Argument("mlp", help="A YAML file, or a built-in case: mlp, gpt, resnet."),
    overrides: list[str] = typer.Argument(None, metavar="[SECTION.KEY=VALUE]...", help="Changes to the config."),
    strategy: str = typer.Option("ddp", help="The strategy to verify."),
    ranks: int = typer.Option(4, help="How many ranks.", min=1),
    steps: int = typer.Option(3, help="Optimizer steps to compare.", min=1),
    accumulate: int = typer.Option(1, help="Microbatches a step.", min=1),
    clip: float = typer.Option(1.0, help="Largest global gradient norm; 0: no clipping.", min=0.0),
    batch: int = typer.Option(None, help="Global batch; by default a ragged one.", min=1),
    backend: str = typer.Option("virtual", help="virtual: threads of this process; gloo: real processes."),
    tolerance: float = typer.Option(1e-10, help="Largest difference allowed, in float64."),
    model: str = typer.Option(None, "--model", help="The same as the argument CONFIG."),
    as_json: bool = typer.Option(False, "--json", help="Print the certificate as JSON."),
) -> None:
    """Prove that training on N ranks computes what one process would.

    Trains the same model on the same data twice, in float64: in one process on whole batches, and on N ranks with the
    batch cut unevenly. Compares loss, every gradient, the clip norm and the parameters after each step. Leaves with
    exit code 1 on a mismatch, naming the first module and step that diverge.

    Examples:

      paceline verify gpt --ranks 4 --accumulate 3

      paceline verify configs/digits.yaml --backend gloo --ranks 2 --json
    """
    import json

    from paceline.errors import UsageError
    from paceline.parity.case import ConfigCase
    from paceline.parity.certificate import certify
    from paceline.parity.runs import Settings

    if backend not in ("virtual", "gloo"):
        raise UsageError(f"--backend {backend} is unknown\n  it is virtual or gloo")
    loaded = _load(model or config, overrides or [])
    size = batch or 2 * ranks * accumulate + 1  # one over: no two shares weigh the same
    settings = Settings(strategy=strategy, ranks=ranks, steps=steps, accumulate=accumulate, clip=clip or None)
    case = ConfigCase(loaded, batch=size)
    certificate = certify(case, settings, backend=backend, tolerance=tolerance)  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps({"case": model or config, **certificate.to_json()}, indent=2))
    else:
        _show(certificate, model or config)
    if not certificate.passed:
        raise typer.Exit(1)


def _load(name: str, overrides: list[str]) -> Config:
    from paceline.config import config_from_dict, load_config

    if name in BUILT_IN and not Path(name).exists():
        values = {**BUILT_IN[name], "name": f"verify-{name}", "train": {"dtype": "float64"}}
        return config_from_dict(_with_overrides(values, overrides), source=f"the built-in case {name}")
    if not name.endswith((".yaml", ".yml")) and not Path(name).exists():
        import difflib

        from paceline.errors import UsageError

        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{name} is neither a file nor a built-in case ({', '.join(BUILT_IN)}){hint}")
    return load_config(Path(name), [*overrides, "train.dtype=float64"])


def _with_overrides(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Puts overrides on a built-in case by way of a file, so that they are read and checked as everywhere."""
    if not overrides:
        return values
    import tempfile

    import yaml

    from paceline.config import load_config

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return load_config(path, overrides).model_dump(mode="json")


def _show(certificate: Certificate, name: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    verdict = "[bold green]passed[/]" if certificate.passed else "[bold red]FAILED[/]"
    what = f"{certificate.strategy} on {certificate.ranks} {certificate.backend} ranks against one process"
    console.print(f"{verdict}   {name}: {what}")
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    for quantity in ("loss", "gradients", "norm", "parameters"):
        table.add_row(quantity, f"{getattr(certificate.errors, quantity):.2e}")
    console.print("largest difference:")
    console.print(table)
    console.print(
        f"{certificate.steps} steps, {certificate.batch} samples a batch, {certificate.accumulate} microbatches, "
        f"clip {certificate.clip}, {certificate.num_parameters:,} parameters, float64, "
        f"tolerance {certificate.tolerance:g}, {certificate.seconds:.1f} s",
        highlight=False,
    )
    if certificate.divergence is not None:
        console.print(f"first divergence: {certificate.divergence}", highlight=False)
