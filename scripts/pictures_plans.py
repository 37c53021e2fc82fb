"""Pictures of lessons 4, 8 and 9: memory by strategy, a step by precision, and the planner's landscape.

All numbers come from the functions behind ``paceline plan`` for ``configs/gpt_7b.yaml``: a layout is priced by the
formulas, and its memory is the estimate that the engines are checked against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.cluster.devices import Cluster, load_cluster
from paceline.config import load_config
from paceline.plan.layout import STRATEGIES
from paceline.plan.plan import MemoryEstimate
from paceline.predict.formulas.step import Prediction
from paceline.search.request import request_for, why_not_written, workload_as_written
from paceline.search.search import Search, budget_of, rank_one, search
from paceline.units import GIB
from pictures_svg import MARGIN, WIDTH, Picture

CONFIG = Path(__file__).parents[1] / "configs" / "gpt_7b.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A layout as it was written: its price, and what a rank holds by category."""

    ranked: Prediction
    memory: MemoryEstimate
    cluster: Cluster

    @property
    def fits(self) -> bool:
        return self.ranked.memory_bytes <= budget_of(self.cluster)


def price(cluster_name: str, *overrides: str) -> Priced:
    """Prices gpt-7b as the overrides say, on a cluster."""
    cluster = load_cluster(cluster_name)
    config = load_config(CONFIG, [f"parallel.ranks={cluster.devices}", *overrides])
    task = request_for(config, cluster).tasks[0]
    workload = workload_as_written(config, task, cluster)
    assert workload is not None, why_not_written(config, cluster)
    assert task.need is not None
    memory = task.need.estimate(workload.layout)
    assert memory is not None
    return Priced(ranked=rank_one(workload, cluster, task.need), memory=memory, cluster=cluster)


# Memory.

_CLUSTERS = {"1x dgx-h100": "8 GPUs (one DGX H100)", "8x dgx-h100": "64 GPUs (eight DGX H100)"}
_STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "DDP": ("parallel.strategy=ddp",),
    "ZeRO 1": ("parallel.strategy=zero1",),
    "ZeRO 2": ("parallel.strategy=zero2",),
    "hybrid": ("parallel.strategy=hybrid",),
    "FSDP": ("parallel.strategy=fsdp",),
}
_CATEGORIES = (
    ("a", "parameters", ("parameters",)),
    ("b", "gradients", ("gradients",)),
    ("d", "moments of the optimizer", ("optimizer",)),
    ("c", "activations", ("activations",)),
    ("g", "other: temporary, buffers, framework", ("temporary", "buffers", "framework", "compression")),
)


def memory_rows(cluster: str) -> dict[str, Priced]:
    """Prices each strategy of memory-bars.svg on a cluster."""
    names = dict(_STRATEGIES)
    if load_cluster(cluster).nodes == 1:  # groups of a node are the whole world there
        names["hybrid"] = (*names["hybrid"], "parallel.shard_ranks=4")
    return {name: price(cluster, "train.microbatch=1", *words) for name, words in names.items()}


def draw_memory_bars() -> str:
    """Draws memory-bars.svg."""
    picture = Picture(
        "What one GPU holds of a GPT with 7 billion parameters",
        "Each bar is the memory of one rank at its worst moment, for a microbatch of one sample of 4096 tokens in "
        "bf16 with fp32 masters. A bar that crosses the red line does not fit into an H100. More ranks make the "
        "sharded parts smaller; activations stay, because each rank has its own samples.",
        "the memory estimate of paceline plan for configs/gpt_7b.yaml",
    )
    y = picture.legend(MARGIN, picture.top + 8, [(kind, words) for kind, words, _ in _CATEGORIES]) + 4
    rows = {title: memory_rows(cluster) for cluster, title in _CLUSTERS.items()}
    every = [priced for group in rows.values() for priced in group.values()]
    longest = max(sum(_sizes(each.memory)) for each in every)
    left, room = MARGIN + 118, WIDTH - 2 * MARGIN - 118 - 66
    scale = room / longest
    device = every[0].cluster.device.memory_bytes
    for title, group in rows.items():
        picture.text(MARGIN, y + 14, title, "name ink")
        top = y + 24
        end = top + 27 * len(group)
        for is_text in (False, True):  # the line is above the bars, and below their numbers
            for place, (name, priced) in enumerate(group.items()):
                _draw_memory(picture, left, top + 27 * place, name, priced, scale, is_text=is_text)
            if not is_text:
                picture.line(left + device * scale, top - 6, left + device * scale, end + 2, "red")
        y = end + 10
    picture.text(left + device * scale, y + 8, f"H100: {device / GIB:.1f} GiB", "small bold e mid")
    return picture.svg(y + 24)


