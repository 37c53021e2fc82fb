"""From a config to a plan: steps, epochs and samples that agree with the order of the data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import plan_of

from paceline.config import Config, config_from_dict
from paceline.data.order import DataOrder
from paceline.errors import ConfigError
from paceline.plan.plan import Plan
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import with_memory
from paceline.schedule.schedules import make_schedule
from paceline.schedule.text import format_csv


def make_config(*, last_batch: str = "keep", **train: Any) -> Config:
    return config_from_dict(
        {
            "name": "a-run",
            "model": {"kind": "mlp"},
            "data": {"kind": "digits", "last_batch": last_batch},
            "train": train,
        }
    )


def plan(samples: int, *, ranks: int = 1, **values: Any) -> Plan:
    return plan_of(make_config(**values), ranks=ranks, train_samples=samples, eval_samples=7)


def test_epochs_become_steps() -> None:
    made = plan(50, epochs=3.0, global_batch=8)
    assert (made.steps_per_epoch, made.total_steps, made.total_samples) == (7, 21, 150)


def test_dropped_batches_are_not_counted() -> None:
    made = plan(50, epochs=3.0, global_batch=8, last_batch="drop")
    assert (made.steps_per_epoch, made.total_steps, made.total_samples) == (6, 18, 144)


def test_steps_are_taken_as_they_are() -> None:
    made = plan(50, steps=9, global_batch=8)
    assert (made.steps_per_epoch, made.total_steps, made.total_samples) == (7, 9, 50 + 2 * 8)


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 5), (1.5, 15), (0.01, 1), (2.0, 20), (0.58, 6), (0.54, 5)])
def test_parts_of_an_epoch_make_at_least_one_step(epochs: float, steps: int) -> None:
    assert plan(80, epochs=epochs, global_batch=8).total_steps == steps


def test_a_run_of_no_given_length_lasts_one_epoch() -> None:
    assert plan(80, global_batch=8).total_steps == 10


def test_a_batch_larger_than_the_data_is_one_step_an_epoch() -> None:
    made = plan(5, epochs=2.0, global_batch=8)
    assert (made.steps_per_epoch, made.total_steps, made.total_samples) == (1, 2, 10)


def test_the_plan_says_who_computes_what() -> None:
    made = plan(50, ranks=4, global_batch=16, microbatch=2)
    assert made.layout.axes == {"replicate": 4}
    assert (made.batch.global_batch, made.batch.microbatch, made.batch.accumulate, made.batch.ranks) == (16, 2, 2, 4)
    assert (made.name, made.layout.strategy, made.train_samples, made.eval_samples) == ("a-run", "ddp", 50, 7)


@pytest.mark.parametrize(
    ("parallel", "node_ranks", "axes"),
    [
        ({"strategy": "ddp"}, None, {"replicate": 4}),
        ({"strategy": "zero1"}, None, {"replicate": 1, "shard": 4}),
        ({"strategy": "fsdp"}, 2, {"replicate": 1, "shard": 4}),
        ({"strategy": "hybrid", "shard_ranks": 2}, None, {"replicate": 2, "shard": 2}),
        ({"strategy": "hybrid"}, 2, {"replicate": 2, "shard": 2}),
    ],
)
def test_the_mesh_says_who_shares(parallel: dict[str, Any], node_ranks: int | None, axes: dict[str, int]) -> None:
    config = config_from_dict({"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "parallel": parallel})
    made = plan_of(config, ranks=4, train_samples=50, eval_samples=7, node_ranks=node_ranks)
    assert made.layout.axes == axes
    assert with_memory(made, config, None, "cpu").memory is None
    known = with_memory(made, config, describe_model(config, "cpu"), "cpu")
    values = json.loads(json.dumps(known.to_json()))
    assert values["memory"]["device_bytes"] == sum(
        value for name, value in values["memory"].items() if name not in ("device_bytes", "host")
    )


def test_another_microbatch_keeps_the_global_batch() -> None:
    made = plan(50, ranks=2, global_batch=24)
    cut = made.with_microbatch(4)
    assert (cut.batch.microbatch, cut.batch.accumulate, cut.batch.global_batch) == (4, 3, 24)
    assert cut.with_microbatch(made.layout.microbatch) == made


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"global_batch = 10 is not a multiple of parallel\.ranks = 4"):
        plan(50, ranks=4, global_batch=10)


def test_a_plan_is_plain_data() -> None:
    made = plan(50, ranks=2, global_batch=8)
    values = json.loads(json.dumps(made.to_json()))
    assert values["mesh"] == {"replicate": 2}
    assert values["batch"] == dataclasses.asdict(made.batch)
    assert set(values) == {field.name for field in dataclasses.fields(Plan)} | {"mesh", "batch", "strategy"}
    assert Plan.from_json(values) == made


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, str, dict[str, Any]]:
    ranks = draw(st.integers(1, 8))
    global_batch = ranks * draw(st.integers(1, 12))
    samples = draw(st.integers(1, 300))
    last_batch = draw(st.sampled_from(["keep", "drop"])) if samples >= global_batch else "keep"
    length = draw(
        st.one_of(
            st.builds(lambda n: {"steps": n}, st.integers(1, 100)),
            st.builds(lambda n: {"epochs": float(n)}, st.integers(1, 6)),
        )
    )
    return samples, ranks, global_batch, last_batch, length


@given(runs())
def test_a_plan_agrees_with_the_order_of_the_data(run: tuple[int, int, int, str, dict[str, Any]]) -> None:
    samples, ranks, global_batch, last_batch, length = run
    made = plan(samples, ranks=ranks, global_batch=global_batch, last_batch=last_batch, **length)
    order = DataOrder(length=samples, global_batch=global_batch, seed=0, drop_last=last_batch == "drop")
    assert made.steps_per_epoch == order.steps_per_epoch
    position = 0
    for _ in range(made.total_steps):
        position = order.batch_at(position).next_position
    assert made.total_samples == position
    if "epochs" in length:
        assert made.total_samples == length["epochs"] * order.samples_per_epoch


@given(runs(), st.integers(1, 8))
def test_the_length_of_a_run_does_not_depend_on_the_ranks(
    run: tuple[int, int, int, str, dict[str, Any]], other: int
) -> None:
    samples, ranks, global_batch, last_batch, length = run
    batch = global_batch * other  # divides among both numbers of ranks
    last_batch = last_batch if samples >= batch else "keep"
    plans = [
        plan(samples, ranks=each, global_batch=batch, last_batch=last_batch, **length) for each in (1, ranks, other)
    ]
    assert len({(p.total_steps, p.total_samples, p.steps_per_epoch) for p in plans}) == 1


def split_config(**parallel: Any) -> Config:
    return config_from_dict(
        {
            "model": {"kind": "gpt", "size": "gpt-nano"},
            "data": {"kind": "synthetic_tokens", "context": 16},
            "parallel": parallel,
            "train": {"global_batch": 16},
        }
    )


@pytest.mark.parametrize(
    ("parallel", "ranks", "axes"),
    [
        ({}, 4, {"replicate": 4}),
        ({"pipeline": 2}, 2, {"pipeline": 2, "replicate": 1}),
        ({"tensor": 2}, 4, {"replicate": 2, "tensor": 2}),
        (
            {"pipeline": 2, "tensor": 2, "strategy": "zero1"},
            8,
            {"pipeline": 2, "replicate": 1, "shard": 2, "tensor": 2},
        ),
        ({"pipeline": 2, "strategy": "hybrid", "shard_ranks": 2}, 8, {"pipeline": 2, "replicate": 2, "shard": 2}),
    ],
)
def test_a_split_model_has_axes_of_its_own(parallel: dict[str, Any], ranks: int, axes: dict[str, int]) -> None:
    config = split_config(**parallel)
    made = plan_of(config, ranks=ranks, train_samples=64, eval_samples=8)
    assert made.layout.axes == axes
    assert list(made.layout.axes) == list(axes)
    assert made.layout.mesh.size == ranks
    data = ranks // (parallel.get("pipeline", 1) * parallel.get("tensor", 1))
    assert (made.batch.global_batch, made.batch.ranks) == (16, data)
    assert made.batch.accumulate == parallel.get("pipeline", 1)
    model = describe_model(config, "cpu")
    whole = split_config()
    plain = plan_of(whole, ranks=1, train_samples=64, eval_samples=8)
    memory, most = (with_memory(*each, model, "cpu").memory for each in ((made, config), (plain, whole)))
    assert memory is not None
    assert most is not None
    assert (memory.parameters < most.parameters) == (data != ranks)


def test_a_schedule_of_ones_own_is_not_estimated(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(format_csv(make_schedule("1f1b", 2, 4)))
    config = split_config(pipeline=2, schedule_file=str(path))
    made = plan_of(config, ranks=2, train_samples=64, eval_samples=8)
    assert with_memory(made, config, describe_model(config, "cpu"), "cpu").memory is None
