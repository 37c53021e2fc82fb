"""Typos: each is refused, with the key or value that was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import config_from_dict
from paceline.config.suggest import known_fields, near_folders, other_names
from paceline.errors import ConfigError, Problem

BASE: dict[str, Any] = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}
GPT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 32, "context": 16},
    "data": {"kind": "text"},
}


def with_value(path: str, value: Any, base: dict[str, Any] = BASE) -> dict[str, Any]:
    values = {name: dict(content) for name, content in base.items()}
    content: dict[str, Any] = values
    *places, key = path.split(".")
    for place in places:
        content = content.setdefault(place, {})
    content[key] = value
    return values


def problems_of(values: dict[str, Any]) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values)
    return caught.value.problems


KEY_TYPOS = [
    # a slip of the finger
    ("train.epoch", "train.epochs"),
    ("train.step", "train.steps"),
    ("train.globalbatch", "train.global_batch"),
    ("train.micro_batch", "train.microbatch"),
    ("train.determinstic", "train.deterministic"),
    ("train.Seed", "train.seed"),
    ("optim.weight-decay", "optim.weight_decay"),
    ("optim.clipnorm", "optim.clip_norm"),
    ("optim.schedule.warmpu", "optim.schedule.warmup"),
    ("parallel.rank", "parallel.ranks"),
    ("parallel.stategy", "parallel.strategy"),
    ("comm.bucket_md", "comm.bucket_mb"),
    ("comm.backnd", "comm.backend"),
    ("checkpoint.evry_steps", "checkpoint.every_steps"),
    ("monitor.tensorbord", "monitor.tensorboard"),
    ("model.hiden_dim", "model.hidden_dim"),
    ("data.eval_fracton", "data.eval_fraction"),
    ("optm", "optim"),
    ("modle", "model"),
    ("parralel", "parallel"),
    # the right key in another section
    ("train.lr", "optim.lr"),
    ("lr", "optim.lr"),
    ("seed", "train.seed"),
    ("optim.warmup", "optim.schedule.warmup"),
    ("train.ranks", "parallel.ranks"),
    ("parallel.bucket_mb", "comm.bucket_mb"),
    ("train.hidden_dim", "model.hidden_dim"),
    ("train.shuffle", "data.shuffle"),
    ("model.clip_norm", "optim.clip_norm"),
    ("train.folder", "monitor.folder"),
    ("monitor.every_steps", "checkpoint.every_steps"),
    # what other frameworks call it
    ("train.batch_size", "train.microbatch = 1"),
    ("num_epochs", "train.epochs"),
    ("optim.learning_rate", "optim.lr"),
    ("train.gradient_accumulation_steps", "train.accumulate"),
    ("parallel.world_size", "parallel.ranks"),
    ("train.max_grad_norm", "optim.clip_norm"),
    ("data.num_workers", "data.workers"),
    ("optimizer", "optim"),
    ("optim.scheduler", "optim.schedule"),
    ("train.mixed_precision", "train.precision = auto"),
    ("parallel.cpu_offload", "memory.offload = [optimizer, parameters]"),
    ("train.gradient_checkpointing", "memory.checkpoint_activations = full"),
    ("parallel.expert_parallel_size", "parallel.expert"),
    ("model.num_experts_per_tok", "model.active (of model.kind = gpt)"),
    ("model.num_local_experts", "model.experts (of model.kind = gpt)"),
]


@pytest.mark.parametrize(("typo", "meant"), KEY_TYPOS)
def test_unknown_key(typo: str, meant: str) -> None:
    problem = next(each for each in problems_of(with_value(typo, 1)) if each.what.startswith(f"{typo} "))
    assert "is not a known key" in problem.what
    first = problem.fix.removeprefix("did you mean ").split(" or ")[0].rstrip("?")
    assert first == meant


def test_a_key_of_another_kind_names_the_kind() -> None:
    (problem,) = problems_of(with_value("model.layers", 4))
    assert problem.fix == "did you mean model.layers (of model.kind = gpt)?"
    assert "hidden_dim" in problem.rule
    assert "kv_heads" not in problem.rule


def test_a_key_like_none_lists_those_that_are_there() -> None:
    (problem,) = problems_of(with_value("checkpoint.zzzzqqqq", 1))
    assert "every_steps, every_epochs, every_minutes, at_end, keep" in problem.rule


def test_names_of_other_frameworks_point_at_keys_that_exist() -> None:
    names = other_names()["keys"]
    assert set(names) <= {each.path for each in known_fields()}
    assert not {name for theirs in names.values() for name in theirs.split()} & {each.key for each in known_fields()}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("optim.kind", "adam", "did you mean optim.kind = adamw?"),
        ("optim.schedule.kind", "cosin", "did you mean optim.schedule.kind = cosine?"),
        ("optim.schedule.kind", "one-cycle", "did you mean optim.schedule.kind = one_cycle?"),
        ("comm.backend", "NCCL", "did you mean comm.backend = nccl?"),
        ("parallel.device", "cudda", "did you mean parallel.device = cuda?"),
        ("parallel.strategy", "dpp", "did you mean parallel.strategy = ddp?"),
        ("parallel.strategy", "zero4", "did you mean parallel.strategy = zero3?"),
        ("parallel.strategy", "full_shard", "did you mean parallel.strategy = fsdp?"),
        ("parallel.shard_ranks", 0, "for none, leave it out or write parallel.shard_ranks = null"),
        ("parallel.prefetch", 0, "the default is parallel.prefetch = 1"),
        ("parallel.units", "layers.0", "did you mean parallel.units = [layers.0]?"),
        ("train.dtype", "bfloat16", "did you mean train.precision = bf16, or bf16_master?"),
        ("train.precision", "float16", "did you mean train.precision = fp16?"),
        ("train.precision", "bf61", "did you mean train.precision = bf16?"),
        ("train.microbatch", "atuo", "did you mean train.microbatch = auto?"),
        ("memory.offload", "optimizer", "did you mean memory.offload = [optimizer]?"),
        ("memory.offload", ["gradients", "optimiser"], "did you mean memory.offload = [gradients, optimizer]?"),
        ("memory.offload", ["zzzz"], "the default is memory.offload = []"),
        ("memory.checkpoint_activations", "every_5", "did you mean memory.checkpoint_activations = every_4?"),
        ("data.last_batch", "kep", "did you mean data.last_batch = keep?"),
        ("train.dtype", "float23", "did you mean train.dtype = float32?"),
        ("optim.lr", "3e-4", "write it without quotes: lr: 3e-4"),
        ("train.steps", "100", "write it without quotes: steps: 100"),
        ("data.shuffle", "yes", "write data.shuffle = true"),
        ("data.shuffle", "Off", "write data.shuffle = false"),
        ("train.global_batch", 64.0, "write it as a whole number: train.global_batch = 64"),
        ("checkpoint.every_steps", 0, "for none, leave it out or write checkpoint.every_steps = null"),
        ("optim.clip_norm", False, "for none, leave it out or write optim.clip_norm = null"),
        ("name", 2024, "put it in quotes: name: '2024'"),
        ("optim.kind", "torch.optim.Adam", "did you mean optim.kind = torch.optim:Adam?"),
        ("train.hooks", "my.watch", "did you mean train.hooks = [my:watch]?"),
        ("train.hooks", ["my.watch", "a:b"], "did you mean train.hooks = [my:watch, a:b]?"),
        ("train.hooks", "my:watch", "did you mean train.hooks = [my:watch]?"),
        ("train.loss", "mine", "for a function build in my_model.py, write my_model:build"),
        ("comm.timeout_s", -1, "the default is comm.timeout_s = 300.0"),
    ],
)
def test_wrong_value(path: str, value: Any, expected: str) -> None:
    (problem,) = problems_of(with_value(path, value))
    assert problem.what.startswith(f"{path} = ")
    assert problem.fix == expected


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("parallel.ranks", 0, "parallel.ranks = 0 is not auto or a whole number of at least 1"),
        ("parallel.ranks", True, "parallel.ranks = true is not auto or a whole number of at least 1"),
        ("optim.lr", True, "optim.lr = true is not a number above 0"),
        ("optim.lr", None, "optim.lr = null is not a number above 0"),
        ("optim.lr", float("nan"), "optim.lr = nan is not a number above 0"),
        ("optim.betas", [0.9, 1], "optim.betas = [0.9, 1] is not a list of 2, each a number of at least 0 and below 1"),
        ("optim.betas", ["0.9", 0.9], "optim.betas = ['0.9', 0.9] is not a list of 2, each"),
        ("optim.betas", [0.9], "optim.betas = [0.9] is not a list of 2, each"),
        ("optim.schedule", 3, "optim.schedule = 3 is not a section of named values"),
        ("train", [1], "train = [1] is not a section of named values"),
        ("data.eval_fraction", 1.0, "data.eval_fraction = 1.0 is not a number of at least 0 and below 1"),
        ("train.seed", -1, "train.seed = -1 is not a whole number"),
        ("monitor.folder", "", "monitor.folder = '' is not text that is not empty"),
        ("parallel.reshard_after_forward", 0, "parallel.reshard_after_forward = 0 is not true or false or a whole"),
        ("memory.offload", ["optim"], "memory.offload = ['optim'] is not a list, each one of optimizer, gradients"),
        ("parallel.units", [1], "parallel.units = [1] is not a list, each text or null"),
        ("optim.args", {"betas": (1, 2)}, "optim.args.betas = [1, 2] is not a plain value"),
    ],
)
def test_the_message_shows_value_and_expectation(path: str, value: Any, expected: str) -> None:
    problems = problems_of(with_value(path, value))
    assert len(problems) == 1
    assert problems[0].what.startswith(expected)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model.kind", "mpl", "did you mean model.kind = mlp?"),
        ("model.kind", "digits", "digits is a kind of data: did you mean data.kind = digits?"),
        ("model.kind", "gpt-124m", "did you mean model.kind = gpt with model.size = gpt-124m?"),
        ("data.kind", "synthetic_image", "did you mean data.kind = synthetic_images?"),
    ],
)
def test_wrong_kind(path: str, value: str, expected: str) -> None:
    (problem,) = problems_of(with_value(path, value))
    assert problem.fix == expected
    assert repr(value) in problem.what


def test_missing_kind_and_missing_sections() -> None:
    (problem,) = problems_of({"model": {"hidden_dim": 8}, "data": {"kind": "digits"}})
    assert problem.what == "model.kind is missing"
    assert "mlp, resnet, gpt, factory" in problem.rule
    assert [each.what for each in problems_of({})] == ["model is missing", "data is missing"]


def test_gpt_size_typo() -> None:
    (problem,) = problems_of(with_value("model.size", "gpt-123m", GPT))
    assert problem.fix == "did you mean model.size = gpt-124m?"


def test_a_key_that_is_not_text() -> None:
    (problem,) = problems_of(with_value("optim.args", {1: 2}) | {"optim": {"kind": "a:b", "args": {1: 2}}})
    assert problem.what == "the key optim.args.1 is not text"


def test_all_problems_come_together() -> None:
    """Schema problems in five sections, and rules of those sections that are sound."""
    problems = problems_of(
        {
            "name": "a/b",
            "lr": 1,
            "model": {"kind": "gpt", "layers": 2, "heads": 3, "width": 32, "kv_heads": 2},
            "data": {"kind": "digits", "shufle": True},
            "parallel": {"strategy": "fsdpp", "ranks": -2},
            "comm": {"bucket_mb": 0.5},
            "optim": {"kind": "sgd", "nesterov": True, "momentum": 0, "schedule": {"warmup": 20, "length": 10}},
            "train": {"steps": 10, "epochs": 2, "global_batch": 64, "microbatch": 7},
            "checkpoint": {"every_steps": 0, "keep": "two"},
        }
    )
    text = "\n".join(each.what for each in problems)
    for expected in (
        "name = 'a/b'",
        "lr is not a known key",
        "model.width = 32 is not a multiple of model.heads = 3",
        "model.heads = 3 is not a multiple of model.kv_heads = 2",
        "data.shufle is not a known key",
        "parallel.strategy = 'fsdpp' is not one of",
        "parallel.ranks = -2",
        "comm.first_bucket_mb = 1 is larger than comm.bucket_mb = 0.5",
        "optim.nesterov = true with optim.momentum = 0",
        "optim.schedule.warmup = 20 is longer than optim.schedule.length = 10",
        "train.steps = 10 and train.epochs = 2 are both given",
        "checkpoint.every_steps = 0",
        "checkpoint.keep = 'two'",
    ):
        assert expected in text
    # data and parallel are broken: rules that read them are silent.
    assert "cannot read" not in text
    assert "multiple of train.microbatch" not in text
    assert len(problems) == 13


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("batch_size", 32, "train.microbatch = 32 or train.global_batch = 32"),
        ("zero_redundancy", "stage_2", "parallel.strategy = zero2"),
        ("zero_redundancy", False, "parallel.strategy = ddp"),
        ("zero_stage", 3, "parallel.strategy = zero3"),
        ("pipeline_parallelism", True, "parallel.pipeline = 2"),
        ("tensor_parallel", 4, "parallel.tensor = 4"),
        ("communication_pattern", "ring", "comm.algorithm = ring"),
        ("sharding_strategy", "auto", "parallel.sharding_strategy"),
    ],
)
def test_keys_of_others_are_answered_with_ours_and_their_value(key: str, value: object, meant: str) -> None:
    (problem,) = problems_of(with_value(key, value))
    assert problem.fix == f"did you mean {meant}?"


def test_one_word_for_a_section_is_answered_with_its_kind() -> None:
    values = {**with_value("model", "transformer"), "data": "text", "optim": "adam"}
    assert [each.fix for each in problems_of(values)] == [
        "write model: {kind: gpt}",
        "write data: {kind: text}",
        "write optim: {kind: adamw}",
    ]


def test_a_folder_that_was_meant_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert near_folders(Path("runs/digit")) == ""
    for name in ("digits/checkpoints/step-00000010", "digits-2", "gpt"):
        Path("runs", name).mkdir(parents=True)
    assert near_folders(Path("runs/digit")) == "did you mean runs/digits or runs/digits-2?"
    assert near_folders(Path("digits")) == "did you mean runs/digits or runs/digits-2?"
    assert near_folders(Path("runs/gtp/checkpoints")) == "did you mean runs/gpt?"
    step = Path("runs/digits/checkpoints/step-00000010")
    assert near_folders(step.with_name("step-10")).startswith(f"did you mean {step}")
    assert near_folders(Path("runs/resnet")) == "there are runs/digits, runs/digits-2, runs/gpt"
    assert near_folders(Path("runs/digits")) == ""