def _sizes(memory: MemoryEstimate) -> list[int]:
    return [sum(getattr(memory, name) for name in names) for _, _, names in _CATEGORIES]


def _draw_memory(
    picture: Picture, left: float, y: float, name: str, priced: Priced, scale: float, *, is_text: bool
) -> None:
    """Draws a bar, or its name and its sum."""
    layout, sizes = priced.ranked.layout, _sizes(priced.memory)
    if is_text:
        label = f"{name}, groups of {layout.shards}" if layout.strategy == "hybrid" else name
        picture.text(left - 8, y + 15, label, "small ink end")
        is_over = sum(sizes) > priced.cluster.device.memory_bytes
        words = f"{sum(sizes) / GIB:.1f} GiB"
        picture.text(left + sum(sizes) * scale + 6, y + 15, words, "small bold e" if is_over else "small ink halo")
        return
    at = left
    for (kind, words, _), size in zip(_CATEGORIES, sizes, strict=True):
        picture.box(at, y, max(size * scale - 0.5, 0.2), 21, kind, says=f"{words}: {size / GIB:.1f} GiB")
        at += size * scale


# Precision.

_PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "fp32": ("train.precision=fp32", "model.compile=false"),
    "bf16": ("train.precision=bf16_master", "model.compile=false"),
    "bf16, compiled": ("train.precision=bf16_master", "model.compile=true"),
    "fp8, compiled": ("train.precision=fp8", "model.compile=true"),
}
_PARTS = (
    ("a", "computing", ("compute",)),
    ("b", "waiting for kernel launches", ("launch_wait",)),
    ("e", "exposed communication", ("exposed", "tensor_wait", "bubble")),
    ("d", "computing slowed by communication", ("contention",)),
    ("f", "optimizer", ("optimizer",)),
)


def precision_rows() -> dict[str, Priced]:
    """Prices each row of precision.svg."""
    base = ("parallel.strategy=fsdp", "train.global_batch=32", "train.microbatch=1")
    return {name: price("1x dgx-h100", *base, *words) for name, words in _PRECISIONS.items()}


def draw_precision() -> str:
    """Draws precision.svg."""
    picture = Picture(
        "Where the time of a step goes, by precision",
        "One step of a GPT with 7 billion parameters on 8 H100: FSDP, 32 samples of 4096 tokens. "
        "MFU is the share of the device's peak, in the precision of that row, that the model's own FLOPs come to: a "
        "faster precision shortens the step, and leaves a smaller share of a higher peak.",
        "the formulas of paceline plan for configs/gpt_7b.yaml",
    )
    y = picture.legend(MARGIN, picture.top + 8, [(kind, words) for kind, words, _ in _PARTS]) + 6
    rows = precision_rows()
    longest = max(priced.ranked.seconds for priced in rows.values())
    left, room = MARGIN + 108, WIDTH - 2 * MARGIN - 108
    for name, priced in rows.items():
        _draw_step(picture, left, y, name, priced, room / longest)
        y += 50
    picture.ruler(left, y, room, longest, "s")
    y += 48
    picture.text(MARGIN, y, "The same steps without fp32, on a larger scale", "name ink")
    rows.pop("fp32")
    longest = max(priced.ranked.seconds for priced in rows.values())
    for name, priced in rows.items():
        _draw_step(picture, left, y + 14, name, priced, room / longest)
        y += 50
    picture.ruler(left, y + 14, room, longest, "s")
    return picture.svg(y + 46)


def _draw_step(picture: Picture, left: float, y: float, name: str, priced: Priced, scale: float) -> None:
    ranked = priced.ranked
    step = ranked.step
    picture.text(left - 8, y + 14, name, "small bold ink end")
    at = left
    for kind, words, names in _PARTS:
        seconds = sum(getattr(step, each) for each in names)
        if seconds * scale >= 0.3:
            picture.box(at, y, max(seconds * scale - 0.5, 0.3), 20, kind, says=f"{words}: {seconds:.2f} s")
        at += seconds * scale
    per_device = ranked.tokens_per_s / ranked.layout.ranks
    peak = ranked.peak_flops / 1e12
    words = f"{ranked.seconds:.2f} s; MFU {ranked.mfu:.0%} of {peak:,.0f} TFLOP/s; {per_device:,.0f} tokens/s a GPU"
    picture.text(left, y + 35, words, "small ink")


# The landscape.

_SIZES = (1, 2, 4, 8, 16, 32)
_MICROBATCHES = (1, 2, 4, 8)
LANDSCAPE_CLUSTER = "4x dgx-h100"


