"""Pictures of lessons 3, 5 and 8: time lines of a step, from dry runs of the real engines.

The engine of one rank runs a step on tensors without values; what it issues is timed on a cluster of the catalog, as
``paceline predict --trace`` does. Kernels of one block are drawn as one box.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cluster.devices import load_cluster
from paceline.predict.replay.replayed import ReplayedRank, ReplayedStep
from paceline.rehearse.prediction import config_on, predict_decided
from paceline.schedule.clock import Span
from pictures_svg import MARGIN, WIDTH, Picture

CONFIG = Path(__file__).parents[1] / "configs" / "gpt_7b.yaml"
_LEFT = MARGIN + 86
_SPACE = WIDTH - MARGIN - _LEFT
_PHASES = {"forward": "a", "backward": "b", "optimizer": "f"}
_COLLECTIVES = {"all_gather": "c", "reduce_scatter": "d", "all_reduce": "d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A box of a time line: seconds, its class, what stands in it, and what it says under the pointer."""

    start: float
    end: float
    kind: str
    label: str = ""
    says: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step, and the words above it."""

    title: str
    words: str
    step: ReplayedStep

    @property
    def rank(self) -> ReplayedRank:
        return self.step.longest


def dry_run(cluster: str, *overrides: str) -> ReplayedStep:
    """Runs a step of the config's engine without values, on a cluster of the catalog."""
    where = load_cluster(cluster)
    config, ranks = config_on(CONFIG, where, overrides=overrides)
    return predict_decided(config, where, ranks, keeps_spans=True)[1]


def compute_bars(spans: Iterable[Span]) -> list[Bar]:
    """Joins kernels of one block and phase that follow one another; what lies between blocks is a box of its own."""
    bars: list[Bar] = []
    for span in spans:
        if not span.stream.startswith("compute"):
            continue
        phase = span.stream.removeprefix("compute ")
        found = re.match(r"block (\d+) ", span.name)
        label, kind = (found[1] if found else ""), _PHASES[phase]
        last = bars[-1] if bars else None
        is_same = last is not None and last.kind == kind and (last.label == label or _is_copy(span, label))
        if last is not None and is_same and span.start - last.end < 2e-5:
            bars[-1] = replace(last, end=span.end)
        elif span.end - span.start > 1e-5:
            says = f"{phase} of block {label}" if label else phase
            bars.append(Bar(start=span.start, end=span.end, kind=kind, label=label, says=says))
    return bars


def _is_copy(span: Span, label: str) -> bool:
    """Whether a kernel belongs to what was before: copies into buckets and out of units, which are short."""
    return not label and span.end - span.start < 5e-4


def network_bars(spans: Iterable[Span]) -> Iterator[Bar]:
    """Iterates over the collectives of a rank."""
    for span in spans:
        if span.stream.startswith("lane"):
            kind = _COLLECTIVES[span.name.split()[0]]
            yield Bar(start=span.start, end=span.end, kind=kind, says=span.name.replace("_", "-"))


def waiting_bars(spans: Iterable[Span]) -> Iterator[Bar]:
    """Iterates over the moments in which the device waits for a collective."""
    for span in spans:
        if span.stream == "waits":
            yield Bar(start=span.start, end=span.end, kind="e", says=span.name.replace("_", "-"))


def _draw_bars(picture: Picture, y: float, bars: Iterable[Bar], scale: float, height: float = 22) -> None:
    for bar in bars:
        width = (bar.end - bar.start) * scale
        if width < 0.3:
            continue
        left = _LEFT + bar.start * scale
        picture.box(left, y, max(width - 0.5, 0.5), height, bar.kind, says=bar.says)
        if bar.label and width > 9:
            picture.text(left + width / 2, y + height / 2 + 4, bar.label, "tiny on mid")


def _draw_trace(picture: Picture, y: float, trace: Trace, scale: float) -> float:
    rank, spans = trace.rank, trace.rank.spans
    picture.text(MARGIN, y + 12, trace.title, "name ink")
    picture.text(WIDTH - MARGIN, y + 12, trace.words, "small soft end")
    rows = (
        ("computes", compute_bars(spans)),
        ("network", list(network_bars(spans))),
        ("waits", list(waiting_bars(spans))),
    )
    for place, (name, bars) in enumerate(rows):
        top = y + 24 + 27 * place
        picture.text(MARGIN, top + 15, name, "small soft")
        picture.box(_LEFT, top, rank.seconds * scale, 22, "none")
        _draw_bars(picture, top, bars, scale)
    return y + 24 + 27 * 3 + 18


def _draw(picture: Picture, traces: Sequence[Trace], legend: Sequence[tuple[str, str]]) -> str:
    """Draws traces below one another on one time scale."""
    longest = max(trace.step.seconds for trace in traces)
    scale = _SPACE / longest
    y = picture.legend(MARGIN, picture.top + 8, legend) + 6
    for trace in traces:
        y = _draw_trace(picture, y, trace, scale)
    picture.ruler(_LEFT, y, _SPACE, longest * 1000, "ms")
    return picture.svg(y + 34)


def _facts(step: ReplayedStep) -> str:
    rank = step.longest
    whole = sum(rank.communication.values())
    shown = f"{rank.exposed * 1000:.1f} of {whole * 1000:.1f} ms of communication exposed"
    return f"step {step.seconds * 1000:.1f} ms; {shown}"


