"""Predictions beside scaling figures that others claim: python bench/scaling_claims.py, for docs/scaling-claims.md.

The claims are typed in below as they were made: nobody here measured them. They name no batch, and no device (the third
names a device and no model), so that predictions are for devices and batches of our choice, with weak scaling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.cluster.devices import Cluster, load_cluster
from paceline.cluster.wires import collective_seconds, group_of
from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Compute, Running, Workload
from paceline.predict.formulas.step import predict
from paceline.search.candidates import TrainingTask
from paceline.search.scaling import resized
from paceline.search.search import search
from paceline_bench.scored.published import known_model

IMAGES_EACH = 128
SEQUENCES_EACH = 8  # a step
MICROBATCH = 4  # of them at once
TOKENS = 2048
LANGUAGE = ModelShape(layers=20, width=2048, heads=16, kv_heads=8, mlp_width=5632, vocab_size=32000)  # gpt-1.1b
STATE_BYTES = 16  # of a parameter: master, gradient, two moments

# GPUs, images/s, efficiency in %, communication in %.
RESNET = (
    (1, 1150, 100, 0.0),
    (2, 2250, 98, 3.2),
    (4, 4370, 95, 6.8),
    (8, 8510, 93, 9.5),
    (16, 16240, 89, 12.3),
    (32, 30720, 84, 14.8),
    (64, 56320, 78, 18.2),
    (128, 104960, 72, 22.1),
    (256, 184320, 63, 28.5),
)
# GPUs, tokens/s, GB a GPU, efficiency in %.
LANGUAGE_MODEL = ((8, 45000, 24, 95), (16, 88000, 18, 92), (32, 172000, 14, 89), (64, 332000, 11, 86))
# GPUs, speed against one GPU, efficiency in %; one GPU is claimed to take A10G_IMAGES a second.
A10G = ((1, 1.0, 100), (2, 1.9, 95), (4, 3.6, 90))
A10G_IMAGES = 408


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A prediction: samples (or tokens) a second, efficiency against the first of its row, bytes of a rank."""

    rate: float
    efficiency: float
    memory_bytes: float


def convolutional(cluster: Cluster, compute: Compute, counts: Iterable[int]) -> list[Point]:
    """ResNet-50 under data parallelism."""
    found = [predict(_images(count, compute), resized(cluster, count)) for count in counts]
    rates = [(each.samples_per_s, each.workload.layout.ranks, each.memory.device_bytes) for each in found]
    return list(_points(rates))


def language(cluster: Cluster, compute: Compute, counts: Iterable[int]) -> list[Point]:
    """The language model, fully sharded over all devices, from the plans of the search that fit."""
    rates = []
    for count in counts:
        task = TrainingTask(model=LANGUAGE, global_batch=SEQUENCES_EACH * count, seq_len=TOKENS, compute=compute)
        ranked = search(task, resized(cluster, count)).ranked
        best = next(each for each in ranked if _is_compared(each.layout, count))
        rates.append((best.tokens_per_s, count, best.memory_bytes))
    return list(_points(rates))


def _is_compared(layout: Layout, count: int) -> bool:
    is_sharded = layout.strategy == "fsdp" and layout.data == count
    return is_sharded and layout.microbatch == MICROBATCH and layout.checkpoint_activations == "none"


def _images(count: int, compute: Compute) -> Workload:
    return Workload(
        model=_resnet(), layout=Layout(microbatch=IMAGES_EACH).for_ranks(count), run=Running(seq_len=1, compute=compute)
    )


def _resnet() -> ModelShape:
    model = known_model("ResNet-50")
    assert model is not None
    return model


def _points(rates: Sequence[tuple[float, int, float]]) -> Iterator[Point]:
    first = rates[0][0] / rates[0][1]
    for rate, count, memory in rates:
        yield Point(rate=rate, efficiency=rate / count / first, memory_bytes=memory)


def all_reduce_ms(cluster: Cluster, count: int) -> float:
    """What the gradients of ResNet-50 in fp32 take as one all-reduce that nothing hides."""
    whole = resized(cluster, count)
    return 1e3 * collective_seconds("all_reduce", _resnet().params * 4, group_of(whole, count), whole)


# Tables.


