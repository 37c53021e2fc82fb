"""The dry run issues what real ranks issue, holds what they hold, and tells of models that it cannot trace."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from program_counts import count_bytes, count_operations, events_of, kernels_of
from real_traffic import issued_by_real_ranks
from torch import nn

from measures.predict import device_families
from paceline.cluster.devices import load_cluster
from paceline.config import Config, config_from_dict, layout_of
from paceline.errors import UsageError
from paceline.models.registry import build_model
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import StateFacts, estimate_memory
from paceline.predict.replay.program import Issue, Program, Run, Wait, counted
from paceline.predict.replay.replay import replay
from paceline.rehearse.dryrun.record import record_stages
from paceline.rehearse.dryrun.recorder import NoValues
from paceline.train.assemble import build_workload

RANKS = 4


def record(config: Config, **options: Any) -> Program:
    """Records the one rank that a model without stages has to run."""
    (program,) = record_stages(config, **options)
    return program


def make_config(**parallel: Any) -> Config:
    train = parallel.pop("train", {})
    memory = parallel.pop("memory", {})
    model = parallel.pop("model", {})
    return config_from_dict(
        {
            "name": "dry",
            "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 32, "context": 16, "tied": True, "dropout": 0.0}
            | model,
            "data": {"kind": "synthetic_tokens", "vocab_size": 64, "context": 16, "samples": 64},
            "parallel": {"ranks": RANKS, **parallel},
            "train": {"steps": 2, "global_batch": 16, "accumulate": 2, **train},
            "optim": {"kind": "adamw", "lr": 1e-3, "clip_norm": 1.0},
            "comm": {"bucket_mb": 0.05, "first_bucket_mb": 0.02},  # whose last bucket is not cut on CPUs either
            "memory": memory,
        }
    )


@cache
def recorded(strategy: str) -> Program:
    return record(make_config(strategy=strategy, **({"shard_ranks": 2} if strategy == "hybrid" else {})), ranks=RANKS)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.exhaustive), "zero2", "fsdp", "hybrid"]
)
def test_a_dry_rank_issues_what_a_real_one_does(strategy: str) -> None:
    extra = {"shard_ranks": 2} if strategy == "hybrid" else {}
    config = make_config(strategy=strategy, **extra)
    program = recorded(strategy)
    operations, num_bytes = issued_by_real_ranks(config, RANKS)[0]
    assert count_operations(program) == operations
    assert count_bytes(program) == num_bytes
    assert sum(num_bytes.values()) > 0


def test_stages_and_tensor_ranks_issue_what_real_ones_do() -> None:
    config = make_config(strategy="ddp", pipeline=2, tensor=2)
    programs = record_stages(config, ranks=RANKS)
    real = issued_by_real_ranks(config, RANKS)
    assert [program.rank for program in programs] == [0, 2]
    for program in programs:
        assert (count_operations(program), count_bytes(program)) == real[program.rank]
    assert count_operations(programs[0])["send"]
    assert count_operations(programs[1])["recv"]


@pytest.mark.exhaustive
def test_the_last_rank_of_the_last_stage_can_be_recorded() -> None:
    config = make_config(strategy="zero1", pipeline=2, tensor=2)
    first, second = record_stages(config, ranks=RANKS, rank=3)
    assert [(first.rank, first.stage), (second.rank, second.stage)] == [(1, 0), (3, 1)]
    with pytest.raises(UsageError, match="4"):
        record_stages(config, ranks=RANKS, rank=4)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_states_take_the_memory_of_the_estimate(strategy: str) -> None:
    config = make_config(strategy=strategy)
    program = recorded(strategy)
    facts = describe_model(config, "cuda")
    assert facts is not None
    layout = layout_of(config, RANKS)
    assert layout.shards == (1 if strategy == "ddp" else RANKS)
    expected, peak = estimate_memory(facts, layout, StateFacts.of(config, "cuda")), program.peak_memory()
    assert peak["parameters"] == pytest.approx(expected.parameters, rel=0.03)
    assert peak["optimizer"] == pytest.approx(expected.optimizer, rel=0.03)
    total = sum(peak.values())
    assert total == pytest.approx(expected.device_bytes - expected.framework, rel=0.25)


def test_parameters_and_optimizer_are_counted_to_the_byte() -> None:
    config = make_config(strategy="ddp")
    program = recorded("ddp")
    model = build_model(config.model, build_workload(config).data.shape)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    steps = 4 * len(list(model.parameters()))
    assert program.resident["parameters"] == size
    assert program.resident["optimizer"] == 2 * size + steps


def test_checkpointing_trades_activations_for_kernels() -> None:
    plain = recorded("ddp")
    again = record(make_config(strategy="ddp", memory={"checkpoint_activations": "full"}), ranks=RANKS)
    assert again.peak_memory()["activations"] < 0.6 * plain.peak_memory()["activations"]
    assert sum(k.flops for k in kernels_of(again)) > 1.2 * sum(k.flops for k in kernels_of(plain))
    assert again.model_flops == plain.model_flops


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_flops_of_a_mixture_are_those_of_its_active_experts(strategy: str, precision: str) -> None:
    """Beside a GPT whose MLPs are as wide as all that a token passes; the router has three products more."""
    train = {"precision": precision}
    dense = make_config(strategy=strategy, train=train, model={"mlp_width": 3 * 24})
    experts = {"experts": 8, "active": 2, "shared_experts": 1, "expert_width": 24}
    mixture = make_config(strategy=strategy, train=train, model=experts)
    plain, found = (record(config, ranks=RANKS) for config in (dense, mixture))
    routers = (
        3 * 2 * 2 * 2 * (2 * 16) * 32 * 8
    )  # passes, microbatches, layers, a multiplication, tokens, width, experts
    assert sum(k.flops for k in kernels_of(found)) - sum(k.flops for k in kernels_of(plain)) == routers
    size = found.resident["parameters"]
    facts = describe_model(mixture, "cuda")
    assert facts is not None
    assert size == pytest.approx(facts.parameters * 4 / (RANKS if strategy == "fsdp" else 1), rel=0.01)


def test_flops_are_those_of_the_model() -> None:
    program = recorded("ddp")
    shape = build_model(make_config().model, build_workload(make_config()).data.shape)
    matrices = sum(p.numel() for name, p in shape.named_parameters() if p.ndim == 2)  # the tied one is used as head
    tokens, layers, width, context = 16 / RANKS * 16, 2, 32, 16
    assert program.model_flops == pytest.approx(tokens * (6 * matrices + 6 * layers * width * context), rel=0.02)


def test_attention_is_one_kernel_each_way() -> None:
    program = recorded("ddp")
    families = Counter(kernel.family for kernel in kernels_of(program))
    assert families["attention"] == families["attention_backward"] == 2 * 2  # blocks x microbatches


def test_autocast_computes_products_in_half_precision() -> None:
    program = record(make_config(strategy="ddp", train={"precision": "bf16"}), ranks=RANKS)
    assert {kernel.dtype for kernel in kernels_of(program) if kernel.family == "matmul"} == {"bf16"}
    assert program.dtype == "bf16"


def test_blocks_have_their_kernels_in_both_directions() -> None:
    program = recorded("fsdp")
    runs = [event for event in program.events if type(event).__name__ == "Run"]
    found = Counter((run.block, run.operation.phase) for run in runs if run.operation.family == "matmul")  # type: ignore[union-attr]
    for block in range(2):
        assert found[f"block {block}", "backward"] == 2 * found[f"block {block}", "forward"] > 0


def test_one_rank_that_is_asked_to_shard_is_recorded_as_it_runs() -> None:
    asked = [record(make_config(strategy=strategy, ranks=1), ranks=1) for strategy in ("ddp", "fsdp")]
    assert asked[0] == asked[1]
    assert asked[1].strategy == "ddp"


def test_a_world_of_thousands_is_recorded_as_a_small_one() -> None:
    few = record(make_config(strategy="fsdp", train={"accumulate": 1, "global_batch": 4}), ranks=4)
    many = record(make_config(strategy="fsdp", ranks=4096, train={"accumulate": 1, "global_batch": 4096}), ranks=4096)
    assert count_operations(few) == count_operations(many)
    assert many.peak_memory()["parameters"] < few.peak_memory()["parameters"]


def test_the_same_config_gives_the_same_program() -> None:
    assert recorded("fsdp") == record(make_config(strategy="fsdp"), ranks=RANKS)


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.exhaustive), "fsdp"])
def test_a_step_of_many_microbatches_is_composed_of_three(strategy: str) -> None:
    config = make_config(strategy=strategy, train={"accumulate": 5, "global_batch": 20})
    composed, whole = record(config, ranks=RANKS), record(config, ranks=RANKS, is_whole=True)
    assert count_operations(composed) == count_operations(whole)
    assert count_bytes(composed) == count_bytes(whole)
    assert composed.model_flops == whole.model_flops
    for category, size in whole.peak_memory().items():  # but for a number a microbatch: its loss
        assert composed.peak_memory()[category] == pytest.approx(size, abs=32)
    same, other = (_shapes(each) for each in (composed, whole))
    assert same == other
    there = load_cluster("1x dgx-h100")
    for is_compiled in (False, True):
        times = [replay(replace(each, is_compiled=is_compiled), there).seconds for each in (composed, whole)]
        assert times[0] == pytest.approx(times[1], rel=1e-4)


PIPELINES = [
    ("ddp", "1f1b"),
    pytest.param("zero2", "gpipe", marks=pytest.mark.exhaustive),
    pytest.param("zero1", "1f1b", marks=pytest.mark.exhaustive),
    pytest.param("fsdp", "1f1b", marks=pytest.mark.exhaustive),
    pytest.param("fsdp", "interleaved", marks=pytest.mark.exhaustive),
    pytest.param("zero1", "zb-h1", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("strategy", "schedule"), PIPELINES)
def test_a_pipeline_of_many_microbatches_is_composed_of_three(strategy: str, schedule: str) -> None:
    layers = {"layers": 4} if schedule == "interleaved" else {"layers": 2}
    train = {"accumulate": 7 if schedule == "1f1b" else 8, "global_batch": 56 if schedule == "1f1b" else 64}
    config = make_config(strategy=strategy, pipeline=2, schedule=schedule, train=train, model=layers)
    composed, whole = (record_stages(config, ranks=RANKS, is_whole=is_whole) for is_whole in (False, True))
    for one, other in zip(composed, whole, strict=True):
        assert one.order
        assert not other.order
        assert count_operations(one) == count_operations(other)
        assert count_bytes(one) == count_bytes(other)
        assert one.model_flops == other.model_flops
        assert sum(one.peak_memory().values()) == pytest.approx(sum(other.peak_memory().values()), abs=64)
        assert _shapes(one) == _shapes(other)
    there = load_cluster("1x dgx-h100")
    for is_compiled in (False, True):
        times = [
            replay([replace(stage, is_compiled=is_compiled) for stage in stages], there).seconds
            for stages in (composed, whole)
        ]
        assert times[0] == pytest.approx(times[1], rel=1e-4)


def test_a_composed_pipeline_is_read_again() -> None:
    config = make_config(strategy="zero1", pipeline=2, train={"accumulate": 8, "global_batch": 64})
    program = record_stages(config, ranks=RANKS)[0]
    assert program.order
    few = sum(event.operation.flops for event in program.events if isinstance(event, Run))
    whole = sum(kernel.flops for kernel in kernels_of(program))
    told = counted(program.events, program.order)
    assert sum(n * e.operation.flops for e, n in told if isinstance(e, Run)) == pytest.approx(whole, rel=1e-12)
    cluster = load_cluster("1x dgx-h100")
    products = [device_families(each, cluster)["matmul"] for each in (program, replace(program, order=()))]
    assert products[0] / products[1] == pytest.approx(whole / few, rel=0.05)  # of all microbatches


def test_values_that_a_model_begins_with_are_not_made() -> None:
    with torch.device("meta"), NoValues():
        layer = nn.Linear(4, 4)
        assert nn.init.normal_(layer.weight) is layer.weight
        drawn = nn.init.constant_(torch.empty(2, device="cpu"), 3.0)
    assert layer.weight.is_meta
    assert drawn.tolist() == [3.0, 3.0]


def test_stages_of_other_ranks_take_no_memory() -> None:
    config = make_config(strategy="zero1", pipeline=2, train={"accumulate": 2, "global_batch": 16})
    for program in record_stages(config, ranks=RANKS):
        assert program.resident.get("temporary", 0) < 1024


def test_the_last_stage_keeps_nothing_of_a_microbatch_that_went_back() -> None:
    few, many = (
        record_stages(
            make_config(strategy="zero1", pipeline=2, train={"accumulate": count, "global_batch": 8 * count}),
            ranks=RANKS,
            is_whole=True,
        )[1]
        for count in (3, 6)
    )
    assert sum(many.peak_memory().values()) == pytest.approx(sum(few.peak_memory().values()), abs=64)


def test_what_compiled_blocks_make_again_is_not_held_however_many_microbatches_there_are() -> None:
    there = load_cluster("1x dgx-h100")
    saved = []
    for count in (1, 5):
        program = record(make_config(strategy="zero1", train={"accumulate": count, "global_batch": 4 * count}), ranks=4)
        eager, compiled = (
            replay(replace(program, is_compiled=is_compiled), there).memory["activations"]
            for is_compiled in (False, True)
        )
        saved.append(eager - compiled)
    assert saved[0] == saved[1] > 0


def test_a_rank_that_stands_for_a_cpu_adds_and_scales() -> None:
    """NCCL averages as it adds; on a CPU gradients are scaled as they are copied into buckets."""
    names = {}
    for device in ("cpu", "cuda"):
        program = record(make_config(strategy="zero2", device=device, train={"accumulate": 1}), ranks=RANKS)
        names[device] = Counter(k.name for k in kernels_of(program) if k.phase == "backward")
    scaled = names["cpu"] - names["cuda"]
    assert {"mul", "_foreach_mul_"} & set(scaled)
    assert names["cpu"].total() > 0


def _shapes(program: Program) -> list[tuple[Any, ...]]:
    """All but the numbers of what is issued, run and waited for, in order."""
    found: list[tuple[Any, ...]] = []
    for event in events_of(program):
        if isinstance(event, Run):
            kernel = event.operation
            # A number a microbatch, its loss, is not copied; no kernel is so small that this matters.
            found.append((kernel.name, kernel.sizes, max(256, kernel.num_bytes), kernel.phase, event.block))
        elif isinstance(event, Issue):
            is_message = event.kind in ("send", "recv")  # which belongs to what comes next, forward or backward
            found.append((event.kind, event.num_bytes, event.lane, None if is_message else event.phase))
        elif isinstance(event, Wait):
            found.append(("wait", event.phase))
    return found


class Branches(nn.Module):
    """Looks at its values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        if outputs.sum() > 0:
            return outputs
        return outputs * 2


