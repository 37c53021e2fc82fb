"""Resume: a run that was stopped and continued is the run that never stopped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kept_records import Kept
from saved_runs import save_now
from torch import nn

from paceline.checkpoint import find_checkpoint, list_checkpoints, open_checkpoint, read_manifest
from paceline.checkpoint.manifest import manifest_text
from paceline.checkpoint.storage import LocalFiles
from paceline.checkpoint.tensors import encode
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, Config, config_from_dict
from paceline.data.datasets import DataShape, TensorPairs
from paceline.data.registry import DataSplits
from paceline.errors import CheckpointError, RankFailedError
from paceline.records.records import StepRecord
from paceline.train.assemble import build_trainer
from paceline.train.loss import CrossEntropy, LossValue
from paceline.train.randomness import capture_random_states
from paceline.train.survive.hooks import Saver
from paceline.train.trainer import Trainer

CPU = torch.device("cpu")
LENGTH, BATCH, STEPS = 40, 12, 7  # epochs of 12, 12, 12 and 4 samples: a ragged batch before and after each save


@pytest.fixture(autouse=True)
def numbered_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts every sample's number into its first feature, so that what the model is given tells the order."""

    def data_of(_: Config) -> DataSplits:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(LENGTH, 5, generator=generator, dtype=torch.float64)
        inputs[:, 0] = torch.arange(LENGTH)
        targets = torch.randint(3, (LENGTH,), generator=generator)
        shape = DataShape(kind="classes", features=5, classes=3)
        return DataSplits(train=TensorPairs(inputs, targets), eval=None, shape=shape)

    monkeypatch.setattr(import_module("paceline.train.assemble"), "data_of", data_of)
    monkeypatch.setattr("os.fsync", lambda _: None)  # hundreds of saves, and no crash of the machine


def make_config(*, dropout: float = 0.4, accumulate: int = 1, **optim: Any) -> Config:
    schedule = {"kind": "cosine", "warmup": 20.0, "unit": "samples", "final_ratio": 0.1}
    return config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 16, "dropout": dropout},
            "data": {"kind": "synthetic_classification", "features": 5, "classes": 3},
            "train": {"steps": STEPS, "global_batch": BATCH, "accumulate": accumulate, "dtype": "float64", "seed": 3},
            "optim": {"lr": 0.02, "schedule": schedule} | optim,
        }
    )