def resnet_table() -> Iterator[str]:
    counts = [row[0] for row in RESNET]
    edr, slow = load_cluster("32x dgx-1"), load_cluster("32x dgx-1 over ethernet-25g")
    columns = [
        convolutional(edr, "fp16", counts),
        convolutional(slow, "fp16", counts),
        convolutional(load_cluster("32x dgx-a100"), "fp16", counts),
    ]
    yield (
        "| GPUs | claimed images/s | claimed efficiency | by its images/s | claimed communication "
        "| V100, 4 x 100 Gbit/s | V100, 25 Gbit/s | A100, 8 x 200 Gbit/s |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for place, (count, rate, efficiency, communication) in enumerate(RESNET):
        own = rate / count / RESNET[0][1]
        cells = "".join(f" {_cell(column[place])} |" for column in columns)
        yield f"| {count} | {rate:,} | {efficiency} % | {100 * own:.1f} % | {communication} % |{cells}"
    yield ""
    lost = IMAGES_EACH * (RESNET[-1][0] / RESNET[-1][1] - 1 / RESNET[0][1])
    yield (
        f"Claimed for 256 GPUs: {1e3 * lost:.0f} ms lost in a step of {IMAGES_EACH} images a GPU. One all-reduce of "
        f"all gradients, nothing hidden: {all_reduce_ms(edr, 256):.0f} ms at 4 x 100 Gbit/s, "
        f"{all_reduce_ms(slow, 256):.0f} ms at 25 Gbit/s a node."
    )


def language_table() -> Iterator[str]:
    counts = [row[0] for row in LANGUAGE_MODEL]
    a100 = language(load_cluster("8x dgx-a100"), "bf16", counts)
    v100 = language(load_cluster("8x dgx-1-32gb"), "fp16", counts)
    yield (
        "| GPUs | claimed tokens/s | claimed efficiency | tokens/s a GPU against 8 | claimed memory "
        "| A100 | A100 memory | V100 | V100 memory |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for (count, rate, memory, efficiency), *points in zip(LANGUAGE_MODEL, a100, v100, strict=True):
        own = 100 * rate / count / (LANGUAGE_MODEL[0][1] / LANGUAGE_MODEL[0][0])
        cells = "".join(f" {_cell(point)} | {point.memory_bytes / 1e9:.0f} GB |" for point in points)
        yield f"| {count} | {rate:,} | {efficiency} % | {own:.1f} % | {memory} GB |{cells}"
    yield ""
    flops = 6 * LANGUAGE.params * LANGUAGE_MODEL[0][1] / LANGUAGE_MODEL[0][0]
    shares = [100 * flops / load_cluster(name).device.peak("fp16") for name in ("dgx-a100", "dgx-1-32gb")]
    yield (
        f"Claimed for 8 GPUs: {flops / 1e12:.0f} TFLOP/s a GPU for {LANGUAGE.params / 1e9:.2f} B parameters, "
        f"{shares[0]:.0f} % of an A100's peak and {shares[1]:.0f} % of a V100's."
    )
    yield ""
    yield f"States of one model that would free as much memory: {', '.join(_implied_models())}."


def _implied_models() -> Iterator[str]:
    """States are shared by n ranks: going from n to 2 n frees S / 2 n of S bytes."""
    for (count, _, memory, _), (twice, _, less, _) in pairwise(LANGUAGE_MODEL):
        states = (memory - less) * twice
        yield f"{count} to {twice} GPUs {states} GB ({states / STATE_BYTES:.0f} B parameters)"


def a10g_table() -> Iterator[str]:
    counts = [row[0] for row in A10G]
    cluster = load_cluster("g5.12xlarge")
    columns = [convolutional(cluster, compute, counts) for compute in ("fp32", "fp16")]
    yield "| GPUs | claimed images/s | claimed efficiency | ResNet-50, fp32 | ResNet-50, mixed fp16 |"
    yield "|---|---|---|---|---|"
    for place, (count, speed, efficiency) in enumerate(A10G):
        cells = "".join(f" {_cell(column[place])} |" for column in columns)
        yield f"| {count} | {A10G_IMAGES * speed:,.0f} | {efficiency} % |{cells}"
    yield ""
    lost = 1e3 * IMAGES_EACH / A10G_IMAGES * (A10G[-1][0] / A10G[-1][1] - 1)
    yield (
        f"Claimed for 4 GPUs: {lost:.0f} ms lost in a step of {IMAGES_EACH} images a GPU. One all-reduce of "
        f"ResNet-50's gradients, nothing hidden: {all_reduce_ms(cluster, 4):.0f} ms."
    )


def _cell(point: Point) -> str:
    return f"{_rounded(point.rate):,} ({100 * point.efficiency:.0f} %)"


def _rounded(rate: float) -> int:
    """Three digits: more would pretend to an accuracy that no prediction here has."""
    size: int = 10 ** max(0, len(str(int(rate))) - 3)
    return round(rate / size) * size


TABLES = {
    "ResNet-50 on 1 to 256 GPUs": resnet_table,
    "A language model of more than 1 B parameters on 8 to 64 GPUs": language_table,
    "4 x A10G": a10g_table,
}


def main() -> None:
    for title, table in TABLES.items():
        print(f"{title}\n")
        print("\n".join(table()), end="\n\n")


if __name__ == "__main__":
    main()