class Selects(Branches):
    """Has a shape that follows from values."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs + outputs[outputs > 0].sum()


class LeavesOut(Branches):
    """Has parameters that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


class Misfit(nn.Module):
    """Made for five features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


class Leaves(nn.Module):
    """Computes with numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(torch.from_numpy(inputs.numpy()))
        return outputs


def make_misfit() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3))


def factory_config(name: str, strategy: str = "ddp") -> Config:
    return config_from_dict(
        {
            "model": {"kind": "factory", "factory": f"{__name__}:{name}"},
            "data": {"kind": "synthetic_classification", "features": 4, "classes": 3, "samples": 32},
            "parallel": {"ranks": 2, "strategy": strategy},
            "train": {"steps": 2, "global_batch": 8},
        }
    )


def test_a_model_that_looks_at_values_is_told_where() -> None:
    with pytest.raises(UsageError, match=r"(?s)cannot be traced: it reads a value.*test_record.py:\d+ in forward"):
        record(factory_config("Branches"), ranks=2)


def test_a_model_that_its_data_do_not_fit_is_told_with_its_line() -> None:
    with pytest.raises(UsageError) as caught:
        record(factory_config("Misfit"), ranks=2)
    what, place, rule, fix = str(caught.value).splitlines()
    assert re.fullmatch(r"the model cannot be traced: RuntimeError: .*\[4, 4\].*\[5, 3\]", what)
    assert re.search(r"at test_record.py:\d+ in forward, where layer is Linear\(in_features=5", place)
    assert rule.endswith("the inputs of its data are [4] a sample")
    assert fix == "  mend the model, or take the data that it is made for"