@cache
def landscape() -> Search:
    """Searches all layouts of gpt-7b on four nodes."""
    cluster = load_cluster(LANDSCAPE_CLUSTER)
    config = load_config(CONFIG, [f"parallel.ranks={cluster.devices}"])
    return search(request_for(config, cluster).tasks[0], cluster)


def draw_landscape() -> str:
    """Draws landscape.svg."""
    found = landscape()
    picture = Picture(
        f"The planner's landscape: gpt-7b on {LANDSCAPE_CLUSTER}",
        "Ways to train it on 32 GPUs with 256 samples a step. A number is a step in seconds, and a stronger colour is "
        f"a longer step. Left: the fastest layout of each mesh, of {found.num_fit} that fit; the star is the one that "
        "paceline plan chooses. Right: single layouts with buckets of 25 MiB, no tensor or pipeline parallelism, and "
        "nothing computed again in backward.",
        "the search of paceline plan for configs/gpt_7b.yaml",
    )
    best: dict[tuple[int, int], Prediction] = {}
    for ranked in found.ranked:  # the fastest first
        best.setdefault((ranked.layout.tensor, ranked.layout.pipeline), ranked)
    slowest = max(ranked.seconds for ranked in best.values())
    fastest = found.ranked[0].seconds
    y = picture.top + 14
    picture.text(MARGIN, y, "pipeline ranks N_p across, tensor ranks N_t down", "small bold ink")
    _draw_mesh(picture, MARGIN + 24, y + 12, best, fastest, slowest)
    picture.text(MARGIN + 400, y, "microbatch b across, strategy down", "small bold ink")
    _draw_batches(picture, MARGIN + 448, y + 12, fastest, slowest)
    y += 12 + 26 + 5 * 46
    room = found.budget / GIB
    entries = [
        ("a", "a longer step"),
        ("a thin", "a shorter step"),
        ("e thin", f"does not fit: more than 90 % of the device, {room:.1f} GiB"),
        ("none", "no such mesh"),
    ]
    y = picture.legend(MARGIN, y + 16, entries)
    picture.text(MARGIN, y + 4, f"★ {found.ranked[0]}: {fastest:.2f} s", "small bold ink")
    return picture.svg(y + 20)


def _draw_tile(picture: Picture, x: float, y: float, width: float, seconds: float, span: tuple[float, float]) -> None:
    """Draws a cell in five strengths of one colour."""
    fastest, slowest = span
    depth = round(4 * (seconds - fastest) / (slowest - fastest))
    picture.box(x, y, width - 4, 40, f"a s{min(depth, 4)}", rx=4)
    picture.text(
        x + width / 2 - 2, y + 25, f"{seconds:.2f}", "small bold ink mid" if depth < 3 else "small bold on mid"
    )


def _draw_mesh(
    picture: Picture, x: float, y: float, best: Mapping[tuple[int, int], Prediction], fastest: float, slowest: float
) -> None:
    for column, pipeline in enumerate(_SIZES):
        picture.text(x + 57 * column + 27, y + 14, str(pipeline), "small soft mid")
    for row, tensor in enumerate((1, 2, 4, 8)):
        picture.text(x - 14, y + 47 + 46 * row, str(tensor), "small soft mid")
        for column, pipeline in enumerate(_SIZES):
            left, top = x + 57 * column, y + 22 + 46 * row
            ranked = best.get((tensor, pipeline))
            if ranked is None:
                is_mesh = tensor * pipeline <= 32
                picture.box(left, top, 53, 40, "e thin" if is_mesh else "none", rx=4)
                continue
            _draw_tile(picture, left, top, 57, ranked.seconds, (fastest, slowest))
            if ranked.seconds == fastest:
                picture.text(left + 43, top + 13, "★", "small ink mid")


def _draw_batches(picture: Picture, x: float, y: float, fastest: float, slowest: float) -> None:
    for column, microbatch in enumerate(_MICROBATCHES):
        picture.text(x + 74 * column + 35, y + 14, str(microbatch), "small soft mid")
    for row, strategy in enumerate(STRATEGIES):
        picture.text(x - 6, y + 47 + 46 * row, strategy, "small soft end")
        for column, microbatch in enumerate(_MICROBATCHES):
            words = (f"parallel.strategy={strategy}", f"train.microbatch={microbatch}")
            priced = price(LANDSCAPE_CLUSTER, *words)
            left, top = x + 74 * column, y + 22 + 46 * row
            if priced.fits:
                _draw_tile(picture, left, top, 74, priced.ranked.seconds, (fastest, slowest))
            else:
                picture.box(left, top, 70, 40, "e thin", rx=4)
                picture.text(left + 35, top + 25, f"{priced.ranked.memory_bytes / GIB:.0f} GiB", "small ink mid")
