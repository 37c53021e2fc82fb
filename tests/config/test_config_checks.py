"""Rules between keys: each fires on its case, and is silent on the neighbouring sound one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pasted import refused_when_pasted

from paceline.config import Config, check_hosts, check_ranks, config_from_dict, layout_of, load_config, run_checks
from paceline.config.checks import check_gpt
from paceline.config.layout import layout_problems
from paceline.config.schema import MuonConfig
from paceline.config.sections import GPT_SIZES
from paceline.config.train_checks import check_optimizer_keys
from paceline.errors import ConfigError

# A test asserts no timing: a busy machine must not fail a law.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

GPT = ["model={kind: gpt, layers: 2, heads: 4, width: 32, context: 16}", "data.kind=text"]
MLP = ["model.kind=mlp", "data.kind=digits"]
RESNET = ["model.kind=resnet", "data.kind=synthetic_images"]

CASES: list[tuple[list[str], list[str], str | None]] = [
    (MLP, [], None),
    (GPT, [], None),
    (RESNET, [], None),
    # length
    (MLP, ["train.steps=10", "train.epochs=2"], "train.steps = 10 and train.epochs = 2 are both given"),
    # model and data
    (GPT, ["data={kind: digits}"], "model.kind = gpt cannot read data.kind = digits"),
    (MLP, ["data={kind: text, context: 8}"], "model.kind = mlp cannot read data.kind = text"),
    (RESNET, ["data={kind: digits}"], "model.kind = resnet cannot read data.kind = digits"),
    (RESNET, ["data={kind: synthetic_tokens}"], "model.kind = resnet cannot read data.kind = synthetic_tokens"),
    (MLP, ["data={kind: synthetic_images}", "model.input_dim=3072"], None),
    (MLP, ["data={kind: synthetic_images}", "model.input_dim=1024"], "model.input_dim = 1024, but the data has 3072"),
    (MLP, ["data={kind: synthetic_classification}", "model.input_dim=784"], None),
    (MLP, ["model={kind: factory, factory: 'a:b'}", "data={kind: text, context: 8}"], None),
    (GPT, ["data={kind: factory, factory: 'a:b'}"], None),
    (MLP, ["model.input_dim=63"], "model.input_dim = 63, but the data has 64 features"),
    (MLP, ["model.input_dim=64", "model.num_classes=10"], None),
    (MLP, ["model.num_classes=9"], "model.num_classes = 9 is fewer than the data's 10 classes"),
    (MLP, ["model.num_classes=11"], None),
    (RESNET, ["model.in_channels=1"], "model.in_channels = 1, but the data has 3 channels"),
    (GPT, ["model.vocab_size=255", "data.tokens=bytes"], "model.vocab_size = 255 is fewer than the data's 256 tokens"),
    (GPT, ["model.vocab_size=256", "data.tokens=bytes"], None),
    # gpt
    (GPT, ["model={kind: gpt}"], "a gpt without model.size lacks model.layers, model.heads, model.width"),
    (GPT, ["model={kind: gpt, size: gpt-124m}"], None),
    (GPT, ["model.width=30"], "model.width = 30 is not a multiple of model.heads = 4"),
    (GPT, ["model.kv_heads=3"], "model.heads = 4 is not a multiple of model.kv_heads = 3"),
    (GPT, ["model.kv_heads=2"], None),
    (GPT, ["model.width=36"], "model.width / model.heads = 36 / 4 = 9 is odd"),
    (GPT, ["model.width=36", "model.positions=learned"], None),
    (GPT, ["model.head_dim=7"], "model.head_dim = 7 is odd"),
    (GPT, ["model.head_dim=7", "model.positions=learned"], None),
    (GPT, ["model.width=30", "model.head_dim=8", "model.qk_norm=head"], None),
    (GPT, ["model.rotary_base=500000.0"], None),
    (
        GPT,
        ["model.rotary_base=500000.0", "model.positions=learned"],
        "model.rotary_base = 500000 with model.positions = learned",
    ),
    (GPT, ["model={kind: gpt, size: gpt-124m, width: 700}"], "model.width = 700 is not a multiple of model.heads = 12"),
    (GPT, ["data.context=17"], "model.context = 16 is smaller than data.context = 17"),
    (GPT, ["data.context=16"], None),
    (GPT, ["data={kind: synthetic_tokens}"], "model.context = 16 is smaller than data.context = 128"),
    (GPT, ["model={kind: gpt, size: gpt-nano}", "data.context=65"], "model.context = 64 is smaller than"),
    (GPT, ["model.context=null"], "neither model.context nor data.context is given"),
    (GPT, ["model.context=null", "data.context=8"], None),
    # spares
    (MLP, ["recovery.spares=64"], None),
    (MLP, ["recovery.spares=1", "recovery.warm=false"], "recovery.spares = 1 has no effect here"),
    (MLP, ["recovery.spares=1", "recovery.keep_processes=false"], "recovery.spares = 1 has no effect here"),
    (MLP, ["recovery.spares=1", "monitor.hang_s=null"], "recovery.spares = 1 has no effect here"),
    (MLP, ["recovery.spares=1", "recovery.max_restarts=0"], "recovery.spares = 1 has no effect here"),
    # experts
    (GPT, ["model.experts=8"], None),
    (GPT, ["model.experts=1"], None),
    (GPT, ["model.experts=8", "model.active=9"], "model.active = 9 is more than model.experts = 8"),
    (GPT, ["model.experts=8", "model.active=1"], "model.active = 1 with model.router.renormalise = true"),
    (GPT, ["model.experts=8", "model.active=1", "model.router.renormalise=false"], None),
    (GPT, ["model.active=2"], "model.active = 2 has no effect without model.experts"),
    (GPT, ["model.shared_experts=1"], "model.shared_experts = 1 has no effect without model.experts"),
    (GPT, ["model.expert_width=16"], "model.expert_width = 16 has no effect without model.experts"),
    (GPT, ["model.dense_layers=1"], "model.dense_layers = 1 has no effect without model.experts"),
    (GPT, ["model.router.scores=sigmoid"], "model.router = {...} has no effect without model.experts"),
    (GPT, ["model.experts=8", "model.dense_layers=1"], None),
    (GPT, ["model.experts=8", "model.dense_layers=2"], "model.dense_layers = 2 of model.layers = 2 leaves no layer"),
    (
        GPT,
        ["model.experts=8", "model.router.groups=3"],
        "model.experts = 8 is not a multiple of model.router.groups = 3",
    ),
    (GPT, ["model.experts=8", "model.router={groups: 4, active_groups: 5}"], "model.router.active_groups = 5 is more"),
    (
        GPT,
        ["model.experts=8", "model.active=3", "model.router.groups=4"],
        "model.router.active_groups = 1 of 4 hold 2 of 8 experts",
    ),
    (GPT, ["model.experts=8", "model.active=3", "model.router={groups: 4, active_groups: 2}"], None),
    (GPT, ["model.experts=8", "model.router.capacity=0.75"], "model.router.capacity = 0.75 drops 25% of all choices"),
    (GPT, ["model.experts=8", "model.router.capacity=1"], None),
    (
        GPT,
        ["model.experts=8", "model.router={balance: none, balance_weight: 0.1}"],
        "model.router.balance_weight = 0.1 with model.router.balance = none",
    ),
    # text
    (GPT, ["data.path=no/such/file.txt"], "data.path = 'no/such/file.txt' does not exist"),
    (GPT, ["data.path=."], "data.path = '.' is a folder"),
    # comm
    (MLP, ["comm.backend=nccl", "parallel.device=cpu"], "comm.backend = nccl with parallel.device = cpu"),
    (MLP, ["comm.backend=nccl"], None),
    (MLP, ["comm.bucket_mb=0.5"], "comm.first_bucket_mb = 1 is larger than comm.bucket_mb = 0.5"),
    (MLP, ["comm.bucket_mb=0.5", "comm.first_bucket_mb=0.5"], None),
    (MLP, ["comm.bucket_mb=auto", "comm.first_bucket_mb=50"], None),
    (MLP, ["comm.bucket_mb=auto", "train.deterministic=true"], "comm.bucket_mb = auto with train.deterministic = true"),
    (MLP, ["comm.bucket_mb=8", "train.deterministic=true"], None),
    (MLP, ["comm.compression={policy: topk, ratio: 0.5}"], None),
    (MLP, ["comm.compression={policy: topk}", "parallel={strategy: hybrid, shard_ranks: 2}"], None),
    *[
        (
            MLP,
            ["comm.compression={policy: topk}", f"parallel.strategy={name}"],
            f"comm.compression.policy = topk with parallel.strategy = {name}",
        )
        for name in ("zero1", "zero2", "zero3", "fsdp", "auto")
    ],
    (MLP, ["comm.compression.ratio=0.5"], "comm.compression.ratio = 0.5 has no effect with comm.compression.policy"),
    (MLP, ["comm.compression={policy: sign, factor_rank: 2}"], "comm.compression.factor_rank = 2 has no effect with"),
    (MLP, ["comm.compression.exclude=[a]"], "comm.compression.exclude = ('a',) has no effect with"),
    (MLP, ["comm.compression={policy: int8, plain_steps: 3, min_size: 0, exclude: [a]}"], None),
    (MLP, ["comm.compression.policy=sign", "train.precision=fp16"], "comm.compression.policy = sign with train.prec"),
    (MLP, ["comm.compression={policy: sign, error_feedback: false}", "train.precision=fp16"], None),
    # optim
    (MLP, ["optim.schedule={warmup: 11, length: 10}"], "optim.schedule.warmup = 11 is longer than"),
    (MLP, ["optim.schedule={warmup: 10, length: 10}"], None),
    (MLP, ["optim.schedule={kind: one_cycle, warmup: 10, length: 10}"], "optim.schedule.warmup = 10 leaves nothing of"),
    (MLP, ["optim.schedule={kind: one_cycle, warmup: 9, length: 10}"], None),
    (MLP, ["optim.schedule={warmup: 11}", "train.steps=10"], "optim.schedule.warmup = 11 is longer than train.steps"),
    (MLP, ["optim.schedule={warmup: 80, unit: samples}", "train.steps=10", "train.global_batch=8"], None),
    (
        MLP,
        ["optim.schedule={warmup: 81, unit: samples}", "train.steps=10", "train.global_batch=8"],
        "optim.schedule.warmup = 81 is longer than train.steps x train.global_batch = 80 samples",
    ),
    (MLP, ['name="a\\x1b[2Jb"'], "name = 'a\\x1b[2Jb' is not a plain folder name"),
    (MLP, ['name="a\\u202eb"'], "name = 'a\\u202eb' is not a plain folder name"),
    (MLP, ["recovery.grace_s=0"], "recovery.grace_s = 0 is not a number above 0"),
    (
        MLP,
        ["parallel.threads=100000"],
        "parallel.threads = 100000 is not a whole number of at least 1 and at most 1024",
    ),
    (MLP, ["optim={kind: sgd, nesterov: true, momentum: 0}"], "optim.nesterov = true with optim.momentum = 0"),
    (MLP, ["optim={kind: sgd, nesterov: true}"], None),
    (
        MLP,
        ['optim={kind: muon, groups: {"*bias": {frozen: true}, "head.*": {lr: 0.1, weight_decay: 0}}}'],
        "optim.groups.head.*: lr = 0.1, weight_decay = 0 with optim.kind = muon",
    ),
    (MLP, ['optim={kind: muon, groups: {"*bias": {frozen: true}}}'], None),
    (MLP, ["optim.nesterov=true"], "optim.nesterov = True has no effect with optim.kind = adamw"),
    (MLP, ["optim={kind: sgd, betas: [0.8, 0.9]}"], "optim.betas = (0.8, 0.9) has no effect with optim.kind = sgd"),
    (MLP, ["optim.args={a: 1}"], "optim.args = {'a': 1} has no effect with optim.kind = adamw"),
    (MLP, ["optim={kind: 'torch.optim:Adam', args: {amsgrad: true}}"], None),
    # batch
    (MLP, ["parallel.ranks=3"], "train.global_batch = 64 (the default) is not a multiple of parallel.ranks = 3"),
    (MLP, ["parallel.ranks=8", "train.global_batch=4"], "parallel.ranks = 8 is more than train.global_batch = 4"),
    (MLP, ["train={global_batch: 64, microbatch: 10}"], "train.global_batch = 64 is not a multiple of"),
    (MLP, ["train={global_batch: 64, microbatch: 8, accumulate: 2}"], None),
    (MLP, ["train={global_batch: 64, microbatch: 8, accumulate: 2}", "parallel.ranks=2"], "train.global_batch = 64 is"),
    (MLP, ["train={microbatch: auto, global_batch: 12}"], None),
    (MLP, ["train={microbatch: auto, accumulate: 2}"], "train.microbatch = auto with train.accumulate = 2"),
    (MLP, ["train.microbatch=auto", "parallel.ranks=3"], "train.global_batch = 64 (the default) is not a multiple of"),
    # sharding
    *[
        (MLP, [f"parallel={{strategy: {name}, ranks: 2}}"], None)
        for name in ("zero1", "zero2", "zero3", "fsdp", "auto")
    ],
    (MLP, ["parallel={strategy: hybrid, ranks: 4, shard_ranks: 2}"], None),
    (MLP, ["parallel={strategy: hybrid, ranks: 4, node_ranks: 2}"], None),
    (MLP, ["parallel={strategy: hybrid}"], None),  # hosts are known when the run starts
    (MLP, ["parallel={strategy: hybrid, ranks: 4, shard_ranks: 3}"], "parallel.shard_ranks = 3 does not divide"),
    (MLP, ["parallel={ranks: 4, node_ranks: 8}"], "parallel.node_ranks = 8 does not divide parallel.ranks = 4"),
    (MLP, ["parallel={strategy: fsdp, shard_ranks: 2}"], "parallel.shard_ranks = 2 has no effect with"),
    (MLP, ["parallel={strategy: auto, shard_ranks: 2}"], None),
    (MLP, ["parallel={strategy: zero2, prefetch: 2}"], "parallel.prefetch = 2 has no effect with"),
    (MLP, ["parallel={reshard_after_forward: false}"], "parallel.reshard_after_forward = false has no effect with"),
    (MLP, ["parallel={strategy: fsdp, reshard_after_forward: 2, ranks: 4}"], None),
    (MLP, ["parallel={strategy: fsdp, reshard_after_forward: 3}"], None),
    (
        MLP,
        ["parallel={strategy: fsdp, reshard_after_forward: 3, ranks: 4}"],
        "parallel.reshard_after_forward = 3 does not divide the 4 ranks",
    ),
    (
        MLP,
        ["parallel={strategy: hybrid, reshard_after_forward: 4, ranks: 4, shard_ranks: 2}"],
        "parallel.reshard_after_forward = 4 does not divide the 2 ranks",
    ),
    (
        MLP,
        ["parallel={strategy: fsdp, units: [layers], unit_mb: 1.0}"],
        "parallel.units = [layers] and parallel.unit_mb",
    ),
    (
        MLP,
        ["parallel={strategy: fsdp, units: [layers, layers]}"],
        "parallel.units = [layers, layers] names layers twice",
    ),
    (MLP, ["parallel={strategy: fsdp, units: []}"], "parallel.units = [] names no module"),
    (MLP, ["memory.offload=[optimizer]"], "memory.offload = [optimizer] with parallel.strategy = ddp"),
    (MLP, ["memory.offload=[optimizer, parameters]", "parallel.strategy=fsdp"], None),
    (MLP, ["memory.offload=[gradients, optimizer]", "parallel={strategy: zero2, device: cpu}"], None),
    (MLP, ["memory.offload=[gradients]", "parallel.strategy=zero2"], "memory.offload = [gradients] with"),
    (MLP, ["memory.offload=[optimizer, parameters]", "parallel.strategy=zero1"], "memory.offload = [optimizer, para"),
    (MLP, ["memory.checkpoint_activations=full"], "memory.checkpoint_activations = full with model.kind = mlp"),
    (MLP, ["train.precision=fp8"], "train.precision = fp8 with model.kind = mlp"),
    (GPT, ["memory.checkpoint_activations=every_2"], None),
    (GPT, ["memory.offload=[activations]"], "memory.offload = [activations] with memory.checkpoint_activations = none"),
    (GPT, ["memory={offload: [activations], checkpoint_activations: matmuls}"], None),
    (
        GPT,
        ["memory={offload: [activations, optimizer], checkpoint_activations: full}"],
        "memory.offload = [optimizer, act",
    ),
    (GPT, ["memory.mlp_tiles=auto", "parallel={tensor: 2, ranks: 2}"], None),
    (GPT, ["memory={mlp_tiles: auto, checkpoint_activations: matmuls}"], "memory.mlp_tiles = auto with memory.checkp"),
    (
        GPT,
        ["memory.mlp_tiles=4", "parallel={tensor: 2, ranks: 2, sequence_parallel: true}"],
        "memory.mlp_tiles = 4 with parallel.sequence_parallel = true",
    ),
    (MLP, ["memory.mlp_tiles=2"], "memory.mlp_tiles = 2 with model.kind = mlp"),
    # precision and rates
    (MLP, ["train={precision: bf16, dtype: float64}"], "train.precision = bf16 with train.dtype = float64"),
    (MLP, ["train={precision: bf16, loss_scale: 1.0}"], "train.loss_scale = 1 has no effect with"),
    (MLP, ["train={precision: fp16, loss_scale: 1.0}", "parallel.device=cpu"], None),
    (MLP, ["optim.lr_scaling=linear"], "optim.lr_scaling = linear without optim.lr_batch"),
    (MLP, ["optim.lr_batch=64"], "optim.lr_batch = 64 has no effect with optim.lr_scaling = none"),
    (MLP, ["optim={lr_scaling: sqrt, lr_batch: 64}"], None),
    # names and paths
    *[(MLP, [f"name={name}"], "name = ") for name in ("a/b", "'..'", '"a\\\\b"', "''", "' a'", "'a:b'", "x" * 101)],
    *[(MLP, [f"name={name}"], None) for name in ("a-b_c.1", "my run", "'2024'", "..a")],
    (MLP, ["model={kind: factory, factory: torch.nn.Linear}"], "model.factory = 'torch.nn.Linear' is not a path"),
    (MLP, ["data={kind: factory, factory: 'my data:load'}"], "data.factory = 'my data:load' is not a path"),
    (MLP, ["train.loss=my.loss"], "train.loss = 'my.loss' is not auto or a path"),
    (MLP, ["checkpoint.every_steps=0"], "checkpoint.every_steps = 0 is not"),
    (MLP, ["checkpoint.every_minutes=0"], "checkpoint.every_minutes = 0 is not"),
]


REFUSED = [(base, overrides) for base, overrides, text in CASES if text is not None]


@pytest.mark.parametrize(("base", "overrides"), REFUSED, ids=lambda case: " ".join(case)[:70])
def test_a_proposed_fix_is_accepted_when_it_is_pasted(base: list[str], overrides: list[str]) -> None:
    assert refused_when_pasted([*base, *overrides]) == []


@pytest.mark.parametrize(("base", "overrides", "expected"), CASES, ids=lambda case: str(case)[:70])
def test_rule(base: list[str], overrides: list[str], expected: str | None) -> None:
    if expected is None:
        load_config(None, [*base, *overrides])
        return
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*base, *overrides])
    (problem,) = caught.value.problems
    assert problem.what.startswith(expected)
    assert problem.rule
    assert problem.fix


def test_text_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a")
    load_config(None, [*GPT, f"data.path={path}"])
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*GPT, f"data.path={tmp_path / 'bok.txt'}"])
    assert str(path) in caught.value.problems[0].fix


def test_check_ranks_judges_what_auto_became() -> None:
    config = load_config(None, [*MLP, "train.global_batch=12"])
    assert check_ranks(config, 4) == []
    (problem,) = check_ranks(config, 5)
    assert "parallel.ranks = 5" in problem.what


def test_check_ranks_judges_groups_when_hosts_are_known() -> None:
    config = load_config(None, [*MLP, "parallel.strategy=hybrid"])
    assert check_ranks(config, 8, node_ranks=4) == []
    (problem,) = check_ranks(config, 8)
    assert problem.what == "parallel.strategy = hybrid on 8 ranks of one host, without parallel.shard_ranks"
    assert "parallel.shard_ranks = 4" in problem.fix
    both = load_config(None, [*MLP, "parallel={strategy: hybrid, shard_ranks: 3, reshard_after_forward: 2}"])
    assert len(check_ranks(both, 8)) == 2


@relaxed
@given(ranks=st.integers(1, 64), size=st.integers(1, 80))
def test_suggested_groups_fit(ranks: int, size: int) -> None:
    def problems(ranks: int, size: int) -> list[Any]:
        parallel = {"strategy": "hybrid", "shard_ranks": size}
        base = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}
        return layout_problems(Config.model_validate({**base, "parallel": parallel}), ranks)

    for problem in problems(ranks, size):
        divisor, multiple = map(int, re.findall(r"\d+", problem.fix))
        assert problems(ranks, divisor) == []
        assert problems(multiple, size) == []


@pytest.mark.parametrize(
    ("parallel", "ranks", "node_ranks", "group"),
    [
        ({"strategy": "ddp"}, 8, 4, 1),
        ({"strategy": "zero1"}, 8, 4, 8),
        ({"strategy": "zero3"}, 8, None, 8),
        ({"strategy": "hybrid"}, 8, 4, 4),
        ({"strategy": "hybrid"}, 8, None, 8),
        ({"strategy": "hybrid", "node_ranks": 2}, 8, 4, 2),
        ({"strategy": "hybrid", "node_ranks": 2, "shard_ranks": 4}, 8, None, 4),
    ],
)
def test_shard_group(parallel: dict[str, Any], ranks: int, node_ranks: int | None, group: int) -> None:
    values = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "parallel": parallel}
    assert layout_of(Config.model_validate(values)).for_ranks(ranks, node_ranks).shards == group


@relaxed
@given(heads=st.integers(1, 16), width=st.integers(1, 200), positions=st.sampled_from(["rotary", "learned"]))
def test_suggested_widths_fit(heads: int, width: int, positions: str) -> None:
    model = {"kind": "gpt", "layers": 1, "heads": heads, "context": 8, "positions": positions}

    def problems(width: int) -> list[Any]:
        values = {"model": {**model, "width": width}, "data": {"kind": "text"}}
        return list(check_gpt(Config.model_validate(values)))

    for problem in problems(width):
        numbers = problem.fix.partition("model.width = ")[2].partition(",")[0].split(" or ")
        assert numbers
        assert all(problems(int(number)) == [] for number in numbers)


def test_rules_of_a_broken_section_are_skipped_and_others_run() -> None:
    config = config_from_dict({"model": {"kind": "mlp"}, "data": {"kind": "digits"}})
    broken = config.model_copy(update={"name": "a/b", "train": config.train.model_copy(update={"global_batch": 7})})
    broken = broken.model_copy(update={"parallel": config.parallel.model_copy(update={"ranks": 2})})
    assert len(run_checks(broken)) == 2
    assert len(run_checks(broken, sections={"name", "train"})) == 1


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("adamw", {"momentum", "nesterov", "muon", "args"}),
        ("sgd", {"betas", "eps", "muon", "args"}),
        ("muon", {"momentum", "nesterov", "args"}),
        ("torch.optim:Adam", {"muon"}),
    ],
)
def test_a_key_is_refused_with_the_optimizers_that_do_not_read_it(kind: str, refused: set[str]) -> None:
    changed = {"betas": (0.8, 0.9), "eps": 1e-6, "momentum": 0.8, "nesterov": True, "args": {"a": 1}}
    config = load_config(None, MLP).with_values("optim", kind=kind, muon=MuonConfig(iterations=4), **changed)
    found = check_optimizer_keys(config)
    assert {each.what.split()[0].removeprefix("optim.") for each in found} == refused


def test_every_named_size_is_sound() -> None:
    for size in GPT_SIZES:
        load_config(None, [f"model={{kind: gpt, size: {size}}}", "data.kind=text"])


def test_a_batch_for_hosts_that_come_and_go_is_suggested_for_all_their_numbers() -> None:
    config = load_config(None, [*MLP, "train.global_batch=64"])
    (problem,) = check_hosts(config, 2, range(2, 5))
    assert problem.what == "train.global_batch = 64 is not a multiple of parallel.ranks = 6"
    assert problem.fix.startswith("2 to 4 hosts divide multiples of 24: try train.global_batch = 48 or 72")
    for batch in (48, 72):
        assert check_hosts(config.with_values("train", global_batch=batch), 2, range(2, 5)) == []
    (single,) = check_hosts(config, 3, range(1, 2))
    assert "hosts" not in single.fix
    assert "train.global_batch" not in check_hosts(config, 8, range(1, 12))[0].fix
