"""What is decided and refused before ranks start: device, ranks, memory, and whether a dry run pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.cluster.detect import Machine
from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, load_config
from paceline.errors import ConfigError, UsageError
from paceline.run import decide
from paceline.run.decide import (
    BackgroundPrediction,
    check_memory,
    check_virtual,
    decide_run,
    is_worth_dry_run,
    precision_notes,
    predict_run,
    resolve_config,
    show_decisions,
)
from paceline.search.expect import MemoryNeed, needed
from paceline.search.expectation import Expectation
from paceline.units import GIB

MLP = ["model.kind=mlp", "data.kind=digits", "train={steps: 40, global_batch: 12}"]
GPT = [
    "model={kind: gpt, layers: 1, heads: 2, width: 16, context: 8}",
    "data={kind: synthetic_tokens, vocab_size: 16, samples: 64, context: 8}",
    "parallel={ranks: 4, device: cpu}",
    "train={steps: 40, global_batch: 8}",
]


def config(*changes: str) -> Config:
    return load_config(None, [*MLP, *changes])


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("paceline.engines.precision.has_bf16", lambda _: True)


@pytest.mark.parametrize(
    ("count", "changes", "found"),
    [
        (0, [], ("cpu", 2)),
        (3, [], ("cuda", 3)),
        (3, ["parallel.ranks=2"], ("cuda", 2)),
        (3, ["parallel.device=cpu"], ("cpu", 2)),
        (1, ["parallel.ranks=3", "comm.backend=virtual"], ("cuda", 3)),
        (0, ["parallel={device: cpu, ranks: 3}"], ("cpu", 3)),
    ],
)
def test_device_and_ranks_are_those_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, count: int, changes: list[str], found: tuple[str, int]
) -> None:
    gpus(monkeypatch, count)
    parallel = resolve_config(config(*changes)).parallel
    assert (parallel.device, parallel.ranks) == found


@pytest.mark.parametrize(
    ("count", "changes", "told"),
    [
        (0, ["parallel.device=cuda"], "parallel.device = cuda, and torch reaches no GPU here"),
        (2, ["parallel.ranks=3"], "parallel.ranks = 3 on 2 GPUs"),
        (0, ["parallel={device: cpu, ranks: 5}"], "train.global_batch = 12"),
    ],
)
def test_what_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, changes: list[str], told: str
) -> None:
    gpus(monkeypatch, count)
    with pytest.raises(ConfigError) as refused:
        resolve_config(config(*changes))
    assert told in str(refused.value)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("changes", "is_worth"),
    [
        (["train.steps=39"], False),
        (["train.steps=40"], True),
        (["train={steps: null, epochs: 1, global_batch: 12}"], True),
        (["comm.backend=virtual"], False),
    ],
)
def test_a_dry_run_is_for_runs_of_processes_that_take_a_while(changes: list[str], is_worth: bool) -> None:
    assert is_worth_dry_run(config(*changes)) is is_worth


def test_a_prediction_is_for_the_hosts_that_share_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int | None]] = []
    machine = Machine(processor="a", cores=7, memory_bytes=GIB)
    monkeypatch.setattr(decide.detect, "detect_machine", lambda **_: machine)

    def expect(_: Config, machine: Machine, *, threads: int | None, hosts: int, entry: Path | None) -> None:
        del entry
        seen.append((machine.cores, hosts, threads))

    monkeypatch.setattr(decide.expect, "expect_run", expect)
    asked = load_config(None, GPT)
    predict_run(asked)
    predict_run(asked, threads=3, node_ranks=3, cores=[1, 2])
    predict_run(asked.with_values("parallel", node_ranks=2), node_ranks=1)
    predict_run(asked, node_ranks=4)
    assert seen == [(7, 1, None), (2, 2, 3), (7, 2, None), (7, 1, None)]
    assert predict_run(resolve_config(config("parallel.device=cpu"))) is None


# Memory


def room(monkeypatch: pytest.MonkeyPatch, has: float, free: float) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free, total=has))
    monkeypatch.setattr(decide.detect, "host_memory", lambda: has)


@pytest.fixture
def need(monkeypatch: pytest.MonkeyPatch) -> MemoryNeed:
    made = MemoryNeed(who="4 ranks need", parts={"parameters": 8 * GIB})
    monkeypatch.setattr(decide.expect, "needed", lambda *_, **__: made)
    monkeypatch.setattr(decide.expect, "ways_out", lambda *_: ["a way out"])
    return made


@pytest.mark.usefixtures("need")
def test_memory_that_there_is_not_is_refused_and_a_limit_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = load_config(None, GPT)
    room(monkeypatch, 100 * GIB, 100 * GIB)
    check_memory(asked)
    check_virtual(asked)
    assert capsys.readouterr().err == ""
    room(monkeypatch, 9 * GIB, 1 * GIB)
    check_memory(asked, is_told=False)
    check_virtual(asked)
    assert capsys.readouterr().err == ""
    check_memory(asked)
    assert capsys.readouterr().err.startswith("paceline: near the limit of memory: 4 ranks need 8.0 GiB of memory")
    room(monkeypatch, 7 * GIB, 100 * GIB)
    with pytest.raises(UsageError) as refused:
        check_memory(asked)
    first, *rest = str(refused.value).splitlines()
    assert first.startswith(
        "out of memory: 4 ranks need 8.0 GiB of memory by estimate (parameters 8.0 GiB), and this host "
    )
    assert rest == ["  a way out", "  to start it all the same: --no-memory-check"]
    with pytest.raises(UsageError) as refused:
        check_virtual(asked)
    assert str(refused.value).splitlines()[1:] == [
        "  virtual ranks share the memory of one process, and each has its own states",
        "  take fewer ranks (--ranks) or a smaller model; paceline predict tells time and memory without a run",
        "  to start it all the same: --no-memory-check",
    ]
    assert capsys.readouterr().err == ""


def test_what_is_not_known_is_not_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    room(monkeypatch, 1.0, 1.0)
    virtual = load_config(None, [*GPT, "comm.backend=virtual"])
    assert needed(virtual) is None
    check_memory(virtual)
    monkeypatch.setattr(decide.expect, "needed", lambda *_, **__: None)
    check_virtual(virtual)
    check_memory(load_config(None, GPT))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("checks", "comm_ranks", "is_checked"), [(True, None, True), (False, None, False), (True, 1, True)]
)
def test_memory_is_checked_for_runs_of_this_host(
    monkeypatch: pytest.MonkeyPatch, checks: bool, comm_ranks: int | None, is_checked: bool
) -> None:
    checked: list[bool] = []
    monkeypatch.setattr(decide, "check_memory", lambda _, is_told: checked.append(is_told))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    comm = None if comm_ranks is None else SoloCommunicator(torch.device("cpu"))
    decided = decide_run(config("parallel={device: cpu, ranks: 1}"), comm=comm, checks_memory=checks)
    assert checked == [True] * is_checked
    assert (decided.choice, decided.config.parallel.ranks) == (None, 1)


@pytest.mark.parametrize(("hosts", "told"), [(None, "checkpoint.memory.copies = 2 has no effect"), (range(2, 3), "")])
def test_copies_of_snapshots_are_for_several_hosts(hosts: range | None, told: str) -> None:
    asked = config("parallel={device: cpu, ranks: 1}", "checkpoint.memory={every_steps: 5, copies: 2}")
    (note,) = [each for each in decide_run(asked, hosts=hosts, host_ranks=1).notes if "checkpoint.memory" in each]
    assert ("copies" in note) is bool(told)
    assert told in note


def test_hosts_have_memory_of_their_own_and_as_many_ranks_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "check_memory", lambda *_, **__: pytest.fail("of another host nobody knows"))
    asked = config("parallel.device=cpu", "train.global_batch=24")
    decided = decide_run(asked, hosts=range(1, 4), host_ranks=2)
    assert (decided.config.parallel.ranks, decided.plan.layout.ranks) == (6, 6)
    assert decide_run(asked, hosts=range(2, 4)).config.parallel.ranks == 6
    with pytest.raises(ConfigError):
        decide_run(config("parallel.device=cpu", "train.global_batch=8"), hosts=range(1, 4), host_ranks=2)
    with pytest.raises(UsageError, match="virtual with --nnodes"):
        decide_run(config("comm.backend=virtual"), hosts=range(1, 3))


# What is said


@pytest.mark.parametrize(
    ("changes", "has_bf16", "notes"),
    [
        (
            ["train.precision=bf16"],
            False,
            ["train.precision = bf16: this CPU has no bf16 instructions: it is slower than fp32"],
        ),
        (["train.precision=bf16_master"], True, []),
        (["train.precision=fp32"], False, []),
        ([], False, []),
    ],
)
def test_a_precision_is_told_where_it_is_not_what_one_would_think(
    monkeypatch: pytest.MonkeyPatch, changes: list[str], has_bf16: bool, notes: list[str]
) -> None:
    monkeypatch.setattr(decide.detect, "bf16_instructions", lambda: has_bf16)
    asked = config("parallel.device=cpu", *changes)
    assert list(precision_notes(asked, asked)) == notes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], ""),
        (["train.precision=fp8"], "train.precision = fp8 is emulated on CPU ranks"),
        (["train.precision=fp8_row"], "train.precision = fp8_row is emulated on CPU ranks"),
        (["comm.nccl.p2p_level=NVL"], "comm.nccl is not read here: CPU ranks do not use NCCL"),
        (["parallel.strategy=zero1", "memory.offload=[optimizer]"], "memory.offload saves nothing here"),
    ],
)
def test_what_a_cpu_makes_of_a_config_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, changes: list[str], told: str
) -> None:
    monkeypatch.delenv("PACELINE_MACHINE", raising=False)
    model = GPT if "fp8" in str(changes) else MLP
    asked = load_config(None, [*model, *changes, "parallel.device=cpu"])
    show_decisions(asked, None)
    shown = " ".join(capsys.readouterr().out.split())
    assert (shown.startswith(told), bool(shown)) == (True, bool(told))
    show_decisions(asked.with_values("parallel", device="cuda"), None, ["another note"])
    assert capsys.readouterr().out == "another note\n"


# Beside the run


class Beside:
    """A dry run that has found something."""

    def __init__(self, found: Expectation | None) -> None:
        self.found, self.is_stopped = found, False

    def result(self, patience_s: float) -> Expectation | None:
        assert patience_s == 10.0
        return self.found

    def stop(self) -> None:
        self.is_stopped = True


def test_a_prediction_is_written_for_a_run_that_is_done_and_stopped_for_one_that_fails(tmp_path: Path) -> None:
    asked = load_config(None, [*GPT, "train.steps=10"])
    formula = Expectation(ranks=4, step_s=0.5, memory_bytes=7)
    for error, is_stopped in ((None, False), (KeyError, True)):
        prediction = BackgroundPrediction(asked, tmp_path, formula)
        prediction.__enter__()
        assert prediction._background is None  # too short for a process beside it
        beside = Beside(formula)
        prediction._background = beside  # type: ignore[assignment]
        prediction.__exit__(error)
        assert beside.is_stopped is is_stopped
        assert list(tmp_path.iterdir()) == []  # nothing new is known
    prediction = BackgroundPrediction(asked, tmp_path, formula)
    prediction._background = Beside(replace(formula, step_s=0.25))  # type: ignore[assignment]
    prediction.__exit__(None)
    assert [path.name for path in tmp_path.iterdir()] == ["prediction.json"]
