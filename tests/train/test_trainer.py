"""The loop: steps as a generator, hooks that all ranks agree on, and runs that must stop."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from kept_records import Kept
from torch import nn

from paceline.checkpoint import list_checkpoints, open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, Config, config_from_dict
from paceline.errors import CheckpointError, DataError, RankFailedError, TrainingError, UsageError
from paceline.records import meter
from paceline.records.records import EvalRecord, EventRecord, StepRecord
from paceline.train.assemble import build_trainer
from paceline.train.loss import CrossEntropy, LossValue
from paceline.train.step import StepResult
from paceline.train.survive.hooks import Saver
from paceline.train.trainer import EvaluateHook, Every, Trainer, is_time

CPU = torch.device("cpu")


def make_config(**changes: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "model": {"kind": "mlp", "hidden_dim": 8, "dropout": 0.0},
        "data": {"kind": "synthetic_classification", "samples": 50, "features": 6, "classes": 3, "eval_fraction": 0.2},
        "train": {"steps": 12, "global_batch": 8},
        "optim": {"lr": 0.01, "schedule": {"kind": "linear"}},
    }
    for section, content in changes.items():
        values[section] = values.get(section, {}) | content
    return config_from_dict(values)


@dataclass(slots=True)
class EverySeconds:
    """Runs a hook every ``seconds`` of rank 0's clock, which all ranks ask every ``ask_every`` steps."""

    seconds: float
    hook: Callable[[Trainer, StepResult], None]
    ask_every: int
    last: float

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % self.ask_every == 0 and is_time(trainer, self.last, self.seconds):
            self.last = import_module("paceline.train.trainer").time.monotonic()
            self.hook(trainer, result)


class Note:
    """A hook that notes when it ran."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        assert trainer.step == result.step
        self.steps.append(result.step)


def solo(config: Config | None = None, **kwargs: Any) -> Trainer:
    return build_trainer(config or make_config(), SoloCommunicator(CPU), **kwargs)


# The generator.


def test_steps_are_yielded_one_by_one() -> None:
    trainer = solo()
    results = []
    for result in trainer.steps():
        assert (trainer.step, trainer.position) == (result.step, result.position)
        results.append(result)
    assert [result.step for result in results] == list(range(1, 13))
    # 40 training samples make epochs of five whole batches.
    assert [result.position for result in results] == [8 * step for step in range(1, 13)]
    assert [result.is_last for result in results] == [False] * 11 + [True]
    assert [result.lr for result in results] == pytest.approx([0.01 * (1 - step / 12) for step in range(12)])
    outcome = results[-1].outcome
    assert f"{results[-1].loss:.3f}" == f"{outcome.loss_sum.item() / outcome.count:.3f}"


def test_a_loop_that_breaks_can_be_taken_up_again() -> None:
    """The same steps as in one go: the generator holds no state of its own."""

    def parameters(trainer: Trainer) -> list[torch.Tensor]:
        return [p.detach().clone() for p in trainer.parts.engine.parameters()]

    broken, whole = solo(), solo()
    first = [result.step for result in itertools.islice(broken.steps(), 5)]
    second = [result.step for result in broken.steps()]
    assert (first, second) == (list(range(1, 6)), list(range(6, 13)))
    whole.run()
    for ours, theirs in zip(parameters(broken), parameters(whole), strict=True):
        assert torch.equal(ours, theirs)
    assert list(broken.steps()) == []


def test_records_tell_of_each_step() -> None:
    sink = Kept()
    trainer = solo(make_config(train={"steps": None, "epochs": 2, "global_batch": 16}), sink=sink)
    trainer.run()
    assert [record.step for record in sink.steps] == [1, 2, 3, 4, 5, 6]
    assert [record.samples for record in sink.steps] == [16, 16, 8, 16, 16, 8]
    assert [record.position for record in sink.steps] == [16, 32, 40, 56, 72, 80]
    assert [record.epoch for record in sink.steps] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    for record in sink.steps:
        assert record.loss == pytest.approx(record.loss_sum / record.count)
        assert record.grad_norm is not None


def test_records_read_before_the_device_fails_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records come many at once; one that cannot be read must not take those before it along."""
    sink = Kept()
    trainer, read = solo(sink=sink), meter._record

    def fail_at_4(issued: Any) -> StepRecord:
        if issued[0].step == 4:
            raise RuntimeError("the device is lost")
        return read(issued)

    monkeypatch.setattr(meter, "_record", fail_at_4)
    with pytest.raises(RuntimeError, match="the device is lost"):
        trainer.run()
    assert [record.step for record in sink.steps] == [1, 2, 3]