class Seen(CrossEntropy):
    """Notes which samples the model was given."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.samples: list[int] = []

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        self.samples += batch[0][:, 0].long().tolist()
        return super().__call__(model, batch)


@dataclasses.dataclass
class History:
    """What a rank saw and computed, and how it ended."""

    samples: list[list[int]]
    records: list[StepRecord]
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    random: dict[str, Any]


def train(comm: Communicator, config: Config, *, save: Path | None = None, load: Path | None = None) -> History:
    """Runs to the end; saves after every step into ``save``, or continues from the checkpoint ``load``."""
    sink, loss = Kept(), Seen()
    hooks = [] if save is None else [Saver(save, CheckpointConfig(every_steps=1, keep=99, asynchronous=False))]
    trainer = build_trainer(config, comm, hooks=hooks, sink=sink)
    trainer.parts = dataclasses.replace(trainer.parts, loss=loss)
    if load is not None:
        trainer.load_state(open_checkpoint(load))
    samples: list[list[int]] = []
    trainer.hooks.append(lambda *_: samples.append([loss.samples.pop(0) for _ in range(len(loss.samples))]))
    trainer.run()
    optimizer = trainer.parts.optimizer.state_dict()
    random = capture_random_states(comm.device)
    return History(samples, sink.steps, trainer.parts.engine.full_state_dict(), optimizer, random)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in leaves(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def assert_same_bits(ours: Any, theirs: Any) -> None:
    for one, other in zip(leaves(ours), leaves(theirs), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def facts(records: list[StepRecord]) -> list[Any]:
    """Everything of a record that is no time."""
    return [(r.step, r.epoch, r.position, r.loss, r.loss_sum, r.count, r.lr, r.grad_norm, r.samples) for r in records]


# The same number of ranks: bit for bit.


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("ranks", "accumulate", "optim"),
    [
        (1, 1, {}),
        (1, 3, {"kind": "sgd"}),
        (2, 1, {}),
        (2, 1, {"kind": "sgd"}),
        (2, 2, {"kind": "torch.optim:RMSprop"}),
        (3, 2, {}),
    ],
    ids=str,
)
def test_at_the_same_number_of_ranks_the_run_is_bit_identical(
    ranks: int, accumulate: int, optim: dict[str, Any], tmp_path: Path
) -> None:
    """With dropout, momenta, warm-up and ragged batches; stopped inside an epoch and at its end."""
    config = make_config(accumulate=accumulate, **optim)
    whole = run_virtual(lambda comm: train(comm, config, save=tmp_path), ranks)
    assert [len(history.records) for history in whole] == [STEPS] * ranks
    for step in (1, 4, 6):
        path = tmp_path / f"step-{step:08d}"
        resumed = run_virtual(lambda comm, path=path: train(comm, config, load=path), ranks)
        for ours, theirs in zip(resumed, whole, strict=True):
            assert ours.samples == theirs.samples[step:]
            assert facts(ours.records) == facts(theirs.records[step:])
            assert_same_bits(ours.model, theirs.model)
            assert_same_bits(ours.optimizer, theirs.optimizer)
            assert_same_bits(ours.random, theirs.random)


def test_dropout_is_at_work() -> None:
    """Guards the test above: without the random states the run is another one."""
    config = make_config()
    (whole,) = run_virtual(lambda comm: train(comm, config), 1)
    (other,) = run_virtual(lambda comm: train(comm, config.model_copy(update={"train": _with_seed(config, 4)})), 1)
    assert whole.records[0].loss != other.records[0].loss


def _with_seed(config: Config, seed: int) -> Any:
    return config.train.model_copy(update={"seed": seed})


def test_random_states_of_the_checkpoint_are_needed_for_the_same_bits(tmp_path: Path) -> None:
    config = make_config()
    (whole,) = run_virtual(lambda comm: train(comm, config, save=tmp_path), 1)
    path = tmp_path / "step-00000004"
    part = json.loads((path / "rank-00000.json").read_text())
    part["values"] = encode({"random": capture_random_states(CPU)})
    (path / "rank-00000.json").write_text(json.dumps(part))
    (resumed,) = run_virtual(lambda comm: train(comm, config, load=path), 1)
    assert resumed.samples == whole.samples[4:]
    assert facts(resumed.records) != facts(whole.records[4:])


def test_a_trainer_goes_back_to_what_it_saved(tmp_path: Path) -> None:
    config = make_config()
    trainer = build_trainer(config, SoloCommunicator(CPU))
    for _ in itertools.islice(trainer.steps(), 3):
        pass
    checkpoint = save_now(trainer, tmp_path)
    for _ in trainer.steps():
        pass
    assert trainer.step == STEPS
    trainer.load_state(checkpoint)
    assert (trainer.step, trainer.position) == (3, 36)
    assert [result.step for result in trainer.steps()] == list(range(4, STEPS + 1))


# Another number of ranks: the same samples, rates and (without dropout) numbers.


def merged(histories: list[History], accumulate: int) -> list[list[int]]:
    """The samples of each step over all ranks, in the order of the global batch."""
    steps = []
    for per_rank in zip(*(history.samples for history in histories), strict=True):
        size, parts = sum(map(len, per_rank)), accumulate * len(histories)
        rest = [list(samples) for samples in per_rank]
        step: list[int] = []
        for part in range(parts):
            length = (part + 1) * size // parts - part * size // parts
            mine = rest[part % len(histories)]
            step += [mine.pop(0) for _ in range(length)]
        steps.append(step)
    return steps


@pytest.mark.some(1)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 3)])
def test_at_another_number_of_ranks_order_and_rates_go_on(before: int, after: int, tmp_path: Path) -> None:
    config = make_config(dropout=0.0)
    whole = run_virtual(lambda comm: train(comm, config, save=tmp_path), before)
    for step in (2, 4):
        path = tmp_path / f"step-{step:08d}"
        resumed = run_virtual(lambda comm, path=path: train(comm, config, load=path), after)
        assert merged(resumed, 1) == merged(whole, 1)[step:]
        theirs = whole[0].records[step:]
        for ours in resumed:
            assert [r.lr for r in ours.records] == [r.lr for r in theirs]
            assert [(r.step, r.epoch, r.position) for r in ours.records] == [
                (r.step, r.epoch, r.position) for r in theirs
            ]
            assert [r.grad_norm for r in ours.records] == pytest.approx([r.grad_norm for r in theirs], abs=1e-10)
            for name, value in whole[0].model.items():
                torch.testing.assert_close(ours.model[name], value, rtol=0, atol=1e-10)


@pytest.mark.exhaustive  # test_resizing.py looks at whole epochs by default
def test_an_epoch_is_complete_across_a_change_of_ranks(tmp_path: Path) -> None:
    """Stopped in the middle of an epoch: what follows is exactly the rest of it, no sample twice."""
    config = make_config(dropout=0.0)
    first = run_virtual(lambda comm: train(comm, config, save=tmp_path), 2)
    second = run_virtual(lambda comm: train(comm, config, load=tmp_path / "step-00000002"), 4)
    epoch = merged(first, 1)[:2] + merged(second, 1)[:2]
    assert sorted(itertools.chain.from_iterable(epoch)) == list(range(LENGTH))


def test_at_another_number_of_ranks_each_rank_draws_numbers_of_its_own(a_run: Callable[[], Path]) -> None:
    config, folder = make_config(), a_run()

    def draw(comm: Communicator) -> tuple[list[float], list[float], float]:
        trainer = build_trainer(config, comm)
        fresh = torch.rand(2).tolist()
        trainer.load_state(open_checkpoint(folder / "step-00000004"))
        return fresh, torch.rand(2).tolist(), float(np.random.random())

    results = run_virtual(draw, 3)
    drawn = [tuple(numbers) for fresh, loaded, _ in results for numbers in (fresh, loaded)]
    assert len(set(drawn)) == 6  # not those of another rank, and not again those of the run's beginning
    assert len({number for _, _, number in results}) == 3


# What does not fit is refused.


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Trains the usual config on one rank when it is first asked for; returns the folder, which tests copy."""
    folder = tmp_path_factory.mktemp("run")

    def trained() -> Path:
        if not list_checkpoints(folder):
            run_virtual(lambda comm: train(comm, make_config(), save=folder), 1)
        return folder

    return trained


