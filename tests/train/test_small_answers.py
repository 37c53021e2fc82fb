"""Short answers that a run is assembled by: samples of a batch, workers of a loader, cuts of a microbatch, causes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.engines.apply import parallelize
from paceline.errors import TrainingError, UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Layout
from paceline.train import assemble, trainer
from paceline.train.assemble import keeps_channels_last, loader_options
from paceline.train.loss import CrossEntropy, count_samples
from paceline.train.master_adamw import can_update
from paceline.train.reach import find_unreachable
from paceline.train.step import Passes
from paceline.train.survive.memory import Retry
from paceline.train.survive.recovery import find_overflow

PAIR = (torch.zeros(3, 2), torch.zeros(3))


@pytest.mark.parametrize(
    ("batch", "samples"),
    [(None, 0), (PAIR, 3), (list(PAIR), 3), (({"a": torch.zeros(5, 1)}, None), 5), ((torch.zeros(0, 2), 1), 0)],
)
def test_samples_of_a_batch(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(3), "batch is a Tensor\n  a batch is (inputs, targets)"),
        ((*PAIR, 1), "batch is a tuple of 3\n  a batch is (inputs, targets)"),
        ([PAIR[0]], "batch is a list of 1\n  a batch is (inputs, targets)"),
        ((1, 2), "batch has no tensor\n  its first dim counts the samples"),
        ((torch.tensor(1), PAIR[0]), "batch has a first tensor without dims\n  its first dim counts the samples"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(UsageError) as told:
        count_samples(batch)
    assert str(told.value).startswith(words)


def test_masters_that_are_none_or_not_on_a_gpu_have_no_kernel() -> None:
    assert not can_update([])
    assert not can_update([nn.Parameter(torch.zeros(4))])
    assert not can_update([nn.Parameter(torch.zeros(4, dtype=torch.float64))])


# How batches are read.


def config_of(**sections: Any) -> Any:
    values: dict[str, Any] = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}
    return config_from_dict({**values, "train": {"steps": 1, "global_batch": 4}, **sections})


@pytest.mark.parametrize(
    ("workers", "device", "is_real", "node_ranks", "cores", "expected"),
    [
        ("auto", "cuda", True, 4, 3, (3, False, "cuda")),
        ("auto", "cuda", True, None, 6, (6, False, "cuda")),
        ("auto", "cuda", True, 64, 1, (1, False, "cuda")),
        (2, "cuda", True, 4, None, (2, False, "cuda")),
        ("auto", "cuda", False, 4, None, (0, True, None)),
        ("auto", "cpu", True, 4, None, (0, False, None)),
        (1, "cpu", False, 4, None, (1, False, None)),
    ],
)
def test_a_rank_on_a_gpu_reads_ahead_with_its_share_of_the_cores(
    workers: int | str,
    device: str,
    is_real: bool,
    node_ranks: int | None,
    cores: int | None,
    expected: tuple[int, bool, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    restored: list[Any] = []

    def choose(_: Any, microbatch: int, *, cores: int, worker_start: str) -> Any:
        assert (microbatch, worker_start) == (8, "fork")
        asked.append(cores)
        return SimpleNamespace(workers=cores)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(assemble, "usable_cores", lambda: set(range(12)))
    monkeypatch.setattr(assemble, "choose_workers", choose)
    monkeypatch.setattr(assemble, "capture_random_states", lambda _: "states")
    monkeypatch.setattr(assemble, "restore_random_states", lambda *given: restored.append(given))
    comm: Any = SimpleNamespace(device=torch.device(device), takes_real_time=is_real, size=2)
    config = config_of(data={"kind": "digits", "workers": workers, "worker_start": "fork"})
    options, choice = loader_options(config, comm, [], 8, node_ranks)
    found = options.device and options.device.type
    assert (options.workers, options.pin_memory, found) == expected
    assert asked == ([] if cores is None else [cores])
    assert (choice is not None, len(restored)) == (cores is not None, len(asked))


@pytest.mark.parametrize(
    ("asked", "device", "precision", "expected"),
    [
        ("auto", "cuda", "bf16", True),
        ("auto", "cuda", "fp32", False),
        ("auto", "cpu", "bf16", False),
        (True, "cpu", "fp32", True),
        (False, "cuda", "bf16", False),
    ],
)
def test_channels_are_next_to_one_another_where_tensor_cores_read_them(
    asked: Any, device: str, precision: str, expected: bool
) -> None:
    images = {"kind": "synthetic_images", "size": 32, "samples": 8}
    config = config_of(model={"kind": "resnet", "depth": 18, "channels_last": asked}, data=images)
    assert keeps_channels_last(config, Layout(precision=precision), torch.device(device)) is expected
    assert not keeps_channels_last(config_of(), Layout(precision="bf16"), torch.device("cuda"))


# Memory that runs out.


class Hungry(nn.Module):
    """Runs out of memory with more than so many samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(2, 3), most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("no room")
        result: torch.Tensor = self.layer(x)
        return result


def passes_of(most: int, samples: int = 8) -> Passes:
    engine = parallelize(Hungry(most), SoloCommunicator(torch.device("cpu")))
    batch = (torch.ones(samples, 2), torch.zeros(samples, dtype=torch.int64))
    return Passes(engine, [batch], CrossEntropy(1.0), 1.0, torch.float32)