def test_the_ragged_batch_of_an_epoch_can_be_dropped() -> None:
    sink = Kept()
    config = make_config(data={"last_batch": "drop"}, train={"steps": None, "epochs": 2, "global_batch": 16})
    solo(config, sink=sink).run()
    assert [record.samples for record in sink.steps] == [16, 16, 16, 16]
    assert [record.epoch for record in sink.steps] == [0.5, 1.0, 1.5, 2.0]


def test_a_run_that_trains_lowers_its_loss() -> None:
    sink = Kept()
    solo(make_config(optim={"lr": 0.05, "schedule": {"kind": "constant"}}, train={"steps": 40}), sink=sink).run()
    losses = [record.loss for record in sink.steps]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])  # type: ignore[arg-type]


def test_a_rank_without_samples_has_a_record_without_a_loss() -> None:
    """41 samples in batches of 39: the last batch has two, for three ranks."""

    def work(comm: Communicator) -> list[StepRecord]:
        sink = Kept()
        config = make_config(
            data={"samples": 41, "eval_fraction": 0.0}, train={"steps": None, "epochs": 2, "global_batch": 39}
        )
        build_trainer(config, comm, sink=sink).run()
        return sink.steps

    for rank, records in enumerate(run_virtual(work, 3)):
        assert [record.samples for record in records] == [13, rank and 1, 13, rank and 1]
        assert [record.loss is None for record in records] == [False, rank == 0, False, rank == 0]
        assert len({record.position for record in records}) == 4


# Hooks.


def test_every_runs_its_hook_at_multiples_and_at_the_end() -> None:
    notes = [Note() for _ in range(4)]
    hooks = [Every(5, notes[0]), Every(5, notes[1], at_end=False), Every(None, notes[2]), Every(4, notes[3])]
    solo(hooks=hooks).run()
    assert [note.steps for note in notes] == [[5, 10, 12], [5, 10], [12], [4, 8, 12]]


def fast_clock(monkeypatch: pytest.MonkeyPatch, seconds_a_call: Callable[[], float]) -> None:
    """Gives hooks a clock that is moved by being read: no test waits for time to pass."""
    now = itertools.accumulate(iter(seconds_a_call, None), initial=0.0)

    class Time:
        monotonic = staticmethod(lambda: next(now))
        perf_counter = staticmethod(lambda: 0.0)
        time = staticmethod(lambda: 0.0)

    monkeypatch.setattr(import_module("paceline.train.trainer"), "time", Time)