@pytest.fixture
def saved(a_run: Callable[[], Path], tmp_path: Path) -> Path:
    """The last checkpoint of a run, in a folder of the test's own."""
    shutil.copytree(a_run(), tmp_path, dirs_exist_ok=True)
    return list_checkpoints(tmp_path)[-1]


def refusal(path: Path, config: Config) -> str:
    trainer = build_trainer(config, SoloCommunicator(CPU))
    with pytest.raises(CheckpointError) as failure:
        trainer.load_state(open_checkpoint(path))
    return str(failure.value)


def wider() -> Config:
    config = make_config()
    return config.model_copy(update={"model": config.model.model_copy(update={"hidden_dim": 18})})


def test_a_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    message = refusal(saved, wider())
    assert f"the checkpoint of step {STEPS} does not fit this model or optimizer" in message
    assert "size mismatch" in message
    assert "resume with the config that the run was started with" in message


def test_a_checkpoint_with_other_names_is_refused(saved: Path) -> None:
    manifest = read_manifest(saved)
    name = next(iter(open_checkpoint(saved).shapes("model/")))
    tensors = dict(manifest.tensors)
    tensors[f"model/{name}_of_old"] = tensors.pop(f"model/{name}")
    (saved / "manifest.json").write_text(manifest_text(dataclasses.replace(manifest, tensors=tensors)))
    message = refusal(saved, make_config())
    assert f"unexpected {name}_of_old" in message
    assert f"missing {name}" in message


@pytest.mark.parametrize("optim", [{"kind": "sgd"}, {"kind": "torch.optim:RMSprop"}])
def test_the_state_of_another_optimizer_is_refused(optim: dict[str, Any], saved: Path) -> None:
    """torch itself takes it, and fails in the next step with a KeyError."""
    message = refusal(saved, make_config(**optim))
    assert "its optimizer is not" in message


