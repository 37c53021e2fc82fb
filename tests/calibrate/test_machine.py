"""A real, very short calibration: kernels in this process, and two ranks over shared memory and Gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gloo_pool import GlooPool

from paceline.calibrate.kernels import KernelFigures, Shapes, measure_kernels, shapes_for
from paceline.calibrate.machine import (
    LinkFigures,
    RankFigures,
    Wanted,
    combine_ranks,
    measure_machine,
    measure_rank,
    with_more_ranks,
)
from paceline.calibrate.timing import Stopwatch
from paceline.comm.base import Communicator
from paceline.errors import UsageError

SMALL = Shapes(
    products={"fp32": ((8, 8, 8), (16, 8, 4))}, attention=((1, 2, 16, 8),), stream_bytes=4096, linears=((16, 8, 4),)
)


def test_kernels_of_this_device_are_measured_and_settings_are_left_as_they_were() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    found = measure_kernels(torch.device("cpu"), SMALL, Stopwatch(samples=2), with_compiled=False)
    assert [(rate.kind, rate.sizes, rate.layout) for rate in found.rates] == [
        ("matmul", (8, 8, 8), ""),
        ("matmul", (16, 8, 4), ""),
        ("matmul", (16, 8, 4), "nt"),
        ("matmul", (16, 4, 8), "nn"),
        ("matmul", (4, 16, 8), "tn"),
        ("attention", (1, 2, 16, 8), ""),
        ("attention_backward", (1, 2, 16, 8), ""),
    ]
    assert min(rate.flops for rate in found.rates) > 0
    assert min(found.memory_bandwidth, found.launch_s) > 0
    assert found.compiled_launch_s is None
    assert found.families is None
    products = {"fp32 8x8x8", "fp32 16x8x4", "fp32 16x8x4 nt", "fp32 16x4x8 nn", "fp32 4x16x8 tn"}
    attention = {"attention 1x2x16x8", "attention 1x2x16x8 backward"}
    assert set(found.spreads) == products | attention | {"memory", "launches"}
    assert torch.backends.cuda.matmul.allow_tf32 == before


WANTED = Wanted(ranks=2, shapes=SMALL, sizes=(1024, 65536), samples=2, with_compiled=False, accepts_noise=True)


def measure(comm: Communicator) -> RankFigures:
    return measure_rank(comm, WANTED)


@pytest.mark.exhaustive
def test_ranks_measure_their_links_together(gloo_pool: GlooPool) -> None:
    found = combine_ranks(gloo_pool.run(measure, ranks=2), WANTED, threads=1)
    assert (found.ranks, found.threads, found.device) == (2, 1, "cpu")
    assert set(found.links) == {"shared_memory", "loopback"}
    for link in found.links.values():
        assert min(link.bandwidth, link.latency_s) > 0
        assert [size for size, _ in link.points] == [1024, 65536]
        assert link.by_ranks == {2: link.points}
        assert link.busy > 0


def test_links_learn_what_more_ranks_take() -> None:
    link = LinkFigures(
        latency_s=1e-5, bandwidth=1e9, worst=0.0, points=((8, 1.0),), spreads={}, by_ranks={2: ((8, 1.0),)}
    )
    more = replace(link, by_ranks={4: ((8, 3.0),)})
    found = with_more_ranks({"loopback": link, "shared_memory": link}, {"loopback": more})
    assert found["loopback"].by_ranks == {2: ((8, 1.0),), 4: ((8, 3.0),)}
    assert found["shared_memory"] == link


def test_noise_is_refused_unless_it_is_taken() -> None:
    kernels = KernelFigures(
        rates=(), memory_bandwidth=1.0, launch_s=1.0, compiled_launch_s=None, spreads={"memory": 0.5}
    )
    found = [RankFigures(share=1.0, kernels=kernels), RankFigures(share=0.95, kernels=kernels)]
    assert combine_ranks(found, WANTED, threads=1).spread == 0.5
    with pytest.raises(UsageError, match=r"too noisy.* spread by 50 % .*the widest: memory 50 %.* 95 % of the time"):
        combine_ranks(found, replace(WANTED, accepts_noise=False), threads=1)


def test_a_processor_that_others_use_is_told_without_any_samples() -> None:
    with pytest.raises(UsageError, match="to be measured: a thread had the processor 40 % of the time"):
        combine_ranks([RankFigures(share=0.4)], WANTED, threads=1)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Wanted(device="tpu"), "cpu or cuda"),
        (Wanted(ranks=10_000), "ranks on .* cores"),
        (Wanted(device="cuda", ranks=10_000), "10000 ranks on"),
    ],
)
def test_what_cannot_be_measured_is_refused(wanted: Wanted, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        measure_machine(wanted)


def test_bf16_is_measured_like_fp32_where_the_processor_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.calibrate.kernels.bf16_instructions", tuple)
    emulated = shapes_for("cpu").products
    assert len(emulated["bf16"]) < len(emulated["fp32"])
    monkeypatch.setattr("paceline.calibrate.kernels.bf16_instructions", lambda: ("amx_bf16",))
    assert shapes_for("cpu").products["bf16"] == emulated["fp32"]