def test_ranks_agree_on_hooks_by_steps_and_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reads a clock of its own; what rank 0's says holds for all. The hooks communicate, so a rank that
    ran one alone would be found."""
    fast_clock(monkeypatch, lambda: 1.0)

    def work(comm: Communicator) -> tuple[list[int], list[int]]:
        met: tuple[list[int], list[int]] = [], []

        def meet(place: list[int]) -> Callable[[Trainer, StepResult], None]:
            def hook(trainer: Trainer, result: StepResult) -> None:
                trainer.parts.engine.comm.barrier()
                place.append(result.step)

            return hook

        # Rank 0 is due after 11 readings; the others would never be, or always.
        seconds = [11.0, 1e9, 0.0][comm.rank]
        hooks = [Every(5, meet(met[0])), EverySeconds(seconds, meet(met[1]), ask_every=2, last=0.0)]
        build_trainer(make_config(train={"steps": 40, "global_batch": 9}), comm, hooks=hooks).run()
        return met

    results = run_virtual(work, 3)
    by_steps, by_seconds = results[0]
    assert results == [(by_steps, by_seconds)] * 3
    assert by_steps == [5, 10, 15, 20, 25, 30, 35, 40]
    assert by_seconds
    assert all(step % 2 == 0 for step in by_seconds)
    assert len(by_seconds) < 20


def test_seconds_count_from_the_last_run_of_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_clock(monkeypatch, lambda: 1.0)
    note = Note()
    # One reading a step asked for, and one more when the hook is due: so it is due every third step asked for.
    solo(make_config(train={"steps": 24}), hooks=[EverySeconds(3.0, note, ask_every=2, last=-1.0)]).run()
    assert note.steps == [6, 12, 18, 24]


def test_evaluation_at_one_step_happens_once() -> None:
    sink = Kept()
    hook = EvaluateHook()
    solo(hooks=[Every(6, hook), Every(4, hook)], sink=sink).run()
    evals = [record for record in sink.records if isinstance(record, EvalRecord)]
    assert [record.step for record in evals] == [4, 6, 8, 12]
    assert {record.samples for record in evals} == {10}


def test_all_ranks_evaluate_together() -> None:
    def work(comm: Communicator) -> list[tuple[int, float, float | None, int]]:
        sink = Kept()
        build_trainer(make_config(), comm, hooks=[Every(6, EvaluateHook())], sink=sink).run()
        evals = [record for record in sink.records if isinstance(record, EvalRecord)]
        return [(record.step, record.loss, record.accuracy, record.samples) for record in evals]

    first, second = run_virtual(work, 2)
    assert first == second
    assert [(step, samples) for step, _, _, samples in first] == [(6, 10), (12, 10)]


def test_without_an_evaluation_set_there_is_nothing_to_evaluate() -> None:
    sink = Kept()
    trainer = solo(make_config(data={"eval_fraction": 0.0}), hooks=[Every(6, EvaluateHook())], sink=sink)
    trainer.run()
    assert trainer.evaluate() is None
    assert not [record for record in sink.records if isinstance(record, EvalRecord)]


def test_an_evaluation_in_between_changes_no_step() -> None:
    def losses(hooks: list[Any]) -> list[float | None]:
        sink = Kept()
        solo(make_config(model={"dropout": 0.4}), hooks=hooks, sink=sink).run()
        return [record.loss for record in sink.steps]

    assert losses([]) == losses([Every(1, EvaluateHook())])


def test_checkpoints_are_saved_once_a_step_and_told_of(tmp_path: Path) -> None:
    def work(comm: Communicator) -> list[int]:
        sink = Kept()
        saver = Saver(tmp_path / "checkpoints", CheckpointConfig(every_steps=4, keep=2, asynchronous=False))
        asked = Every(6, lambda trainer, _: saver.save(trainer, "asked"))
        build_trainer(make_config(), comm, hooks=[saver, asked], sink=sink).run()
        return [event.step for event in sink.events]

    assert run_virtual(work, 2) == [[4, 6, 8, 12]] * 2
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000008", "step-00000012"]


def test_when_rank_0_cannot_save_every_rank_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 must not wait for a rank that has given up."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("paceline.checkpoint.writer.commit", fail)

    def work(comm: Communicator) -> str:
        trainer = build_trainer(
            make_config(), comm, hooks=[Saver(tmp_path, CheckpointConfig(every_steps=4, keep=99, asynchronous=False))]
        )
        with pytest.raises(CheckpointError) as failure:
            trainer.run()
        return str(failure.value)

    messages = run_virtual(work, 2)
    assert messages[0] == messages[1]
    assert "RuntimeError: unexpected" in messages[0]
    assert list(tmp_path.iterdir()) == []


# Runs that must stop.


class Breaks(CrossEntropy):
    """A loss that is not finite from some step on, on one rank."""

    def __init__(self, comm: Communicator, at_call: int, *, rank: int = 0, value: float = math.nan) -> None:
        super().__init__(1.0)
        self._calls, self._at_call, self._value = 0, at_call, value
        self._is_bad = comm.rank == rank

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        self._calls += 1
        value = super().__call__(model, batch)
        if self._is_bad and self._calls >= self._at_call:
            return LossValue(value.total * self._value, value.count)
        return value


def with_loss(trainer: Trainer, loss: Any) -> Trainer:
    trainer.parts = dataclasses.replace(trainer.parts, loss=loss)
    return trainer


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_steps_that_are_not_finite_are_left_out_until_there_are_too_many(value: float, tmp_path: Path) -> None:
    comm, sink = SoloCommunicator(CPU), Kept()
    config = make_config(train={"max_bad_steps": 3})
    trainer = solo(
        config, hooks=[Saver(tmp_path, CheckpointConfig(every_steps=1, keep=99, asynchronous=False))], sink=sink
    )
    with pytest.raises(TrainingError) as failure:
        with_loss(trainer, Breaks(comm, 5, value=value)).run()
    message = str(failure.value)
    assert message.startswith("3 steps in a row had gradients that are not finite, up to step 7 (gradient norm nan)\n")
    assert f"the first numbers that are not finite: the loss is {value}, on rank 0" in message
    assert [record.step for record in sink.steps] == [1, 2, 3, 4, 5, 6, 7]  # the steps themselves are in the records
    assert [record.is_skipped for record in sink.steps] == [False] * 4 + [True] * 3
    assert [(e.step, e.detail["in_a_row"]) for e in events(sink, "skipped")] == [(5, 1), (6, 2), (7, 3)]
    states = [open_checkpoint(path) for path in list_checkpoints(tmp_path)]
    assert [state.step for state in states] == [1, 2, 3, 4, 5, 6]
    for state in states[4:]:  # they hold what was there before the bad steps
        names = [f"model/{name}" for name in state.shapes("model/")]
        assert all(torch.equal(state.read(name), states[3].read(name)) for name in names)


def events(sink: Kept, name: str) -> list[EventRecord]:
    return [event for event in sink.events if event.name == name]


class Breaking(Breaks):
    """Not finite in some calls only."""

    def __init__(self, comm: Communicator, calls: set[int], *, rank: int = 0) -> None:
        super().__init__(comm, 0, rank=rank)
        self._bad_calls = calls

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        self._at_call = 0 if self._calls + 1 in self._bad_calls else 10**9
        return super().__call__(model, batch)


def test_a_run_gets_over_steps_that_are_not_finite() -> None:
    sink = Kept()
    trainer = solo(make_config(train={"max_bad_steps": 3}), sink=sink)
    with_loss(trainer, Breaking(SoloCommunicator(CPU), {2, 3, 5, 12})).run()
    assert [record.step for record in sink.steps if record.is_skipped] == [2, 3, 5, 12]
    assert [event.detail["in_a_row"] for event in events(sink, "skipped")] == [1, 2, 1, 1]
    assert trainer.bad_steps.state_dict() == {"num_skipped": 4, "num_in_a_row": 1}
    assert all(bool(p.isfinite().all()) for p in trainer.parts.engine.parameters())


def test_a_run_shorter_than_the_limit_must_have_trained_on_something() -> None:
    trainer = solo(make_config(train={"steps": 3, "max_bad_steps": 10}))
    with pytest.raises(TrainingError, match="3 steps in a row had gradients that are not finite, up to step 3"):
        with_loss(trainer, Breaks(SoloCommunicator(CPU), 1)).run()


@covering(strategy=["ddp", "zero2", "fsdp"], rank=[0, 1])
def test_a_bad_loss_on_one_rank_leaves_the_step_out_and_stops_the_run_on_all(rank: int, strategy: str) -> None:
    def work(comm: Communicator) -> tuple[list[int], str]:
        sink = Kept()
        config = make_config(train={"max_bad_steps": 2}, parallel={"strategy": strategy})
        trainer = with_loss(build_trainer(config, comm, sink=sink), Breaking(comm, {3, 6, 7, 8}, rank=rank))
        with pytest.raises(TrainingError) as failure:
            trainer.run()
        return [event.step for event in events(sink, "skipped")], str(failure.value)

    (first, message), (second, other) = run_virtual(work, 2)
    assert first == second == [3, 6, 7]
    assert message == other
    assert f"the loss is nan, on rank {rank}" in message


def test_gradients_that_are_not_finite_are_left_out_although_the_loss_is() -> None:
    """The square root has no slope at 0: the loss is finite, the gradient is not, and the weights would be lost."""

    class Steep(CrossEntropy):
        def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
            value = super().__call__(model, batch)
            return LossValue(value.total + (value.total - value.total.detach()).sqrt(), value.count)

    for clip in (1.0, None):
        trainer = with_loss(solo(make_config(optim={"clip_norm": clip}, train={"max_bad_steps": 2})), Steep(1.0))
        before = trainer.parts.engine.full_state_dict()
        with pytest.raises(TrainingError, match=r"up to step 2(.|\n)*the gradient of \S+ in backward: "):
            trainer.run()
        assert all(torch.equal(v, before[n]) for n, v in trainer.parts.engine.full_state_dict().items())


def test_a_loss_that_is_not_finite_with_finite_gradients_stops_the_run_at_once(tmp_path: Path) -> None:
    """It was trained on, and nothing says what it means."""

    class Offset(CrossEntropy):
        def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
            value = super().__call__(model, batch)
            return LossValue(value.total + math.inf, value.count)

    trainer = with_loss(
        solo(hooks=[Saver(tmp_path, CheckpointConfig(every_steps=1, keep=99, asynchronous=False))]), Offset(1.0)
    )
    with pytest.raises(TrainingError, match=r"the loss is inf at step 1 (.|\n)*no later checkpoint was saved"):
        trainer.run()
    assert list_checkpoints(tmp_path) == []


def test_an_exception_in_a_hook_ends_the_loaders_workers_and_reaches_the_caller() -> None:
    def hook(trainer: Trainer, result: StepResult) -> None:
        del trainer
        raise KeyError(f"step {result.step}")

    closed = []
    trainer = solo(hooks=[Every(3, hook)])
    assert trainer.parts.eval_loader is not None
    trainer.parts.eval_loader.close = lambda: closed.append(True)  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="step 3"):
        trainer.run()
    assert closed == [True]


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    parts = solo().parts
    stranger = nn.Linear(2, 2)
    wrong = dataclasses.replace(parts, optimizer=torch.optim.SGD(stranger.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="2 of the optimizer's 2 tensors are not parameters of this engine"):
        Trainer(wrong)
    some = [next(iter(parts.engine.parameters())), *stranger.parameters()]
    mixed = dataclasses.replace(parts, optimizer=torch.optim.SGD(some, lr=0.1))
    with pytest.raises(UsageError, match="2 of the optimizer's 3 tensors"):
        Trainer(mixed)


def test_more_ranks_than_samples_are_refused() -> None:
    config = make_config(data={"samples": 3, "eval_fraction": 0.0}, train={"global_batch": 4})
    with pytest.raises(RankFailedError) as failure:
        run_virtual(lambda comm: build_trainer(config, comm), 4)
    assert isinstance(failure.value.__cause__, DataError)
    assert "parallel.ranks = 4 is more than the 3 samples" in str(failure.value.__cause__)


def test_weights_depend_on_the_seed_and_not_on_the_ranks() -> None:
    def weights(comm: Communicator, seed: int) -> torch.Tensor:
        trainer = build_trainer(make_config(train={"seed": seed}), comm)
        return torch.cat([p.detach().reshape(-1) for p in trainer.parts.engine.parameters()])

    alone = weights(SoloCommunicator(CPU), 1)
    for found in run_virtual(lambda comm: weights(comm, 1), 2):
        assert torch.equal(found, alone)
    assert not torch.equal(weights(SoloCommunicator(CPU), 2), alone)


def test_ranks_draw_numbers_of_their_own_for_dropout() -> None:
    def draw(comm: Communicator) -> list[float]:
        build_trainer(make_config(), comm)
        return torch.rand(3).tolist()

    first, second = run_virtual(draw, 2)
    assert first != second