def test_an_optimizer_with_other_groups_is_refused(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    trainer = build_trainer(make_config(), SoloCommunicator(CPU))
    parameters = list(trainer.parts.engine.parameters())
    trainer = Trainer(dataclasses.replace(trainer.parts, optimizer=torch.optim.AdamW(parameters)))
    with pytest.raises(CheckpointError, match="parameter group"):
        trainer.load_state(checkpoint)


@pytest.mark.parametrize("keep_bytes", [0, 1, 1000, -1])
def test_a_truncated_checkpoint_is_refused(keep_bytes: int, saved: Path) -> None:
    for file in saved.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:keep_bytes])
    trainer = build_trainer(make_config(), SoloCommunicator(CPU))
    with pytest.raises(CheckpointError, match="use an older checkpoint"):
        trainer.load_state(open_checkpoint(saved))
    with pytest.raises(CheckpointError, match="is damaged"):
        find_checkpoint(str(saved), saved)
    told: list[str] = []
    found = find_checkpoint("auto", saved.parent, tell=lambda passed: told.append(str(passed)))
    assert found == saved.parent / f"step-{STEPS - 1:08d}"
    assert len(told) == 1
    assert told[0].startswith(f"passed over {saved.name}: ")


def test_resume_takes_the_newest_checkpoint_of_the_run(a_run: Callable[[], Path], tmp_path: Path) -> None:
    shutil.copytree(a_run(), tmp_path / "checkpoints")
    assert find_checkpoint("auto", tmp_path) == tmp_path / "checkpoints" / f"step-{STEPS:08d}"


def test_a_save_that_fails_midway_leaves_the_older_ones_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends at the failed save; resumed from the one before it, it ends as if nothing had happened."""
    config = make_config()
    whole = run_virtual(lambda comm: train(comm, config), 2)
    write, count = LocalFiles.write, itertools.count(1)

    def full_disk(self: LocalFiles, path: Path, chunks: Any) -> Any:
        """The disk is full in the sixth save, on rank 1, after some bytes."""
        if path.name.startswith("rank-00001.f") and next(count) == 6:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return write(self, path, chunks)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "write", full_disk)
        with pytest.raises(RankFailedError) as failure:
            run_virtual(lambda comm: train(comm, config, save=tmp_path), 2)
    assert isinstance(failure.value.__cause__, CheckpointError)
    assert "No space left" in str(failure.value.__cause__)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step-{step:08d}" for step in range(1, 6)]
    resumed = run_virtual(lambda comm: train(comm, config, load=find_checkpoint("auto", tmp_path)), 2)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert facts(ours.records) == facts(theirs.records[5:])
        assert_same_bits(ours.model, theirs.model)


def test_a_finished_run_has_nothing_left_to_do(saved: Path) -> None:
    config = make_config()
    (resumed,) = run_virtual(lambda comm: train(comm, config, load=saved), 1)
    assert resumed.records == []
    checkpoint = open_checkpoint(saved)
    assert_same_bits(resumed.model, {name: checkpoint.read(f"model/{name}") for name in resumed.model})


class Frozen(nn.Module):
    """Not trained in full, and with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.body.weight.requires_grad_(False)
        self.head = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.head(torch.tanh(self.body(x)))


def test_frozen_parameters_and_buffers_are_part_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_model(*_: Any, **__: Any) -> nn.Module:
        return Frozen()

    monkeypatch.setattr(import_module("paceline.train.assemble"), "build_model", build_model)
    config = make_config()
    whole = run_virtual(lambda comm: train(comm, config, save=tmp_path), 2)
    resumed = run_virtual(lambda comm: train(comm, config, load=tmp_path / "step-00000004"), 2)
    assert int(whole[0].model["seen"]) == STEPS
    for ours, theirs in zip(resumed, whole, strict=True):
        assert_same_bits(ours.model, theirs.model)


def test_a_resumed_run_takes_its_rate_from_the_config(tmp_path: Path) -> None:
    """A changed ``optim.lr`` is what the user asks for now, not what the checkpoint remembers."""
    settings = {
        "model": {"kind": "mlp", "hidden_dim": 8},
        "data": {"kind": "synthetic_classification", "samples": 64, "features": 4, "classes": 2},
        "train": {"steps": 4, "global_batch": 16},
    }

    def trainer(lr: float) -> Trainer:
        config = config_from_dict({**settings, "optim": {"lr": lr}})
        return build_trainer(config, SoloCommunicator(torch.device("cpu")))

    first = trainer(0.01)
    for result in first.steps():
        if result.step == 2:
            break
    second = trainer(0.5)
    second.load_state(save_now(first, tmp_path))
    assert [result.lr for result in second.steps()] == [0.5, 0.5]