DDP = (
    "parallel.strategy=ddp",
    "model.size=gpt-1.1b",
    "model.layers=8",
    "data.context=2048",
    "train.global_batch=32",
    "train.microbatch=4",
)
DDP_CLUSTER = "1x h800-8x"


def overlap_traces() -> list[Trace]:
    """Makes the steps of overlap.svg."""
    cases = (
        ("After backward", ("comm.overlap=false", "comm.bucket_mb=100")),
        ("Under backward, buckets of 100 MiB", ("comm.overlap=true", "comm.bucket_mb=100")),
        ("Under backward, buckets of 1 GiB", ("comm.overlap=true", "comm.bucket_mb=1024")),
    )
    found = [(title, dry_run(DDP_CLUSTER, *DDP, *more)) for title, more in cases]
    return [Trace(title=title, words=_facts(step), step=step) for title, step in found]


def draw_overlap() -> str:
    """Draws overlap.svg."""
    picture = Picture(
        "DDP: gradients are all-reduced in buckets while backward still runs",
        "One step of a GPT with 8 blocks on 8 GPUs, three times, on one time scale. A number in a box is the block. "
        "Backward runs from the last block to the first; a bucket that is full leaves at once. The red row is exposed "
        "communication: the optimizer cannot start before the last bucket is back.",
        f"dry runs of DDP on {DDP_CLUSTER}",
    )
    legend = [
        ("a", "forward"),
        ("b", "backward"),
        ("d", "all-reduce of a bucket"),
        ("e", "exposed"),
        ("f", "optimizer"),
        ("none", "idle"),
    ]
    return _draw(picture, overlap_traces(), legend)


FSDP = ("parallel.strategy=fsdp", "model.layers=6", "train.global_batch=8", "train.microbatch=1")
FSDP_CLUSTERS = {"1x dgx-h100": "8 x H100, NVLink 4", "1x h800-8x": "8 x H800, a slower NVLink"}


def fsdp_traces() -> list[Trace]:
    """Makes the steps of fsdp-timeline.svg."""
    found = {title: dry_run(cluster, *FSDP) for cluster, title in FSDP_CLUSTERS.items()}
    return [Trace(title=title, words=_facts(step), step=step) for title, step in found.items()]


def draw_fsdp_timeline() -> str:
    """Draws fsdp-timeline.svg."""
    picture = Picture(
        "FSDP: the next block is gathered while this one computes",
        "One step of a GPT with 6 blocks of the width of gpt-7b, on one time scale. A number in a box is the block. "
        "Each block is gathered before its forward and again before its backward, but for the last one, which backward "
        "needs at once. The gradients of a block are reduce-scattered after it. The red row is exposed communication: "
        "nothing was left to compute meanwhile.",
        f"dry runs of FSDP on {' and '.join(FSDP_CLUSTERS)}",
    )
    legend = [
        ("a", "forward"),
        ("b", "backward"),
        ("c", "all-gather of parameters"),
        ("d", "reduce-scatter of gradients"),
        ("e", "exposed"),
        ("f", "optimizer"),
        ("none", "idle"),
    ]
    return _draw(picture, fsdp_traces(), legend)


READ = ("parallel.strategy=ddp", "model.compile=false", "comm.bucket_mb=100")
READ_CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "1. It computes": (
        "1x dgx-h100",
        ("model.size=gpt-1.1b", "model.layers=6", "data.context=2048", "train.global_batch=32", "train.microbatch=4"),
    ),
    "2. It waits for communication": (
        "1x a100-pcie-8x",
        ("model.size=gpt-1.1b", "model.layers=6", "data.context=1024", "train.global_batch=8", "train.microbatch=1"),
    ),
    "3. It waits for the host, then for communication": (
        "1x dgx-h100",
        ("model.size=gpt-124m", "model.layers=6", "data.context=256", "train.global_batch=8", "train.microbatch=1"),
    ),
}


def draw_read_timeline() -> str:
    """Draws read-timeline.svg: three steps, each on a time scale of its own."""
    picture = Picture(
        "Read a time line: what is the step waiting for?",
        "Three steps of data parallelism on 8 GPUs, each on a time scale of its own. Look at the upper row first. No "
        "gaps: the step computes. A gap above a red box: it waits for communication. A gap without one: the device "
        "waits for the host, which starts its kernels.",
        "dry runs of DDP on " + " and ".join(sorted({cluster for cluster, _ in READ_CASES.values()})),
    )
    legend = [
        ("a", "forward"),
        ("b", "backward"),
        ("d", "all-reduce"),
        ("e", "exposed"),
        ("f", "optimizer"),
        ("none", "idle"),
    ]
    y = picture.legend(MARGIN, picture.top + 8, legend) + 6
    for title, (cluster, words) in READ_CASES.items():
        step = dry_run(cluster, *READ, *words)
        seconds = step.longest.seconds
        busy = sum(bar.end - bar.start for bar in compute_bars(step.longest.spans)) / seconds
        words = f"step {1e3 * step.seconds:.1f} ms; computes {busy:.0%}, exposed {step.longest.exposed / seconds:.0%}"
        y = _draw_trace(picture, y, Trace(title=title, words=words, step=step), _SPACE / seconds)
        picture.ruler(_LEFT, y - 10, _SPACE, seconds * 1000, "ms")
        y += 24
    return picture.svg(y + 4)