@pytest.mark.parametrize(("most", "told"), [(8, []), (4, [4]), (3, [4, 2]), (1, [4, 2, 1])])
def test_microbatches_are_halved_until_they_fit_and_each_cut_is_told(most: int, told: list[int]) -> None:
    cuts: list[int] = []
    retry = Retry(8, is_allowed=True, on_cut=cuts.append)
    values = retry(passes_of(most))
    assert (cuts, retry.microbatch, len(values)) == (told, (told or [8])[-1], 2 ** len(told))
    assert Retry(8, is_allowed=True)(passes_of(most))  # where nobody wants to hear of it
    again = retry(passes_of(most))  # the next step begins with pieces of that size
    assert (cuts, len(again)) == (told, 2 ** len(told))


def test_a_sample_that_does_not_fit_ends_the_run() -> None:
    with pytest.raises(TrainingError, match="rank 0 ran out of memory with a microbatch of 1\n"):
        Retry(8, is_allowed=True)(passes_of(0))
    with pytest.raises(TrainingError) as told:
        Retry(8, is_allowed=False)(passes_of(4))
    assert str(told.value) == (
        "rank 0 ran out of memory with a microbatch of 8\n"
        "  what a pass holds grows with the samples of a microbatch\n"
        "  set train.microbatch = 4 or auto: the global batch stays, in more microbatches"
    )


# What overflowed first in a pipeline.


@pytest.mark.parametrize(("stage", "place"), [(0, -1), (0, 0), (1, 0), (1, -1)])
def test_in_a_pipeline_what_an_earlier_stage_overflowed_is_the_cause(stage: int, place: int) -> None:
    """A late module of the first stage comes before the first one of the second."""

    def work(comm: Communicator) -> tuple[str, str]:
        torch.manual_seed(0)
        sizes = {"layers": 4, "heads": 2, "width": 8, "context": 4, "vocab_size": 8}
        engine = parallelize(GPT(gpt_config(None, **sizes)), comm, pipeline=2)
        linears = [(name, each) for name, each in engine.module.named_modules() if isinstance(each, nn.Linear)]
        name, module = linears[place]
        if comm.rank == stage:
            module.register_forward_hook(lambda *given: given[2] * math.inf)
        tokens = torch.arange(8).reshape(2, 4)
        passes = Passes(engine, [(tokens, tokens)] * 2, CrossEntropy(4.0), 1.0, torch.float32)
        return name, str(find_overflow(passes))

    found = run_virtual(work, 2)
    assert found[0][1] == found[1][1]
    told = found[stage][1]
    assert told.startswith(f"{found[stage][0]} ("), found
    assert told.endswith(f", on rank {stage}")


# What was compiled.


@pytest.mark.parametrize(("step", "is_last", "looks"), [(1, False, True), (3, False, True), (4, False, False)])
@pytest.mark.parametrize("later", [0, 96])
def test_what_was_compiled_is_recorded_at_first_and_now_and_then(
    step: int, is_last: bool, looks: bool, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = [SimpleNamespace(what="a", seconds=1.25, problem=""), SimpleNamespace(what="b", seconds=2.5, problem="")]
    notes += [SimpleNamespace(what="c", seconds=9.0, problem="too odd")]
    monkeypatch.setattr(trainer, "take_notes", lambda *_: notes)
    told: list[tuple[str, dict[str, Any]]] = []
    parts = SimpleNamespace(engine=SimpleNamespace(module=None), loss=None)
    run: Any = SimpleNamespace(parts=parts, note=lambda name, detail: told.append((name, detail)))
    result: Any = SimpleNamespace(step=step + later, is_last=is_last)
    trainer.note_compiled(run, result)
    is_told = looks if later == 0 else step == 4
    both = [("compiled", {"what": "a; b", "seconds": 3.8}), ("not_compiled", {"what": "c", "why": "too odd"})]
    assert told == (both if is_told else [])
    result.is_last = True
    told.clear()
    trainer.note_compiled(run, result)
    assert told == both
    monkeypatch.setattr(trainer, "take_notes", lambda *_: [])
    told.clear()
    trainer.note_compiled(run, result)
    assert told == []


# What a config names.


def test_files_imports_and_patterns_that_are_not_there_are_told(tmp_path: Any) -> None:
    there = tmp_path / "rows.jsonl"
    there.write_text("{}\n")
    sources = [
        ({"kind": "tokens", "path": str(tmp_path / "no*"), "context": 4}, ["data.path"]),
        ({"kind": "tokens", "path": str(tmp_path / "ro*"), "context": 4}, []),
        ({"kind": "tokens", "path": str(there), "context": 4}, []),
    ]
    model = {"kind": "gpt", "layers": 1, "heads": 2, "width": 8}
    for data, keys in sources:
        found = find_unreachable(config_of(model=model, data=data))
        assert [each.what.partition(" = ")[0] for each in found] == keys, data
    text = config_of(model=model, data={"kind": "text", "path": str(there), "context": 4})
    assert find_unreachable(text.with_values("data", path="nowhere")) == []  # every command looks for it
    named = config_of(train={"steps": 1, "global_batch": 4, "loss": "no_such_module:loss"})
    assert len(find_unreachable(named)) == 1
    assert find_unreachable(config_of()) == []
    groups = {"*.weight": {"lr": 0.5}, "nothing.*": {"frozen": True}}
    found = find_unreachable(config_of(optim={"kind": "adamw", "lr": 0.1, "groups": groups}))
    assert found
    assert all("nothing" in f"{each.what}{each.rule}" for each in found)