def test_a_model_of_modules_of_torch_is_told_with_the_module_and_who_makes_it() -> None:
    with pytest.raises(UsageError, match=r"where 0 is Linear\(in_features=5, .*; test_record.py:\d+ makes the model"):
        record(factory_config("make_misfit", "fsdp"), ranks=2)


def test_errors_of_the_engines_are_not_laid_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.rehearse.dryrun.parts.build_optimizer", None)
    with pytest.raises(TypeError, match="not callable"):
        record(factory_config("LeavesOut"), ranks=2)


def test_a_model_that_leaves_torch_is_told_so() -> None:
    with pytest.raises(UsageError, match=r"(?s)cannot be traced: .*at test_record.py:\d+ in forward.*torch.where"):
        record(factory_config("Leaves"), ranks=2)


def test_a_model_whose_shapes_follow_from_values_is_told_so() -> None:
    with pytest.raises(UsageError, match=r"(?s)cannot be traced: torch cannot run aten.*torch.where"):
        record(factory_config("Selects"), ranks=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_unused_parameters_are_unused_on_all_ranks(strategy: str) -> None:
    program = record(factory_config("LeavesOut", strategy), ranks=2)
    updates = [kernel for kernel in kernels_of(program) if kernel.family == "optimizer"]
    assert updates
    assert sum(kernel.tensors for kernel in updates) == 2


def test_a_strategy_that_is_not_decided_is_refused() -> None:
    asked = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "parallel": {"ranks": 2, "strategy": "auto"}}
    with pytest.raises(UsageError, match="paceline plan"):
        record(config_from_dict(asked), ranks=2)


