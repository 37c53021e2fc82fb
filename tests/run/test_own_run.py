"""``paceline.Run``: what a loop of one's own leaves behind, how it goes on, and what it is told."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import RankFailedError, UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.records.comparison import compare_runs
from paceline.records.event_words import event_text
from paceline.records.records import (
    EndRecord,
    EvalRecord,
    EventRecord,
    ExpertsRecord,
    RunRecord,
    StepRecord,
    read_records,
)
from paceline.records.report import summarize
from paceline.run import own_prediction
from paceline.view.folder import config_of
from paceline.view.runs import ShownRun

INPUTS = (torch.arange(23 * 4, dtype=torch.float64) * 0.37).sin().reshape(23, 4)
TARGETS = INPUTS[:, :3].argmax(1)
STEPS = 5  # of an epoch: 23 samples in batches of 5


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def train(comm: Any, epochs: int, *, stop_at: int | None = None, resume: bool = False, **options: Any) -> list[Any]:
    engine = paceline.parallelize(make_model(), comm, options.pop("strategy", "ddp"))
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.02)
    loader = paceline.loader(TensorDataset(INPUTS, TARGETS), comm, batch_size=5, seed=5)
    monitor = {"sample_s": None, **options.pop("monitor", {})}
    with paceline.Run(comm, "own", engine, optimizer, loader, monitor=monitor, **options) as run:
        values = run.resume() if resume else {}
        while loader.epoch < epochs:
            for x, y in loader:
                with run.step(len(y)):
                    total = F.cross_entropy(engine(x), y, reduction="sum")
                    (total * engine.loss_scale(len(y))).backward()
                    norm = engine.clip_grad_norm_(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    run.log(loss_sum=total, grad_norm=norm, twice=2 * run.num_steps)
                if run.num_steps == stop_at:
                    run.save(best=0.25)
                    raise ValueError("on purpose")
            with torch.no_grad():
                loss = paceline.mean(F.cross_entropy(engine(INPUTS), TARGETS, reduction="sum"), 23, comm)
            run.log(loss=loss, accuracy=0.5, margin=1.5)
            run.log_samples([f"epoch {loader.epoch}"], images=INPUTS[:1, None])
        return [values, run.folder, [each.double().sum().item() for each in engine.state_dict().values()]]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def records_of(folder: Path, rank: int, kind: type[Any]) -> list[Any]:
    return [each for each in read_records(folder / "records" / f"rank-{rank}.jsonl") if isinstance(each, kind)]


def mixture_loop(comm: Any) -> tuple[Path, list[int]]:
    """Five steps of a mixture on two ranks that hold different experts; the choices are counted by hand, too."""
    torch.manual_seed(0)
    model = GPT(gpt_config("gpt-nano", layers=1, context=8, vocab_size=16, experts=4, active=2))
    engine = paceline.parallelize(model, comm, expert=2)
    loader = paceline.loader(TensorDataset(torch.arange(96).reshape(12, 8) % 16), engine.batch_comm, batch_size=4)
    chosen = torch.zeros(4, dtype=torch.int64)

    def count(_: Any, __: Any, routing: Any) -> None:
        chosen.scatter_add_(0, routing.experts.flatten(), torch.ones_like(routing.experts.flatten()))

    engine.routers[0].register_forward_hook(count)
    monitor = {"sample_s": None, "log_every": 2}
    with paceline.Run(comm, "mixture", engine, None, loader, steps=3, monitor=monitor) as run:
        for (tokens,) in loader:
            with run.step(len(tokens)):
                logits = engine(tokens)
                total = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum")
                (total * engine.loss_scale(tokens.numel())).backward()
                run.log(loss_sum=total)
                engine.zero_grad()
    return run.folder, chosen.tolist()


def test_a_loop_of_ones_own_has_the_loads_of_experts() -> None:
    ranks = paceline.run_virtual(mixture_loop, 2)
    loads = records_of(ranks[0][0], 0, ExpertsRecord)
    assert [(each.step, each.steps, each.layer, each.ranks) for each in loads] == [
        (2, 2, "layers.0.mlp", 2),
        (3, 1, "layers.0.mlp", 2),
    ]
    assert [sum(each) for each in zip(*(each.choices for each in loads), strict=True)] == [
        sum(each) for each in zip(*(chosen for _, chosen in ranks), strict=True)
    ]
    assert not records_of(ranks[0][0], 1, ExpertsRecord)


def long_loop(comm: Any) -> Path:
    torch.manual_seed(0)
    model = GPT(gpt_config("gpt-nano", context=8, vocab_size=16))
    engine = paceline.parallelize(model, comm, context_ranks=2)
    loader = paceline.loader(TensorDataset(torch.arange(96).reshape(12, 8) % 16), engine.batch_comm, batch_size=4)
    with paceline.Run(comm, "long", engine, None, loader, monitor={"sample_s": None}) as run:
        for (tokens,) in loader:
            with run.step(len(tokens)):
                own, targets = engine.cut(tokens, tokens.roll(-1, 1))
                total = F.cross_entropy(engine(own).flatten(0, 1), targets.flatten(), reduction="sum")
                (total * engine.loss_scale(targets.numel())).backward()
                run.log(loss_sum=total)
                engine.zero_grad()
        return run.folder


def test_ranks_that_share_samples_count_them_once() -> None:
    folder = paceline.run_virtual(long_loop, ranks=4)[0]
    steps = [records_of(folder, rank, StepRecord) for rank in range(4)]
    assert [sum(rank[number].samples for rank in steps) for number in range(3)] == [4, 4, 4]
    assert [each.position for each in steps[3]] == [4, 8, 12]
    first = 8 * math.log(16)  # a sample of eight tokens, at the beginning
    found = sum(rank[0].loss_sum for rank in steps) / sum(rank[0].count for rank in steps)
    assert found == pytest.approx(first, rel=0.1)


def test_every_rank_leaves_the_records_of_a_run() -> None:
    (_, folder, _), _ = paceline.run_virtual(lambda comm: train(comm, 2, steps=10, config={"note": "mine"}), ranks=2)
    assert folder == Path("runs/own").absolute()
    for rank in range(2):
        (first,) = records_of(folder, rank, RunRecord)
        assert (first.rank, first.world_size, first.strategy, first.backend) == (rank, 2, "ddp", "virtual")
        assert (first.num_parameters, first.global_batch, first.total_steps) == (67, 5, 10)
        steps = records_of(folder, rank, StepRecord)
        assert [each.step for each in steps] == list(range(1, 11))
        assert [each.position for each in steps[:5]] == [5, 10, 15, 20, 23]
        assert steps[4].epoch == 1.0
        assert [each.samples for each in steps[:5]] == ([2, 2, 2, 2, 1] if rank == 0 else [3, 3, 3, 3, 2])
        assert {each.lr for each in steps} == {0.02}
        assert all(each.grad_norm is not None and each.grad_norm > 0 for each in steps)
        assert all(min(each.forward_s, each.backward_s, each.optimizer_s, each.data_s) > 0 for each in steps)
        scalars = [each for each in records_of(folder, rank, EventRecord) if each.name == "scalars"]
        assert [each.detail for each in scalars] == [{"twice": 2.0 * step} for step in range(10)]
        evaluations = records_of(folder, rank, EvalRecord)
        assert [(each.step, each.accuracy, each.metrics) for each in evaluations] == [
            (5, 0.5, {"margin": 1.5}),
            (10, 0.5, {"margin": 1.5}),
        ]
        assert all(each.seconds > 0 for each in evaluations)
        (end,) = records_of(folder, rank, EndRecord)
        assert (end.status, end.step, end.message) == ("done", 10, "")


def test_the_loss_of_all_ranks_is_that_of_one_process() -> None:
    paceline.run_virtual(lambda comm: train(comm, 1), ranks=1)
    paceline.run_virtual(lambda comm: train(comm, 1), ranks=3)
    alone = [each.loss for each in records_of(Path("runs/own"), 0, StepRecord)]
    parts = [records_of(Path("runs/own-2"), rank, StepRecord) for rank in range(3)]
    for step, expected in enumerate(alone):
        total = sum(part[step].loss_sum for part in parts)
        assert total / sum(part[step].samples for part in parts) == pytest.approx(expected, abs=1e-6)


def test_report_and_page_read_it() -> None:
    _, folder, _ = paceline.run_virtual(lambda comm: train(comm, 1, config={"seed": 5}), ranks=1)[0]
    summary = summarize(folder)
    assert (summary.status, summary.steps, summary.name) == ("done", STEPS, "own")
    assert summary.final_loss is not None
    shown = ShownRun(folder)
    shown.look()
    assert shown.evaluations[0].accuracy == 0.5
    assert len(shown.scalars) == STEPS
    assert [event.detail["items"][0][0] for event in shown.samples] == ["epoch 1"]
    assert config_of(shown.folder) == {
        "name": "own",
        "ranks": "1",
        "strategy": "ddp",
        "train.precision": "fp32",
        "model.compile": "none",
        "memory.checkpoint_activations": "none",
        "comm.compression.policy": "none",
        "optimizer.kind": "AdamW",
        "optimizer.lr": "0.02",
        "global_batch": "5",
        "seed": "5",
    }


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), ("zero1", 3)])
def test_a_run_goes_on_at_another_size_as_if_nothing_had_been(
    strategy: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = paceline.run_virtual(lambda comm: train(comm, 2, monitor={"folder": "whole"}), ranks=1)[0][2]
    with pytest.raises(RankFailedError):
        paceline.run_virtual(lambda comm: train(comm, 2, stop_at=4), ranks=2)
    assert records_of(Path("runs/own"), 0, EndRecord)[0].message == "ValueError: on purpose"
    values, folder, found = paceline.run_virtual(
        lambda comm: train(comm, 2, resume=True, strategy=strategy), ranks=ranks
    )[0]
    assert (values, folder) == ({"best": 0.25}, Path("runs/own").absolute())
    assert capsys.readouterr().err.count("paceline: own goes on after step 4, from ") == 1
    assert found == pytest.approx(expected, abs=1e-12)
    assert [each.step for each in records_of(folder, 0, StepRecord)] == [*range(1, 11)]
    events = [each.name for each in records_of(folder, 0, EventRecord) if each.name not in ("scalars", "samples")]
    assert events == ["checkpoint", "resume"]
    assert [each.status for each in records_of(folder, 0, EndRecord)] == ["failed", "done"]


def losses_with_dropout(comm: Any, folder: str, *, stop_at: int = 8, resume: bool = False) -> list[float]:
    """Trains with dropout, and with noise of numpy and Python; each rank draws numbers of its own."""
    engine = paceline.parallelize(nn.Sequential(make_model(), nn.Dropout(0.5)), comm)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.02)
    loader = paceline.loader(TensorDataset(INPUTS, TARGETS), comm, batch_size=6, seed=5)
    seed = 100 if resume else comm.rank
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    found = []
    with paceline.Run(comm, "own", engine, optimizer, loader, monitor={"sample_s": None, "folder": folder}) as run:
        if resume:
            run.resume()
        while run.num_steps < stop_at:
            for x, y in loader:
                with run.step(len(y)):
                    loss = F.cross_entropy(engine(x + 0.01 * np.random.rand() + 0.01 * random.random()), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.item())
                if run.num_steps == stop_at:
                    break
        run.save()
    return found


def test_dropout_after_a_resume_is_that_of_a_run_without_one() -> None:
    whole = paceline.run_virtual(lambda comm: losses_with_dropout(comm, "whole"), ranks=2)
    parts = paceline.run_virtual(lambda comm: losses_with_dropout(comm, "parts", stop_at=3), ranks=2)
    rest = paceline.run_virtual(lambda comm: losses_with_dropout(comm, "parts", resume=True), ranks=2)
    assert [[*a, *b] for a, b in zip(parts, rest, strict=True)] == whole
    assert whole[0] != whole[1]


def test_at_another_size_the_resume_says_that_random_numbers_are_others() -> None:
    paceline.run_virtual(lambda comm: losses_with_dropout(comm, "parts", stop_at=3), ranks=2)
    paceline.run_virtual(lambda comm: losses_with_dropout(comm, "parts", stop_at=4, resume=True), ranks=1)
    (event,) = [each for each in records_of(Path("parts/own"), 0, EventRecord) if each.name == "resume"]
    assert event_text(event).endswith("; random states are those of 2 ranks, and not used on 1")


def predicted_loop(strategy: str = "ddp", passes: int = 1, compiled: bool = False) -> tuple[Path, list[float]]:
    """Trains a module on one rank in real time; returns the folder and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.Tanh(), nn.Linear(128, 8))
    if compiled:
        model[0].compile(backend="eager")
    engine = paceline.parallelize(model, paceline.connect(device="cpu"), strategy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.02)
    losses = []
    with paceline.Run(engine.world, "real", engine, optimizer, monitor={"sample_s": None}) as run:
        for _ in range(4):
            with run.step(32):
                for _ in range(passes):
                    loss = engine(torch.ones(32 // passes, 64)).square().mean()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return run.folder, losses


@pytest.mark.parametrize(("strategy", "passes"), [("ddp", 1), ("fsdp", 2)])
def test_what_was_predicted_stands_beside_what_was_measured(strategy: str, passes: int) -> None:
    folder, _ = predicted_loop(strategy, passes)
    found = summarize(folder).prediction
    assert found is not None
    assert found.predicted.plan == f"ddp over 1, microbatch {32 // passes} x {passes}"  # alone nothing is shared
    told = " ".join(found.lines())
    assert re.search(r"predicted .* a step while it ran .*, measured ", told), told
    assert re.search(r"predicted .* of memory a rank while it ran, measured ", told), told


def test_what_the_first_pass_computes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: list[Any] = []
    real = own_prediction.expect_run
    monkeypatch.setattr(
        own_prediction,
        "expect_run",
        lambda *a, **k: facts.append(k["facts"]) or real(*a, **k),  # type: ignore[func-returns-value]
    )
    with monkeypatch.context() as patch:
        patch.setattr(own_prediction, "_uncounted", lambda _: "not asked for")
        _, plain = predicted_loop()
    for strategy, passes in (("ddp", 1), ("fsdp", 2)):
        _, losses = predicted_loop(strategy, passes)
        if passes == 1:
            assert losses == plain  # to count changes nothing, dropout neither
    for each in facts:
        assert each.work.flops == 2 * (64 * 128 + 128 * 8)
        assert each.parameters == 64 * 128 + 128 + 128 * 8 + 8
        inputs, outputs = 4 * 64, 4 * 8
        assert 4 * 128 < each.root.saved_bytes < 4 * (64 + 4 * 128 + 8) + inputs + outputs


def test_what_cannot_be_predicted_has_its_reason_in_one_note() -> None:
    folder, losses = predicted_loop(compiled=True)
    assert len(losses) == 4
    notes = [event_text(each) for each in records_of(folder, 0, EventRecord) if each.name == "prediction"]
    assert notes == ["a step is not predicted: operations of a compiled model are not seen while it runs"]
    prediction = summarize(folder).prediction
    assert prediction is not None
    assert prediction.lines() == []


def test_a_loop_goes_on_where_an_operation_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> float:
        raise ValueError("no such formula")

    _, plain = predicted_loop()
    monkeypatch.setattr("paceline.models.measured.operator_flops", fail)
    folder, losses = predicted_loop()
    assert losses == plain
    (note,) = [event_text(each) for each in records_of(folder, 0, EventRecord) if each.name == "prediction"]
    assert re.search(r"not predicted: aten.* cannot be counted: ValueError\('no such formula'\)", note), note


def test_without_a_checkpoint_it_begins_and_without_a_step_it_leaves_nothing() -> None:
    assert paceline.run_virtual(lambda comm: train(comm, 0, resume=True), ranks=2)[1][0] == {}
    assert not Path("runs").exists()


def test_a_step_without_a_loss_has_none() -> None:
    def loop(comm: Any) -> Path:
        run = paceline.Run(comm, "bare", monitor={"sample_s": None})
        with run.step(3):
            run.log(loss=torch.tensor(2.0))
        with run.step(3):
            pass
        run.log(speed=4.0)
        run.close("stopped", "enough")
        run.close()
        return run.folder

    folder = paceline.run_virtual(loop, ranks=1)[0]
    first, second = records_of(folder, 0, StepRecord)
    assert (first.loss, first.loss_sum, first.count, first.grad_norm, first.position) == (2.0, 6.0, 3, None, 3)
    assert (second.loss, second.count, second.position) == (None, 0, 6)
    assert records_of(folder, 0, EventRecord)[-1].detail == {"speed": 4.0}
    (end,) = records_of(folder, 0, EndRecord)
    assert (end.status, end.message) == ("stopped", "enough")


def refusal(loop: Any) -> str:
    with pytest.raises(RankFailedError) as told:
        paceline.run_virtual(loop, ranks=1)
    assert isinstance(told.value.__cause__, UsageError)
    return str(told.value.__cause__)


def test_mistakes_are_told() -> None:
    quiet = {"sample_s": None}
    assert "plain name" in refusal(lambda comm: paceline.Run(comm, "a/b"))
    assert "with the engine" in refusal(lambda comm: paceline.Run(comm, "a", monitor=quiet).save())
    assert "with the engine" in refusal(lambda comm: paceline.Run(comm, "a", monitor=quiet).resume())

    def two_at_once(comm: Any) -> None:
        run = paceline.Run(comm, "b", monitor=quiet)
        with run.step(), run.step():
            pass

    def too_late(comm: Any) -> None:
        engine = paceline.parallelize(make_model(), comm)
        run = paceline.Run(comm, "c", engine, monitor=quiet)
        with run.step():
            pass
        run.resume()

    assert "inside run.step()" in refusal(two_at_once)
    assert "before the first step" in refusal(too_late)
    assert "shape [2]" in refusal(lambda comm: paceline.Run(comm, "d", monitor=quiet).log(loss=torch.ones(2)))


@pytest.mark.parametrize(("arguments", "status", "words"), [([], "done", ""), (["x"], "failed", "KeyError: 'lost'")])
def test_the_end_of_the_process_ends_the_run(tmp_path: Path, arguments: list[str], status: str, words: str) -> None:
    command = [sys.executable, "-m", "recorded_loop", *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "pool")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "step 1 of rank 0 True\n"
    (end,) = records_of(tmp_path / "runs/script", 0, EndRecord)
    assert (end.status, end.message, end.step) == (status, words, 1)
    assert math.isclose(records_of(tmp_path / "runs/script", 0, StepRecord)[0].loss, 1.0)


def test_what_is_saved_before_the_first_step_is_of_a_run() -> None:
    def loop(comm: Any) -> tuple[Path, Path]:
        engine = paceline.parallelize(make_model(), comm)
        with paceline.Run(comm, "early", engine, monitor={"sample_s": None}) as run:
            return run.save(best=1.0), run.folder

    path, folder = paceline.run_virtual(loop, ranks=1)[0]
    assert path == folder / "checkpoints" / "step-00000000"
    assert path.is_dir()
    (event,) = records_of(folder, 0, EventRecord)
    assert re.fullmatch(rf"[0-9.]+ (B|KiB) saved to {path} in .*, while training waited", event_text(event))
    assert folder == Path("runs/early").absolute()


def test_a_run_that_is_closed_leaves_nothing_behind() -> None:
    hook = sys.excepthook

    def loop(comm: Any) -> list[int]:
        engine = paceline.parallelize(make_model(), comm)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        found = []
        for name in ("one", "two"):
            with paceline.Run(comm, name, engine, optimizer, monitor={"sample_s": None}) as run:
                with run.step(1):
                    engine(INPUTS[:2]).sum().backward()
                    optimizer.step()
                found.append(len(optimizer._optimizer_step_pre_hooks))
            assert engine.gradient_comm.ledger is not None
            assert engine.gradient_comm.ledger.listeners == []
        return [*found, len(optimizer._optimizer_step_pre_hooks)]

    first, second, after = paceline.run_virtual(loop, ranks=1)[0]
    assert first == second == after + 1
    assert sys.excepthook is hook


def test_settings_of_any_kind_are_shown_and_those_of_the_monitor_checked() -> None:
    def loop(comm: Any) -> Path:
        config = {"dtype": torch.float32, "sizes": (1, 2), "deep": {"lr": 0.1, "path": Path("a/b")}}
        with paceline.Run(comm, "shown", config=config, monitor={"sample_s": None}) as run:
            run.log(speed=1.0)
        return run.folder

    shown = ShownRun(paceline.run_virtual(loop, ranks=1)[0])
    found = config_of(shown.folder)
    assert (found["dtype"], found["deep.lr"], found["deep.path"]) == ("torch.float32", "0.1", "a/b")
    for monitor, words in (({"folde": "x"}, "did you mean monitor.folder"), ({"sample_s": "often"}, "sample_s")):
        with pytest.raises(RankFailedError, match=words):
            paceline.run_virtual(lambda comm, monitor=monitor: paceline.Run(comm, "a", monitor=monitor), ranks=1)


def test_two_runs_of_ones_own_are_compared_by_their_settings() -> None:
    def loop(comm: Any, lr: float) -> Path:
        engine = paceline.parallelize(make_model(), comm, compression="bf16")
        optimizer = torch.optim.SGD(engine.parameters(), lr=lr)
        with paceline.Run(comm, "compared", engine, optimizer, monitor={"sample_s": None}) as run:
            run.log(loss=1.0)
        return run.folder

    before, after = (summarize(paceline.run_virtual(partial(loop, lr=lr), ranks=1)[0]) for lr in (0.1, 0.2))
    (change,) = compare_runs(before, after).config
    assert (change.key, change.before, change.after) == ("optimizer.lr", 0.1, 0.2)
    assert config_of(before.folder)["comm.compression.policy"] == "bf16"


def test_arguments_that_a_run_does_not_have_are_refused_with_the_place_where_they_belong() -> None:
    comm: Any = paceline.connect()
    given: Any = {"trackers": ["wandb"], "engnie": None, "seed": 5}
    with pytest.raises(UsageError) as refused:
        paceline.Run(comm, "a/b", **given)
    told = str(refused.value)
    assert all(fix in told for fix in ("plain name", "give monitor={'trackers': ['wandb']}", "did you mean engine?"))
    assert "leave it out, or give config={'seed': 5}" in told
    with pytest.raises(UsageError, match=r"Run\('a', .*\n  it takes the communicator, and then"):
        paceline.Run("a", comm)  # type: ignore[arg-type]


# Mistakes that would train on without a word.


def test_a_loader_that_is_not_shared_out_is_refused() -> None:
    with pytest.raises(UsageError, match=r"with a DataLoader as its loader\n.*\n  give paceline.shard"):
        paceline.Run(paceline.connect(), "own", loader=DataLoader(TensorDataset(INPUTS)))  # type: ignore[arg-type]


def test_a_loss_that_is_not_finite_is_told_once(recwarn: pytest.WarningsRecorder) -> None:
    run = paceline.Run(paceline.connect(), "own", monitor={"sample_s": None})
    for loss in (1.0, math.nan, math.inf):
        with run.step(1):
            run.log(loss=loss)
    run.close()
    told = [str(each.message).split("\n")[0] for each in recwarn]
    assert told == ["the loss of rank 0 is nan in step 2"]


@pytest.mark.parametrize("what", ["evaluated", "saved", "unsaved", "alike"])
def test_numbers_that_ranks_do_not_have_alike_are_told_at_a_save(what: str, recwarn: pytest.WarningsRecorder) -> None:
    def work(comm: Any) -> None:
        engine = paceline.parallelize(make_model(), comm, "ddp")
        with paceline.Run(comm, "own", engine, monitor={"sample_s": None}) as run:
            run.log(loss=0.5 + comm.rank * (what == "evaluated"))
            more = {"last": 1} if what == "unsaved" and comm.rank else {}
            run.save(best=0.25 + comm.rank * (what == "saved"), when=math.nan, **more)

    paceline.run_virtual(work, ranks=2)
    told = [str(each.message).split("\n")[0] for each in recwarn]
    expected = {
        "evaluated": "loss is 0.5 on rank 0 and 1.5 on rank 1",
        "saved": "best is 0.25 on rank 0 and 1.25 on rank 1",
        "unsaved": "last is missing on rank 0 and 1 on rank 1",
    }
    assert told == ([expected[what]] if what in expected else [])


@pytest.mark.parametrize("has_schedule", [True, False])
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_schedule_that_is_not_saved_is_told(
    has_schedule: bool, is_saved: bool, recwarn: pytest.WarningsRecorder
) -> None:
    def work(comm: Any) -> list[float]:
        engine = paceline.parallelize(make_model(), comm, "fsdp")
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]) if has_schedule else None
        rates = []
        with paceline.Run(comm, "own", engine, optimizer, monitor={"sample_s": None}) as run:
            values = run.resume()
            if schedule is not None and "stopping" in values:
                schedule.load_state_dict(values["stopping"][1])
            for _ in range(2):
                optimizer.step()
                rates.append(optimizer.param_groups[0]["lr"])
                if schedule is not None:
                    schedule.step()
            run.save(**({"stopping": [0.5, schedule and schedule.state_dict()]} if is_saved else {}))
        return rates

    first, second = (paceline.run_virtual(work, ranks=ranks)[0] for ranks in (2, 1))
    told = [str(each.message).split("\n")[0] for each in recwarn]
    assert set(told) == ({"the schedule of the learning rate is not saved"} if has_schedule and not is_saved else set())
    if has_schedule and is_saved:
        assert [*first, *second] == pytest.approx([0.1, 0.1, 0.01, 0.001])
