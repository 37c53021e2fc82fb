"""The memory table: the design's numbers, and what real engines hold, counted by storage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, OptimConfig, config_from_dict, layout_of
from paceline.data.datasets import DataShape
from paceline.engines.apply import parallelize
from paceline.models.registry import build_model
from paceline.plan.layout import Compression, Layout, Offload, Strategy
from paceline.plan.plan import MemoryEstimate
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory, largest_microbatch, optimizer_slots
from paceline.train.assemble import build_compressor
from paceline.train.loss import CrossEntropy
from paceline.train.optim import build_optimizer
from paceline.units import MIB

P = 1_000_000
MODEL = ModelFacts(
    blocks=(BlockFacts(parameters=200_000, saved_bytes=1000.0, input_bytes=100.0, product_bytes=400.0),) * 4,
    root=BlockFacts(parameters=200_000, saved_bytes=50.0),
    buffer_bytes=64,
    temporary_bytes=10.0,
)


ADAM = StateFacts()


def shared(strategy: Strategy, ranks: int = 1, *offload: str, **options: Any) -> Layout:
    """A layout of whole models, whose states so many ranks share."""
    return Layout(strategy=strategy, data=ranks, shard_ranks=ranks, offload=Offload.of(offload), **options)


def need_of(layout: Layout, model: ModelFacts = MODEL, states: StateFacts = ADAM) -> MemoryEstimate:
    return estimate_memory(model, layout, states)


def states(need: MemoryEstimate) -> float:
    return (need.parameters + need.gradients + need.optimizer) / P


@pytest.mark.parametrize(
    ("strategy", "group", "expected"),
    [
        ("ddp", 1, 16.0),
        ("zero1", 4, 8 + 8 / 4),
        ("zero2", 4, 4 + 12 / 4),
        ("fsdp", 4, 16 / 4),
        ("hybrid", 2, 16 / 2),
        ("zero1", 1, 16.0),
        ("fsdp", 1, 16.0),
    ],
)
def test_the_table_of_the_design(strategy: Strategy, group: int, expected: float) -> None:
    assert states(need_of(shared(strategy, group))) == expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", (2 + 4) + 4 + 8),
        ("zero1", (2 + 4 / 4) + 4 + 8 / 4),
        ("zero2", (2 + 4 / 4) + 4 / 4 + 8 / 4),
        ("fsdp", 16 / 4),
    ],
)
def test_masters(strategy: Strategy, expected: float) -> None:
    layout = shared(strategy, 1 if strategy == "ddp" else 4, precision="bf16_master")
    assert states(need_of(layout)) == expected


def test_optimizers_and_dtypes() -> None:
    assert [optimizer_slots(OptimConfig.model_validate(each)) for each in ({}, {"kind": "sgd"}, {"kind": "a:b"})] == [
        2,
        1,
        2,
    ]
    assert optimizer_slots(OptimConfig(kind="sgd", momentum=0.0)) == 0
    assert states(need_of(shared("ddp"), states=StateFacts(optimizer_slots=0, itemsize=8))) == 16
    in_blocks = 4 * sum(block.parameters for block in MODEL.blocks)
    for layout in (shared("ddp"), shared("zero1", 4), shared("fsdp", 4)):
        adamw, muon = (need_of(layout, states=StateFacts(fewer_in_blocks=fewer)).optimizer for fewer in (0, 1))
        assert adamw - muon == in_blocks // layout.shards


def test_full_sharding_gathers_the_root_and_two_units() -> None:
    layout = shared("fsdp", 4)
    gathered = 4 * (200_000 + 2 * 200_000)
    gradients = 4 * 2 * 200_000
    assert need_of(layout).temporary == 10 + gathered + gradients
    more = dataclasses.replace(layout, prefetch=2)
    assert need_of(more).temporary == 10 + gathered + 4 * 200_000 + gradients
    keeps = dataclasses.replace(layout, reshard_after_forward=False)
    assert need_of(keeps).temporary == 10 + 4 * P + gradients
    halves = dataclasses.replace(layout, precision="bf16_master")
    assert need_of(halves).temporary == 10 + gathered // 2 + gradients
    assert need_of(dataclasses.replace(layout, precision="fp8")) == need_of(halves)
    assert need_of(shared("fsdp")).temporary == 10


def test_buckets_of_zero_hold_a_tensor_at_least() -> None:
    wide = dataclasses.replace(
        MODEL, blocks=tuple(dataclasses.replace(block, largest_parameter=100_000) for block in MODEL.blocks)
    )
    ends = dataclasses.replace(wide, root=dataclasses.replace(MODEL.root, largest_parameter=150_000))
    small = shared("zero1", 4, bucket_mb=1000 / MIB)
    assert need_of(small).temporary == 10 + 2 * 1000
    assert need_of(small, wide).temporary == 10 + 4 * 2 * 100_000
    assert need_of(small, ends).temporary == 10 + 4 * (100_000 + 150_000)
    slices = dataclasses.replace(small, strategy="zero2", offload=Offload(optimizer=True))
    assert need_of(slices, wide).temporary == 10 + 4 * 2 * 100_000 * 5 // 4
    alone = dataclasses.replace(small, shard_ranks=1, data=1)
    assert need_of(alone, wide).temporary == 10  # which watches no gradients, unless it has something to move
    moved = dataclasses.replace(alone, offload=Offload(optimizer=True))
    assert need_of(moved, wide).temporary == 10 + 4 * 2 * 100_000


def test_offload_moves_to_the_host() -> None:
    plain = need_of(shared("fsdp", 4))
    layout = shared("fsdp", 4, "optimizer")
    need = need_of(layout)
    assert (need.parameters, need.gradients, need.optimizer) == (P, 0, 0)  # its slice stays, to be gathered from
    assert need.host == 4 * P
    every = need_of(shared("fsdp", 4, "optimizer", "gradients", "parameters"))
    assert (every.parameters, every.host) == (0, 4 * P)
    on_zero = need_of(shared("zero1", 4, "optimizer"))
    assert (on_zero.parameters, on_zero.optimizer) == (5 * P, 0)  # whole, and a slice to gather from
    assert (on_zero.gradients, on_zero.host) == (4 * P, 4 * P)  # whole in its buckets, and a slice on the host
    halves = dataclasses.replace(layout, strategy="zero2", precision="bf16_master")
    on_zero = need_of(halves)
    assert (on_zero.parameters, on_zero.gradients) == (2 * P + P // 2, 0)
    assert on_zero.host == 4 * P + P // 2  # with the slice that is copied from
    gradients = need_of(shared("fsdp", 4, "gradients"))
    assert (gradients.parameters, gradients.gradients, gradients.host) == (plain.parameters, 0, P)
    assert need_of(layout, states=StateFacts(device="cpu")).host == 0
    alone = shared("fsdp", 1, "gradients")
    assert need_of(alone).gradients == 4 * P  # those of the parameters themselves, which stay


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ("none", 8 * (50 + 4 * 1000)),
        ("full", 8 * (50 + 4 * 100 + 900)),
        ("matmuls", 8 * (50 + 4 * 500 + 500)),
        ("every_2", 8 * (50 + 2 * 100 + 2 * 1000 + 900)),
        ("every_4", 8 * (50 + 100 + 3 * 1000 + 900)),
    ],
)
def test_checkpointing(checkpoint: str, expected: float) -> None:
    layout = Layout(microbatch=8, checkpoint_activations=checkpoint)
    assert estimate_memory(MODEL, layout, StateFacts()).activations == expected


@given(
    strategy=st.sampled_from(["ddp", "zero1", "zero2", "fsdp"]),
    budget=st.integers(0, 10**9),
    microbatch=st.integers(1, 1000),
)
def test_the_largest_microbatch_is_the_largest(strategy: Strategy, budget: int, microbatch: int) -> None:
    layout = shared(strategy, 1 if strategy == "ddp" else 8)
    found = largest_microbatch(MODEL, layout, ADAM, budget)

    def need(samples: int) -> int:
        return need_of(dataclasses.replace(layout, microbatch=samples)).device_bytes

    assert need(found) <= budget or found == 1
    assert need(found + 2) > budget  # one sample of rounding
    assert need(microbatch) <= need(microbatch + 1)


@given(ranks=st.sampled_from([1, 2, 4, 8, 64]), offload=st.booleans())
def test_sharing_more_never_takes_more(ranks: int, offload: bool) -> None:
    kept = ("optimizer",) if offload else ()
    sharded: tuple[Strategy, ...] = ("zero1", "zero2", "fsdp")
    needs = [states(need_of(shared(strategy, ranks, *kept))) for strategy in sharded]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] <= 16


# Real engines.

GPT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 64, "context": 8},
    "data": {"kind": "synthetic_tokens", "context": 8, "vocab_size": 64},
}
TOLERANCE = 0.01  # padding: every slice and every view begins on a cache line


def make_config(strategy: str, precision: str, optim: dict[str, Any]) -> Config:
    parallel = {"strategy": strategy, **({"shard_ranks": 2} if strategy == "hybrid" else {})}
    return config_from_dict({**GPT, "parallel": parallel, "train": {"precision": precision}, "optim": optim})


def held(comm: Communicator, config: Config) -> dict[str, int]:
    """Trains one step and counts what lasts, by storage."""
    torch.manual_seed(0)
    model = build_model(config.model, DataShape(kind="tokens", vocab_size=64, context=8))
    engine = parallelize(
        model,
        comm,
        config.parallel.strategy,
        precision=config.train.precision,
        shard_ranks=config.parallel.shard_ranks or 0,
    )
    optimizer = build_optimizer(config.optim, engine.named_parameters())
    tokens = torch.randint(64, (1, 8))
    with engine.precision.context(comm.device):
        loss = CrossEntropy(8.0)(engine, (tokens, tokens)).total
    loss.backward()  # type: ignore[no-untyped-call]
    updated = list(engine.parameters())
    gradients = [parameter.grad for parameter in updated if parameter.grad is not None]
    found = {
        "gradients": storage_bytes(gradients),
        "parameters": storage_bytes([*updated, *model.parameters()]),
        "buffers": storage_bytes(list(model.buffers())),
    }
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
    return {**found, "optimizer": storage_bytes(kept)}


def storage_bytes(tensors: list[Any]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.some(3)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 says so once
@pytest.mark.parametrize(
    ("strategy", "precision", "optim"),
    [
        ("ddp", "fp32", {}),
        ("zero1", "fp32", {}),
        ("zero2", "fp32", {}),
        ("fsdp", "fp32", {}),
        ("hybrid", "fp32", {}),
        ("ddp", "bf16_master", {}),
        ("zero1", "bf16_master", {}),
        ("fsdp", "bf16_master", {}),
        ("zero2", "fp32", {"kind": "sgd"}),
        ("fsdp", "fp32", {"kind": "sgd", "momentum": 0.0}),
    ],
)
def test_engines_hold_what_is_estimated(strategy: str, precision: str, optim: dict[str, Any]) -> None:
    config = make_config(strategy, precision, optim)
    model = describe_model(config, "cpu")
    assert model is not None
    layout = dataclasses.replace(layout_of(config, 4), microbatch=1)
    assert layout.shards == {"ddp": 1, "hybrid": 2}.get(strategy, 4)
    need = need_of(layout, model, StateFacts.of(config, "cpu"))
    for found in run_virtual(lambda comm: held(comm, config), ranks=4):
        for category, num_bytes in found.items():
            assert num_bytes == pytest.approx(getattr(need, category), rel=TOLERANCE, abs=2048), category


def owed(comm: Communicator, config: Config) -> int:
    """Trains two steps, and counts what compression keeps until the third."""
    torch.manual_seed(0)
    model = build_model(config.model, DataShape(kind="tokens", vocab_size=64, context=8))
    compressor = build_compressor(layout_of(config))
    assert compressor is not None
    engine = parallelize(model, comm, layout=layout_of(config, comm.size), compressor=compressor)
    for _ in range(2):
        tokens = torch.randint(64, (1, 8))
        CrossEntropy(8.0)(engine, (tokens, tokens)).total.backward()  # type: ignore[no-untyped-call]
    return sum(each.nbytes for each in compressor.held())


@pytest.mark.some(2)
@pytest.mark.parametrize("strategy", ["ddp", "hybrid"])
@pytest.mark.parametrize(
    "compression",
    [
        {"policy": "topk"},
        {"policy": "powersgd", "factor_rank": 4},
        {"policy": "powersgd", "error_feedback": False},
        {"policy": "sign", "error_feedback": False},
    ],
    ids=lambda chosen: "-".join(str(value) for value in chosen.values()),
)
def test_compression_keeps_what_is_estimated(strategy: str, compression: dict[str, Any]) -> None:
    parallel = {"strategy": strategy, **({"shard_ranks": 2} if strategy == "hybrid" else {})}
    config = config_from_dict({**GPT, "parallel": parallel, "comm": {"compression": compression}})
    model = describe_model(config, "cpu")
    assert model is not None
    group = 2 if strategy == "hybrid" else 1
    need = need_of(layout_of(config, 4), model, StateFacts.of(config, "cpu"))
    found = run_virtual(lambda comm: owed(comm, config), ranks=4)
    # Two slices that share a tensor both have a factor of it.
    assert sum(found) / 4 == pytest.approx(need.compression, rel=0.02 if group == 1 else 0.12, abs=16)


def test_without_compression_nothing_is_owed() -> None:
    plain = need_of(shared("ddp"))
    kept = need_of(shared("ddp", compression=Compression(policy="topk")))
    lost = need_of(shared("ddp", compression=Compression(policy="topk", error_feedback=False)))
    assert (plain.compression, kept.compression, lost.compression) == (0, 8 * P, 0)
    assert kept.device_bytes - plain.device_bytes == 8 * P + 4 * P  # what is owed, and the average of one bucket
    assert lost.device_bytes - plain.device_bytes == 4 * P + 4 * P  # the vectors, and the average of one bucket
