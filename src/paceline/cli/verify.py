"""``paceline verify``: the proof that a distributed run computes what one process would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import Overrides, print_json, with_layout_options
from paceline.errors import UsageError, did_you_mean
from paceline.plan.layout import Compression, Layout, Offload
from paceline.plan.rule_case import DEGREES
from paceline.schedule.text import read_csv
from paceline.terminal import new_console

if TYPE_CHECKING:
    from paceline.config import Config
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
# Fields of a layout that are no options here: they change what is computed, or no engine reads them.
_NOT_VERIFIED = (
    *("algorithm", "compile", "compression", "offload", "tunes_buckets", "gathers_logits"),
    *("microbatch", "node_ranks"),
)


@with_layout_options(without=_NOT_VERIFIED)
def verify(
    config: str | None = typer.Argument(None, metavar="CONFIG", help="A YAML file, or mlp, gpt or resnet, built in."),
    overrides: Overrides = None,
    ranks: int = typer.Option(4, help="How many ranks."),
    steps: int = typer.Option(3, help="Optimizer steps to compare."),
    clip: str = typer.Option("1.0", help="Largest global gradient norm, or none."),
    checkpoints: bool = typer.Option(False, "--checkpoint-activations", help="Compute blocks again, by policy full."),
    batch: int = typer.Option(None, help="Global batch; by default a ragged one."),
    experts: int = typer.Option(None, help="Give the model so many experts in each block, two of which take a token."),
    backend: str = typer.Option("virtual", help="virtual: threads of this process; gloo or shared_memory: processes."),
    tolerance: float = typer.Option(None, help="Largest difference allowed; by default as the precision needs."),
    model: str = typer.Option(None, "--model", help="The same as the argument CONFIG."),
    as_json: bool = typer.Option(False, "--json", help="Print the certificate as JSON."),
    **layout: Any,
) -> None:
    """Prove that training on N ranks computes what one process would."""
    from paceline.verify.case import ConfigCase, Settings, check_settings, complete
    from paceline.verify.certificate import certify

    options = ({"checkpoint_activations": "full"} if checkpoints else {}) | layout
    is_spread = max(options.get(degree, 1) for degree in (*DEGREES, "expert")) > 1
    name = model or config or ("gpt" if is_spread else "mlp")
    sizes = _large_enough(options) if name == "gpt" else []
    if experts is not None:  # of which one is shared, so that all kinds of layers are there
        sizes += [f"model.experts={experts}", "model.active=2", "model.shared_experts=1", "model.expert_width=48"]
    loaded = _load(name, [*sizes, *(overrides or [])])
    spread = _layout(loaded, options)
    said = options.get("strategy", loaded.parallel.strategy)
    try:
        norm = None if clip == "none" else float(clip)
    except ValueError:
        raise UsageError(f"--clip {clip} is not a number\n  give the largest norm, such as 1.0, or none") from None
    how: dict[str, Any] = {"steps": steps, "clip": norm, "backend": backend, "tolerance": tolerance}
    settings = complete(Settings(layout=spread, strategy=said, ranks=ranks, **how))
    check_settings(settings, batch=batch)
    size = batch or 2 * settings.data_ranks * settings.accumulate + 1  # one over: no two shares weigh the same
    case = ConfigCase(loaded, batch=size, layers_as_blocks=name in BUILT_IN)
    certificate = certify(case, settings)
    if as_json:
        print_json({"case": name, **certificate.to_json()})
    else:
        _show(certificate, name)
    if not certificate.passed:
        raise typer.Exit(1)


def _large_enough(options: Mapping[str, Any]) -> list[str]:
    """Returns what makes the built-in GPT deep, wide and long enough for so many ranks."""
    pipeline, context, tensor = (options.get(degree, 1) for degree in DEGREES)
    is_cut_twice = options.get("schedule", "") in ("interleaved", "zb-v")
    stages = pipeline * (options.get("chunks") or (2 if is_cut_twice else 1))
    changes = [f"model.layers={stages}"] if stages > 4 else []
    if context > 1:  # one token over, unless parts of rows are cut again: no two ranks have as many
        tokens = 4 * context * max(2, tensor) + (not options.get("sequence_parallel"))
        changes += [f"model.context={tokens}", f"data.context={tokens}"]
    if tensor > 2:
        width = tensor * 2 * -(-32 // tensor)  # at least 64; the features of a head are turned in pairs
        changes += [f"model.heads={tensor}", f"model.kv_heads={tensor}", f"model.width={width}"]
    return changes


def _layout(config: Config, options: dict[str, Any]) -> Layout:
    """Puts the options on top of the layout that the config asks for; its buckets are small ones."""
    from paceline.config import layout_of
    from paceline.verify.case import SMALL_BUCKETS

    asked = layout_of(config)
    said = options.get("strategy", config.parallel.strategy)
    kept = Offload(activations=asked.offload.activations)
    plain = {"offload": kept, "compression": Compression(), "compile": "none", "algorithm": "native"}
    changes: dict[str, Any] = plain | SMALL_BUCKETS | {"tunes_buckets": False, "data": 0, "accumulate": 1}
    changes |= {"precision": "fp32"} if said == "hybrid" else {"precision": "fp32", "shard_ranks": 0}
    if "schedule" in options:  # another one may take other chunks
        changes["chunks"] = 0
    if options.get("pipeline", asked.pipeline) != asked.pipeline:  # a cut is for the stages it has
        changes |= {"stages": "estimated", "stage_layers": None}
    changes |= options | {"strategy": "fsdp" if said == "zero3" else said}
    if changes.get("stages") == "auto":
        changes["stages"] = "estimated"
    if str(changes.get("schedule", "")).endswith(".csv"):
        changes["schedule"] = read_csv(Path(changes["schedule"]))
    return replace(asked, **changes)


def _load(name: str, overrides: list[str]) -> Config:
    from paceline.config import config_from_dict, load_config
    from paceline.config.shipped import find_config

    if name in BUILT_IN and not Path(name).exists():
        values = {**BUILT_IN[name], "name": f"verify-{name}", "train": _EXACT}
        return config_from_dict(values, f"the built-in case {name}", overrides)
    if not name.endswith((".yaml", ".yml")) and not find_config(name).exists():
        what, rule = f"{name} is no file, no config that ships, and not built in", f"built in are {', '.join(BUILT_IN)}"
        hint = did_you_mean(name, BUILT_IN, "check the path, or take paceline verify gpt")
        raise UsageError(f"{what}\n  {rule}\n  {hint}")
    return load_config(Path(name), [*overrides, *(f"train.{key}={value}" for key, value in _EXACT.items())])


def _show(certificate: Certificate, name: str) -> None:
    from rich.text import Text

    console = new_console()
    verdict = Text("passed", style="bold green") if certificate.passed else Text("FAILED", style="bold red")
    groups = "" if certificate.shard_ranks is None else f" in shard groups of {certificate.shard_ranks}"
    axes = ("pipeline", "context", "tensor", "expert")
    degrees = [f"{axis} {n}" for axis in axes if (n := getattr(certificate, axis)) > 1]
    spread = " x ".join([*degrees, certificate.strategy])
    schedule = "" if certificate.schedule is None else f", schedule {certificate.schedule}"
    what = f"{spread} on {certificate.ranks} {certificate.backend} ranks{groups}{schedule}"
    console.print(verdict, f"  {name}: {what}", highlight=False)
    errors = ("loss", "gradients", "norm", "parameters", "buffers")
    lines = [
        f"against {certificate.reference}",
        f"largest {certificate.measure} difference:",
        *(f"{quantity:<12} {getattr(certificate.errors, quantity):.2e}" for quantity in errors),
        f"allowed: {certificate.tolerance:.3g} ({certificate.bound})",
        f"{certificate.steps} steps, {certificate.batch} samples a batch, {certificate.accumulate} microbatches, "
        f"clip {certificate.clip}, checkpointing {certificate.checkpoint_activations}, "
        f"{certificate.num_parameters:,} parameters, {certificate.dtype}, precision {certificate.precision}, "
        f"{certificate.seconds:.1f} s",
        *([] if certificate.divergence is None else [f"first divergence: {certificate.divergence}"]),
    ]
    console.print(*lines, sep="\n", highlight=False)
