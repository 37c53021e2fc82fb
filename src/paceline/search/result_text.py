"""A plan as text: a table of the first ways, sentences that tell them apart, a verdict on the config, scaling."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.plan.workload import ModelShape
from paceline.search.findings import PlanFindings
from paceline.search.search import Ranked, Search, node_bytes, workload_text
from paceline.units import format_count, format_seconds


def result_text(result: PlanFindings, top: int) -> str:
    """Returns a result in lines."""
    return "\n".join(_lines(result, top))


def _lines(result: PlanFindings, top: int) -> Iterator[str]:
    request = result.request
    task, cluster = request.task, request.cluster
    samples = (
        f"{task.global_batch} sequences of {task.seq_len} tokens"
        if isinstance(task.model, ModelShape)
        else f"{task.global_batch} samples"
    )
    compute = "any precision" if len(request.ways) > 1 else task.compute
    yield (
        f"{request.config.name}: {format_count(round(task.model.params))} parameters, {samples} a step, {compute}, "
        f"{task.framework}"
    )
    yield f"{cluster.name}: {cluster.devices} x {cluster.device.name}, {_gib(cluster.device.memory_bytes)} each"
    yield from (f"assumed: {line}" for line in result.assumed)
    if result.winner is None:
        yield from _nothing(result)
    else:
        yield from _plans(result, result.winner, top)
        yield from _verdict(result, result.winner)
    yield from _tables(result)


def _plans(result: PlanFindings, winner: Ranked, top: int) -> Iterator[str]:
    found, unit = result.found, winner.unit
    yield f"\n{found.looked_at} ways looked at, {found.num_fit} fit{_reasons(found)}\n"
    cost = f" {_cost_head(result, winner):>12}" if _shows_cost(result) else ""
    yield f"{'':>3} {'step':>10} {f'{unit}/s':>12} {'MFU':>6} {'waits':>6} {'memory':>10}{cost}  plan"
    for number, each in enumerate(result.plans[:top], 1):
        yield f"{number:>3} {_line(result, each)}  {each}"
    yield ""
    for number, sentence in enumerate(result.explanations(top), 1):
        yield f"{number}: {sentence}."
    yield f"\n{_domain(winner)}"
    if winner.host_bytes:
        yield f"the first has {_gib(winner.host_bytes)} of each rank in its host's memory, which is not in the catalog"


def _nothing(result: PlanFindings) -> Iterator[str]:
    found = result.found
    yield f"\nout of memory: none of {found.looked_at} ways fits{_reasons(found)}"
    if found.nearest is not None:
        workload, need = found.nearest
        yield f"nearest: {workload_text(workload)} needs {_gib(need)}, and {_gib(found.budget)} may be taken"
    yield from (f"would fit with {change}" for change in result.changes)


def _verdict(result: PlanFindings, winner: Ranked) -> Iterator[str]:
    ranked, found = result.as_written, result.found
    if ranked is None:
        yield f"as written: not judged, as {result.not_judged}"
        return
    if result.as_written_fits:
        slower = ranked.seconds / winner.seconds
        yield f"as written ({ranked}): fits, {slower:.2f} x the first plan's time"
        return
    needs, room, where = ranked.memory_bytes, found.budget, ""
    if needs <= room:
        needs, room, where = node_bytes(ranked.workload, found.cluster), found.host_memory, " of the host"
    yield (f"as written ({ranked}): out of memory{where}, needs {_gib(needs)} and {_gib(room)} may be taken")
    yield from (f"  fits with {change}" for change in result.changes)


def _tables(result: PlanFindings) -> Iterator[str]:
    unit = "tokens" if isinstance(result.request.task.model, ModelShape) else "samples"
    for name, rows in result.scaling.items():
        yield f"\n{name} scaling ({'same batch' if name == 'strong' else 'same samples a device'})"
        best = next((row.best for row in rows if row.best is not None), None)
        cost = f" {_cost_head(result, best):>12}" if _shows_cost(result) and best else ""
        yield (
            f"{'GPUs':>6} {'batch':>7} {'step':>10} {f'{unit}/s':>12} {'MFU':>6} {'waits':>6} {'memory':>10}{cost} "
            f"{'eff.':>6}"
        )
        for row in rows:
            start = f"{row.devices:>6} {row.global_batch:>7}"
            if row.best is None:
                yield f"{start} {row.why}"
            else:
                yield f"{start} {_line(result, row.best)} {row.efficiency:>6.1%}  {row.best}"
    cheapest = result.cheapest_row()
    if result.found.order == "cost" and cheapest is not None:
        yield f"\ncheapest of these, with the same batch: {cheapest.devices} devices"


def _line(result: PlanFindings, ranked: Ranked) -> str:
    cost = f" {_cost(result, ranked):>12}" if _shows_cost(result) else ""
    return (
        f"{format_seconds(ranked.seconds):>10} {ranked.tokens_per_s:>12,.0f} {ranked.mfu:>6.1%} "
        f"{ranked.communication:>6.1%} {_gib(ranked.memory_bytes):>10}{cost}"
    )


def _shows_cost(result: PlanFindings) -> bool:
    return result.price is not None or result.found.order == "cost"


def _cost_head(result: PlanFindings, ranked: Ranked) -> str:
    each = "G" if ranked.unit == "samples" else "B"
    return f"{'h' if result.price is None else '$'}/{each} {ranked.unit[:7]}"


def _cost(result: PlanFindings, ranked: Ranked) -> str:
    cost = result.cost_of(ranked)
    return f"{cost.hours_per_billion if cost.per_billion is None else cost.per_billion:,.2f}"


def _reasons(found: Search) -> str:
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(found.left_out.items(), key=lambda each: -each[1]))
    return f"; left out: {told}" if told else ""


def _domain(winner: Ranked) -> str:
    low, high = winner.prediction.band
    source = "constants were fitted on published runs of this generation, kind of framework and size"
    if not winner.prediction.fitted:
        reasons = "; ".join(winner.prediction.outside) or "nothing like it was fitted"
        source = f"OUTSIDE the calibrated domain: {reasons}"
    return f"step of the first between {format_seconds(low)} and {format_seconds(high)}; {source} (docs/prediction.md)"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