def test_blocks_that_are_computed_again_cast_parameters_again() -> None:
    memory = {"checkpoint_activations": "full"}
    plain, half = (
        record(make_config(strategy="fsdp", memory=memory, train={"precision": each}), ranks=RANKS)
        for each in ("fp32", "bf16")
    )
    assert count_operations(plain) == count_operations(half)
    assert count_bytes(plain) == count_bytes(half)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.exhaustive)])
def test_an_average_of_the_weights_is_held_and_updated(strategy: str) -> None:
    config = make_config(strategy=strategy, train={"ema_decay": 0.99})
    program, plain = record(config, ranks=RANKS), recorded(strategy)
    more = program.peak_memory()["optimizer"] - plain.peak_memory()["optimizer"]
    assert more == pytest.approx(plain.peak_memory()["parameters"], rel=0.03)
    assert [k.name for k in kernels_of(program) if k.name not in {each.name for each in kernels_of(plain)}] == [
        "_foreach_lerp_"
    ]
    facts, layout = describe_model(config, "cuda"), replace(layout_of(config, RANKS), microbatch=2)
    assert facts is not None
    expected = estimate_memory(facts, layout, StateFacts.of(config, "cuda"))
    assert program.peak_memory()["optimizer"] == pytest.approx(expected.optimizer, rel=0.03)
