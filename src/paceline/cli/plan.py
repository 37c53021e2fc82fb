"""``paceline plan``: how to train a model on a cluster, before there is one. ``paceline.plan`` with options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.destination import check_file, check_picture
from paceline.cli.options import ClusterName, Overrides, grouped, print_json
from paceline.errors import UsageError
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.search.result import PlanResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan is for, and what is made of it."""

    hf: Path | None = typer.Option(
        None, metavar="FILE", help="The config.json of a Hugging Face model, or its folder; in the place of CONFIG."
    )
    gpus: str | None = typer.Option(
        None, metavar="N,N,...", help="How it scales: a table over these numbers of devices; 1,2,4,...,64 goes too."
    )
    png: Path | None = typer.Option(
        None, callback=check_picture, metavar="FILE", help="Draw the tables of --gpus; .svg and .pdf go too."
    )
    by: str = typer.Option("time", metavar="time|cost|memory", help="What comes first.")
    price: float | None = typer.Option(None, metavar="USD", help="What a device costs for an hour.")
    precision: str | None = typer.Option(
        None, metavar="auto|NAME", help="In the place of the config's; auto: the best of all."
    )
    host_gb: float | None = typer.Option(
        None, metavar="GIB", help="Memory of a node's host, for what is offloaded; else it has room."
    )
    top: int = typer.Option(5, min=1, help="How many plans to show.")
    output: Path | None = typer.Option(
        None, "-o", "--output", callback=check_file, metavar="FILE", help="Write the first plan as a config to train."
    )
    trace: Path | None = typer.Option(
        None,
        callback=check_file,
        metavar="FILE",
        help="Run the first plan's engine without values, and write its time line.",
    )


@grouped
def plan(
    cluster: ClusterName,
    config: str | None = typer.Argument(None, metavar="CONFIG", help="A YAML file, such as configs/gpt_7b.yaml."),
    overrides: Overrides = None,
    *,
    asked: PlanOptions,
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """Find the fastest way to train a model on a cluster."""
    from paceline.rehearse.planning import plan as find
    from paceline.rehearse.planning import trace_plan

    source, words = _source(config, list(overrides or []), asked.hf)
    counts = _counts(asked.gpus, asked.png)
    found = find(
        source,
        cluster,
        overrides=words,
        by=asked.by,
        gpus=counts,
        precision=asked.precision,
        price=asked.price,
        host_gb=asked.host_gb,
    )
    if asked.output is not None:
        _write(asked.output, found)
    is_drawn = asked.png is not None and any(row.best for rows in found.scaling.values() for row in rows)
    if asked.png is not None and is_drawn:
        from paceline.search.scaling import draw_scaling

        draw_scaling(found.scaling, asked.png, f"{found.request.config.name} on {found.request.cluster.node.name}")
    traced_s = None if asked.trace is None or found.winner is None else trace_plan(found, asked.trace).seconds
    if as_json:
        replayed = {} if traced_s is None else {"replayed_s": traced_s}
        print_json(found.to_json(asked.top) | replayed)
    else:
        echo(found.to_text(asked.top))
        if traced_s is not None:
            echo(f"\nthe first, replayed: {traced_s:.4g} s a step; its time line is in {asked.trace}")
        if asked.output is not None and found.winner is not None:
            echo(f"\nwritten to {asked.output}: paceline train {asked.output}")
        if asked.png is not None:
            why_not = "" if is_drawn else f"{asked.png} is not drawn: no number of devices has a plan"
            echo(f"\n{why_not or f'drawn into {asked.png}'}")
    if found.winner is None:
        raise typer.Exit(1)


def _source(config: str | None, overrides: list[str], hf: Path | None) -> tuple[Path, list[str]]:
    """Returns the file of the model, and what replaces its values; without CONFIG the first of these stands there."""
    if hf is None:
        if config is None:
            raise UsageError("nothing to plan\n  a plan is for a model\n  name a config, or --hf config.json")
        return Path(config), overrides
    if config is not None and "=" not in config:
        raise UsageError(f"both {config} and --hf {hf} are given\n  a plan is for one model\n  leave one of them out")
    source = hf / "config.json" if hf.is_dir() else hf
    if source.suffix != ".json":
        raise UsageError(
            f"--hf {hf}\n  it is the config.json of a Hugging Face model, or the folder that has it\n"
            "  name a file that ends in .json; a config of Paceline goes without --hf"
        )
    return source, [*([config] if config else []), *overrides]


def _counts(text: str | None, png: Path | None) -> list[int] | None:
    if text is None:
        if png is not None:
            raise UsageError(
                f"--png {png}: nothing to draw\n  a picture is of the table of --gpus\n  add --gpus 8,16,32"
            )
        return None
    found = _series(text.split(","))
    if not found:
        raise UsageError(
            f"--gpus {text!r}\n"
            "  it is a list of whole numbers; ... goes on as the two before it do, up to the one behind\n"
            "  try --gpus 1,2,4,8,16 or --gpus 1,2,4,...,64"
        )
    return found


def _series(words: list[str]) -> list[int]:
    """Returns the numbers of a list, nothing where it is none; ``...`` goes on as the two before it do."""
    found: list[int] = []
    rest = [each.strip() for each in words]
    while rest:
        word = rest.pop(0)
        if word.isdigit():
            found.append(int(word))
        elif word == "..." and rest and rest[0].isdigit() and len(found) > 1 and found[-2] < found[-1] < int(rest[0]):
            first, number, last = found[-2], found[-1], int(rest[0])
            step, factor = number - first, number // first if first and number % first == 0 else 0
            while (number := number * factor if factor > 1 else number + step) < last:
                found.append(number)
        else:
            return []
    return found


def _write(output: Path, found: PlanResult) -> None:
    if found.request.no_config:
        raise UsageError(
            f"{output} is not written: {found.request.no_config}\n  a config cannot say that\n  leave --output out"
        )
    if found.winner is None:
        return
    try:
        output.write_text(found.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the plan cannot be written to {output}: {error.strerror}") from error
