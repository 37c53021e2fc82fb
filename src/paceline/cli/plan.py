"""``paceline plan``: how to train a model on a cluster, before there is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from paceline.cluster.devices import Cluster
    from paceline.config import Config
    from paceline.planner.candidates import Candidate, Task
    from paceline.planner.engine_memory import EngineMemory
    from paceline.planner.scaling import ScalingRow
    from paceline.planner.search import Change, Ranked, Search


def plan(
    config: str | None = typer.Argument(None, metavar="CONFIG", help="A YAML file, such as configs/gpt_7b.yaml."),
    overrides: list[str] | None = typer.Argument(
        None, metavar="SECTION.KEY=VALUE", help="Values that replace those of the file."
    ),
    cluster: str = typer.Option(
        ..., "--cluster", "-c", metavar="NAME", help="Such as '4x dgx-h100' or '32x h100-sxm'; see paceline cluster ls."
    ),
    hf: Path | None = typer.Option(
        None, "--hf", metavar="FILE", help="The config.json of a Hugging Face model, in the place of CONFIG."
    ),
    gpus: str | None = typer.Option(
        None, "--gpus", metavar="N,N,...", help="How it scales: a table over these numbers of devices."
    ),
    png: Path | None = typer.Option(
        None, "--png", metavar="FILE", help="Draw the tables of --gpus, as predicted; .svg and .pdf go too."
    ),
    by: str = typer.Option("time", "--by", metavar="time|memory", help="What comes first."),
    top: int = typer.Option(5, "--top", min=1, help="How many plans to show."),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Write the first plan as a config for paceline train."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """Find the fastest way to train a transformer on a cluster: mesh, strategy, microbatch, schedule, recomputation.

    What does not fit into memory is left out, with the reason; the rest is ranked by predicted time. Nothing is run,
    and no GPU is needed. Exit code 1: nothing fits.

    Examples:

      paceline plan configs/gpt_7b.yaml --cluster "4x dgx-h100" --output plan.yaml

      paceline plan configs/gpt_7b.yaml train.global_batch=512 --cluster "32x h100-sxm" --gpus 8,16,32 --png s.png

      paceline plan --hf config.json --cluster "p4d.24xlarge x 2"
    """
    from paceline.planner.search import search

    order = _order(by)
    asked = _read(config, list(overrides or []), hf, cluster)
    counts = _counts(gpus, png)
    found = search(asked.task, asked.cluster, order=order, need=asked.need)
    tables = _tables(asked, counts, by) if counts else {}
    verdict = _judge(asked, found)
    if output is not None:
        _write(output, asked, found)
    is_drawn = png is not None and _draw(png, asked, tables)
    if as_json:
        import json

        typer.echo(json.dumps(_to_json(asked, found, verdict, tables, top), indent=2))
    else:
        _show(asked, found, verdict, top)
        _show_tables(tables)
        if output is not None and found.ranked:
            typer.echo(f"\nwritten to {output}: paceline train {output}")
        if png is not None:
            typer.echo(f"\ndrawn into {png}" if is_drawn else f"\n{png} is not drawn: no number of devices has a plan")
    if not found.ranked:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is planned for, and what was assumed."""

    config: Config
    task: Task
    cluster: Cluster
    need: EngineMemory | None
    assumed: tuple[str, ...] = ()
    no_config: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Whether the config as it is written fits, and the smallest changes that make it fit."""

    as_written: Ranked | None
    fits: bool
    changes: list[Change]


def _order(by: str) -> Any:
    from paceline.errors import UsageError

    if by not in ("time", "memory"):
        raise UsageError(f"--by {by}\n  plans are ranked by time or by memory\n  try --by time")
    return by


def _counts(text: str | None, png: Path | None) -> list[int]:
    from paceline.errors import UsageError

    if text is None:
        if png is not None:
            raise UsageError(
                f"--png {png}: nothing to draw\n  a picture is of the table of --gpus\n  add --gpus 8,16,32"
            )
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--gpus {text}: {error}\n  it is a list of whole numbers\n  try --gpus 1,2,4,8,16") from error


def _read(config: str | None, overrides: list[str], hf: Path | None, cluster_name: str) -> _Asked:
    from paceline.cluster.devices import load_cluster
    from paceline.config import load_config
    from paceline.errors import UsageError
    from paceline.planner.engine_memory import EngineMemory
    from paceline.planner.from_config import task_of
    from paceline.planner.hugging_face import read_hugging_face

    cluster = load_cluster(cluster_name)
    device = "cpu" if cluster.device.is_cpu else "cuda"
    if hf is None:
        if config is None:
            raise UsageError("nothing to plan\n  a plan is for a model\n  name a config, or --hf config.json")
        loaded = load_config(Path(config), overrides)
        task = task_of(loaded, cluster.devices)
        return _Asked(config=loaded, task=task, cluster=cluster, need=EngineMemory.of(loaded, device))
    if config is not None and "=" not in config:
        raise UsageError(f"both {config} and --hf {hf} are given\n  a plan is for one model\n  leave one of them out")
    own = [*([config] if config else []), *overrides]
    model = read_hugging_face(hf)
    loaded = load_config(None, [*model.overrides, *own])
    shape = model.shape if model.no_config else None
    return _Asked(
        config=loaded,
        task=task_of(loaded, cluster.devices, shape),
        cluster=cluster,
        need=None if model.no_config else EngineMemory.of(loaded, device),
        assumed=() if any(word.startswith(("train.", "data.")) for word in own) else model.assumed,
        no_config=model.no_config,
    )


def _tables(asked: _Asked, counts: list[int], by: str) -> dict[str, list[ScalingRow]]:
    from paceline.planner.scaling import scaling_rows

    return {
        name: scaling_rows(asked.task, asked.cluster, counts, weak=name == "weak", need=asked.need, order=_order(by))
        for name in ("strong", "weak")
    }


def _judge(asked: _Asked, found: Search) -> _Verdict:
    from paceline.planner.from_config import candidate_of
    from paceline.planner.search import rank_one, room_makers, smallest_changes

    if not found.ranked:
        same_length = asked.task.seq_len
        changes = room_makers(found, lambda task: asked.need if task.seq_len == same_length else None)
        return _Verdict(as_written=None, fits=False, changes=changes)
    candidate: Candidate | None = candidate_of(asked.config, asked.task, asked.cluster)
    if candidate is None:
        return _Verdict(as_written=None, fits=False, changes=[])
    ranked = rank_one(candidate, asked.cluster, asked.need)
    fits = ranked.memory_bytes <= found.budget
    named = _named(asked.config)
    changes = [] if fits else smallest_changes(candidate, found, named=named)
    return _Verdict(as_written=ranked, fits=fits, changes=changes)


def _named(config: Config) -> tuple[str, ...]:
    """Keys that a change of the mesh must name: a microbatch that follows from it, and what else the config fixes."""
    train = config.train
    return (
        *(() if train.microbatch else ("train.microbatch",)),
        *(("train.accumulate",) if train.accumulate else ()),
        *(("parallel.data",) if config.parallel.data else ()),
    )


def _write(output: Path, asked: _Asked, found: Search) -> None:
    from paceline.errors import UsageError
    from paceline.planner.from_config import planned_yaml

    if asked.no_config:
        raise UsageError(
            f"{output} is not written: {asked.no_config}\n  a config's GPT cannot say that\n  leave --output out"
        )
    if not found.ranked:
        return
    text = planned_yaml(asked.config, found.ranked[0], asked.cluster)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the plan cannot be written to {output}: {error.strerror}") from error


def _draw(png: Path, asked: _Asked, tables: dict[str, list[ScalingRow]]) -> bool:
    from paceline.planner.scaling_picture import draw_scaling

    if not any(row.best for rows in tables.values() for row in rows):
        return False
    draw_scaling(tables, png, f"{asked.config.name} on {asked.cluster.node.name}")
    return True


# What is shown.


def _show(asked: _Asked, found: Search, verdict: _Verdict, top: int) -> None:
    from paceline.planner.search import explain_against, explain_winner
    from paceline.units import format_count

    task, cluster = asked.task, asked.cluster
    typer.echo(
        f"{asked.config.name}: {format_count(task.model.params)} parameters, {task.global_batch} sequences of "
        f"{task.seq_len} tokens a step, {task.compute}, {task.framework}"
    )
    typer.echo(f"{cluster.name}: {cluster.devices} x {cluster.device.name}, {_gib(cluster.device.memory_bytes)} each")
    for line in asked.assumed:
        typer.echo(f"assumed: {line}")
    if not found.ranked:
        _show_nothing(found, verdict)
        return
    typer.echo(f"\n{found.looked_at} ways looked at, {found.num_fit} fit{_reasons(found)}\n")
    typer.echo(f"{'':>3} {'step':>10} {'tokens/s':>12} {'MFU':>6} {'waits':>6} {'memory':>10}  plan")
    for number, each in enumerate(found.ranked[:top], 1):
        typer.echo(f"{number:>3} {_line(each)}  {each.candidate}")
    winner = found.ranked[0]
    typer.echo(f"\n1: {explain_winner(found)}.")
    for number, each in enumerate(found.ranked[1:top], 2):
        typer.echo(f"{number}: {explain_against(winner, each)}.")
    typer.echo(f"\n{_domain(winner)}")
    _show_verdict(verdict, found)


def _show_nothing(found: Search, verdict: _Verdict) -> None:
    typer.echo(f"\nout of memory: none of {found.looked_at} ways fits{_reasons(found)}")
    if found.nearest is not None:
        candidate, need = found.nearest
        typer.echo(f"nearest: {candidate} needs {_gib(need)}, and {_gib(found.budget)} may be taken")
    for change in verdict.changes:
        typer.echo(f"would fit with {change}")


def _show_verdict(verdict: _Verdict, found: Search) -> None:
    if verdict.as_written is None:
        return
    ranked = verdict.as_written
    if verdict.fits:
        slower = ranked.seconds / found.ranked[0].seconds
        typer.echo(f"as written ({ranked.candidate}): fits, {slower:.2f} x the first plan's time")
        return
    typer.echo(
        f"as written ({ranked.candidate}): out of memory, needs {_gib(ranked.memory_bytes)} and "
        f"{_gib(found.budget)} may be taken"
    )
    for change in verdict.changes:
        typer.echo(f"  fits with {change}")


def _show_tables(tables: dict[str, list[ScalingRow]]) -> None:
    for name, rows in tables.items():
        typer.echo(f"\n{name} scaling ({'same batch' if name == 'strong' else 'same samples a device'})")
        typer.echo(
            f"{'GPUs':>6} {'batch':>7} {'step':>10} {'tokens/s':>12} {'MFU':>6} {'waits':>6} {'memory':>10} {'eff.':>6}"
        )
        for row in rows:
            start = f"{row.devices:>6} {row.global_batch:>7}"
            if row.best is None:
                typer.echo(f"{start} {row.why}")
            else:
                typer.echo(f"{start} {_line(row.best)} {row.efficiency:>6.1%}  {row.best.candidate}")


def _line(ranked: Ranked) -> str:
    from paceline.units import format_seconds

    return (
        f"{format_seconds(ranked.seconds):>10} {ranked.tokens_per_s:>12,.0f} {ranked.mfu:>6.1%} "
        f"{ranked.communication:>6.1%} {_gib(ranked.memory_bytes):>10}"
    )


def _reasons(found: Search) -> str:
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(found.left_out.items(), key=lambda each: -each[1]))
    return f"; left out: {told}" if told else ""


def _domain(winner: Ranked) -> str:
    from paceline.units import format_seconds

    low, high = winner.prediction.band
    source = (
        "constants were fitted on published runs of this generation and kind of framework"
        if winner.prediction.fitted
        else "NOT FITTED: constants of this generation and kind of framework are composed of others"
    )
    return f"step of the first between {format_seconds(low)} and {format_seconds(high)}; {source} (docs/prediction.md)"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


# As JSON.


def _to_json(
    asked: _Asked, found: Search, verdict: _Verdict, tables: dict[str, list[ScalingRow]], top: int
) -> dict[str, Any]:
    from paceline.planner.search import explain_against, explain_winner

    shown = found.ranked[:top]
    return {
        "name": asked.config.name,
        "parameters": asked.task.model.params,
        "cluster": asked.cluster.name,
        "devices": asked.cluster.devices,
        "device": asked.cluster.device.name,
        "global_batch": asked.task.global_batch,
        "tokens_per_sample": asked.task.seq_len,
        "assumed": list(asked.assumed),
        "order": found.order,
        "looked_at": found.looked_at,
        "fit": found.num_fit,
        "left_out": found.left_out,
        "budget_bytes": found.budget,
        "plans": [_ranked_json(each) for each in shown],
        "explanations": [explain_winner(found), *(explain_against(shown[0], each) for each in shown[1:])]
        if shown
        else [],
        "nearest": None if found.nearest is None else {**_decided(found.nearest[0]), "memory_bytes": found.nearest[1]},
        "as_written": None
        if verdict.as_written is None
        else {**_ranked_json(verdict.as_written), "fits": verdict.fits},
        "changes_that_fit": [
            {"keys": each.keys, "step_s": None if each.ranked is None else each.ranked.seconds}
            for each in verdict.changes
        ],
        "scaling": {name: [_row_json(row) for row in rows] for name, rows in tables.items()},
    }


def _decided(candidate: Candidate) -> dict[str, Any]:
    layout = candidate.layout
    return {
        "plan": str(candidate),
        "strategy": candidate.strategy,
        "mesh": {
            "pipeline": layout.pipeline,
            "replicate": layout.data // candidate.shard,
            "shard": candidate.shard,
            "tensor": layout.tensor,
        },
        "schedule": candidate.schedule or None,
        "chunks": layout.chunks,
        "microbatch": candidate.microbatch,
        "accumulate": candidate.accumulate,
        "recompute": candidate.recompute,
    }


def _ranked_json(ranked: Ranked) -> dict[str, Any]:
    from dataclasses import asdict

    low, high = ranked.prediction.band
    return {
        **_decided(ranked.candidate),
        "step_s": ranked.seconds,
        "step_s_low": low,
        "step_s_high": high,
        "fitted": ranked.prediction.fitted,
        "tokens_per_s": ranked.tokens_per_s,
        "mfu": ranked.mfu,
        "communication_share": ranked.communication,
        "parts_s": asdict(ranked.prediction.step),
        "memory_bytes": ranked.memory_bytes,
        "memory_by_formula": asdict(ranked.prediction.memory),
    }


def _row_json(row: ScalingRow) -> dict[str, Any]:
    start: dict[str, Any] = {"devices": row.devices, "global_batch": row.global_batch}
    if row.best is None:
        return {**start, "plan": None, "why": row.why}
    return {**start, **_ranked_json(row.best), "efficiency": row.efficiency}
