"""``paceline verify``: the proof that a distributed run computes what one process would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import Overrides, print_json
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.plan.layout import Layout
    from paceline.verify.certificate import Certificate

# Small enough for seconds, rich enough to have several buckets and units, norms, ties and convolutions.
BUILT_IN: dict[str, dict[str, Any]] = {
    "mlp": {"model": {"kind": "mlp", "hidden_dim": 64}, "data": {"kind": "digits"}},
    "gpt": {
        "model": {"kind": "gpt", "size": "gpt-nano", "context": 32, "kv_heads": 2, "heads": 4, "tied": True},
        "data": {"kind": "synthetic_tokens", "samples": 256, "vocab_size": 64, "context": 32},
    },
    "resnet": {
        "model": {"kind": "resnet", "depth": 18, "width": 8, "norm": "batch", "stem": "small"},
        "data": {"kind": "synthetic_images", "samples": 256, "size": 16},
    },
}
# What the ranks compute in is an option of this verb; as built, the model is as exact as it can be.
_EXACT = {"dtype": "float64", "precision": "fp32"}


def verify(
    config: str | None = typer.Argument(
        None,
        metavar="CONFIG",
        help="A YAML file, or a built-in case: mlp, gpt, resnet. By default mlp; gpt for pipelines and tensors.",
    ),
    overrides: Overrides = None,
    strategy: str = typer.Option(None, help="ddp, zero1, zero2, zero3, fsdp or hybrid; by default the config's."),
    ranks: int = typer.Option(4, help="How many ranks."),
    shard_ranks: int = typer.Option(None, help="hybrid: ranks of a shard group; by default half of them."),
    steps: int = typer.Option(3, help="Optimizer steps to compare."),
    accumulate: int = typer.Option(1, "--accumulate", "--microbatches", help="Microbatches a step."),
    pipeline: int = typer.Option(None, help="Ranks that a pipeline of stages runs over; by default the config's."),
    tensor: int = typer.Option(None, help="Ranks that split each layer; by default the config's."),
    data: int = typer.Option(None, help="Ranks that share the batch; follows from the others."),
    schedule: str = typer.Option(None, help="gpipe, 1f1b, interleaved, zb-h1, zb-v, or a CSV file."),
    chunks: int = typer.Option(None, help="Stages on each rank of the pipeline, where the schedule takes several."),
    sequence_parallel: bool = typer.Option(False, "--sequence-parallel", help="tensor: split along the sequence too."),
    clip: str = typer.Option("1.0", help="Largest global gradient norm, or none."),
    precision: str = typer.Option("fp32", help="fp32 (verified in float64), bf16, bf16_master, fp16, fp8 or fp8_row."),
    checkpoint_activations: bool = typer.Option(False, "--checkpoint-activations", help="Compute blocks again."),
    checkpoint_policy: str = typer.Option(None, help="What is computed again: full, matmuls, every_2, ..."),
    batch: int = typer.Option(None, help="Global batch; by default a ragged one."),
    backend: str = typer.Option("virtual", help="virtual: threads of this process; gloo or shared_memory: processes."),
    tolerance: float = typer.Option(None, help="Largest difference allowed; by default as the precision needs."),
    model: str = typer.Option(None, "--model", help="The same as the argument CONFIG."),
    as_json: bool = typer.Option(False, "--json", help="Print the certificate as JSON."),
) -> None:
    """Prove that training on N ranks computes what one process would.

    Trains the same model on the same data twice: in one process, and on N ranks with the batch cut unevenly. Compares
    loss, every gradient, the clip norm, parameters and buffers after each step: in float64, or in mixed precision
    within the rounding of it. Leaves with exit code 1 on a mismatch, naming the first module and step that diverge.

    Examples:

      paceline verify gpt --strategy fsdp --ranks 4 --accumulate 3

      paceline verify resnet --strategy zero2 --precision bf16 --checkpoint-activations

      paceline verify gpt --pipeline 2 --tensor 2 --data 2 --strategy zero1 --ranks 8

      paceline verify configs/digits.yaml --backend gloo --ranks 2 --json
    """
    from paceline.verify.case import ConfigCase
    from paceline.verify.certificate import certify
    from paceline.verify.settings import Settings, check_settings, complete

    is_spread = any(degree is not None and degree > 1 for degree in (pipeline, tensor))
    name = model or config or ("gpt" if is_spread else "mlp")
    roomy = _with_room(name, pipeline or 1, tensor or 1, schedule or "", chunks)
    loaded = _load(name, [*roomy, *(overrides or [])])
    options: dict[str, Any] = {"pipeline": pipeline, "tensor": tensor, "data": data or 0, "chunks": chunks}
    options |= {"sequence_parallel": sequence_parallel or None, "accumulate": accumulate, "precision": precision}
    options["checkpoint_activations"] = checkpoint_policy or ("full" if checkpoint_activations else None)
    layout = _layout(loaded, strategy=strategy, schedule=schedule, shard_ranks=shard_ranks, **options)
    said = strategy or loaded.parallel.strategy
    settings = complete(Settings(layout=layout, strategy=said, ranks=ranks, steps=steps, clip=_clip_norm(clip)))
    check_settings(settings, backend=backend, tolerance=tolerance, batch=batch)
    size = batch or 2 * settings.data_ranks * accumulate + 1  # one over: no two shares weigh the same
    case = ConfigCase(loaded, batch=size, layers_as_blocks=name in BUILT_IN)
    certificate = certify(case, settings, backend=backend, tolerance=tolerance)  # type: ignore[arg-type]
    if as_json:
        print_json({"case": name, **certificate.to_json()})
    else:
        _show(certificate, name)
    if not certificate.passed:
        raise typer.Exit(1)


def _with_room(name: str, pipeline: int, tensor: int, schedule: str, chunks: int | None) -> list[str]:
    """Returns what makes the built-in GPT deep and wide enough for so many stages and ranks of a layer."""
    if name != "gpt":
        return []
    stages = pipeline * (chunks or (2 if schedule in ("interleaved", "zb-v") else 1))
    changes = [f"model.layers={stages}"] if stages > 4 else []
    if tensor > 2:
        width = tensor * 2 * -(-32 // tensor)  # at least 64; the features of a head are turned in pairs
        changes += [f"model.heads={tensor}", f"model.kv_heads={tensor}", f"model.width={width}"]
    return changes


def _layout(config: Config, *, schedule: str | None, strategy: str | None, **options: Any) -> Layout:
    """Puts the options on top of the layout that the config asks for; its buckets are small ones."""
    from paceline.config import layout_of
    from paceline.plan.layout import Compression, Offload
    from paceline.schedule.text import read_csv
    from paceline.verify.settings import SMALL_BUCKETS

    asked = layout_of(config)
    changes = {name: value for name, value in options.items() if value is not None}
    said: Any = strategy or config.parallel.strategy
    changes["strategy"] = "fsdp" if said == "zero3" else said
    if changes["strategy"] != "hybrid" and options["shard_ranks"] is None:
        changes["shard_ranks"] = 0
    if schedule is not None:  # another one may take other chunks
        made = read_csv(Path(schedule)) if schedule.endswith(".csv") else schedule
        changes = {"schedule": made, "chunks": 0, **changes}
    if options["pipeline"] is not None and options["pipeline"] != asked.pipeline:  # a cut is for the stages it has
        changes = {"stages": "estimated", "stage_layers": None, **changes}
    plain = {"offload": Offload(), "compression": Compression(), "compile": "none", "algorithm": "native"}
    return replace(asked, **{**plain, **SMALL_BUCKETS, "tunes_buckets": False, **changes})


def _clip_norm(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--clip {text} is not a number\n  give the largest norm, such as 1.0, or none") from None


def _load(name: str, overrides: list[str]) -> Config:
    from paceline.config import config_from_dict, load_config

    if name in BUILT_IN and not Path(name).exists():
        values = {**BUILT_IN[name], "name": f"verify-{name}", "train": _EXACT}
        return config_from_dict(values, f"the built-in case {name}", overrides)
    if not name.endswith((".yaml", ".yml")) and not Path(name).exists():
        import difflib

        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else "check the path, or take paceline verify gpt"
        raise UsageError(
            f"{name} is neither a file nor a built-in case\n  built in are {', '.join(BUILT_IN)}\n  {hint}"
        )
    return load_config(Path(name), [*overrides, *(f"train.{key}={value}" for key, value in _EXACT.items())])


def _show(certificate: Certificate, name: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from paceline.terminal import new_console

    console = new_console()
    verdict = Text("passed", style="bold green") if certificate.passed else Text("FAILED", style="bold red")
    groups = "" if certificate.shard_ranks is None else f" in shard groups of {certificate.shard_ranks}"
    degrees = [f"{axis} {n}" for axis in ("pipeline", "tensor") if (n := getattr(certificate, axis)) > 1]
    spread = " x ".join([*degrees, certificate.strategy])
    schedule = "" if certificate.schedule is None else f", schedule {certificate.schedule}"
    what = f"{spread} on {certificate.ranks} {certificate.backend} ranks{groups}{schedule}"
    console.print(verdict, f"  {name}: {what}", highlight=False)
    console.print(f"against {certificate.reference}", highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    for quantity in ("loss", "gradients", "norm", "parameters", "buffers"):
        table.add_row(quantity, f"{getattr(certificate.errors, quantity):.2e}")
    console.print(f"largest {certificate.measure} difference:")
    console.print(table)
    console.print(f"allowed: {certificate.tolerance:.3g} ({certificate.bound})", highlight=False)
    console.print(
        f"{certificate.steps} steps, {certificate.batch} samples a batch, {certificate.accumulate} microbatches, "
        f"clip {certificate.clip}, checkpointing {certificate.checkpoint_activations}, "
        f"{certificate.num_parameters:,} parameters, {certificate.dtype}, precision {certificate.precision}, "
        f"{certificate.seconds:.1f} s",
        highlight=False,
    )
    if certificate.divergence is not None:
        console.print(f"first divergence: {certificate.divergence}", highlight=False)
