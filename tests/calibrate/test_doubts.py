"""The doubt about a config's step is halved by timing what it consists of: its own calls, sizes, or whole steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from made_run import ENTRY, HOST, STEP, make_run
from typer.testing import CliRunner

from paceline.calibrate import doubts
from paceline.calibrate.doubts import KeptCalls, KernelCall, TensorLike, halve_doubt, time_call
from paceline.calibrate.timing import Stopwatch
from paceline.cli.app import app
from paceline.cluster.entries import parse_catalog
from paceline.config import Config, config_from_dict
from paceline.errors import UsageError
from paceline.rehearse.dryrun.record import record_stages

QUICK = Stopwatch(samples=3, most_s=0.01)
CPU = torch.device("cpu")
# A step whose collectives, or whose host, take nearly all of the time.
SLOW_LINK = ENTRY.replace("gb_per_s: 4", "gb_per_s: 0.001").replace("{1024: 50}", "{1024: 500000, 4096: 900000}")
SLOW_HOST = ENTRY.replace("operation_us: 20", "operation_us: 60")
SLOW_KERNELS = ENTRY.replace("fp32: 0.03", "fp32: 0.0001").replace("{1000: 20.0}", "{1000: 0.001}")


def config_of(model: dict[str, Any], data: dict[str, Any], **parallel: Any) -> Config:
    values = {
        "model": model,
        "data": {"samples": 8, **data},
        "train": {"steps": 4, "global_batch": 4},
        "parallel": {"ranks": 2, "device": "cpu", "strategy": "ddp", **parallel},
        "optim": {"kind": "adamw"},
    }
    return config_from_dict(values)


TOKENS = {"kind": "synthetic_tokens", "vocab_size": 32, "context": 8}
IMAGES = {"kind": "synthetic_images", "classes": 4, "size": 16}
GPT = {"kind": "gpt", "layers": 2, "heads": 2, "width": 16, "context": 8}
MLP = config_of({"kind": "mlp", "hidden_dim": 32}, {"kind": "synthetic_classification", "features": 16, "classes": 4})


@pytest.mark.parametrize(
    "config",
    [
        config_of(GPT, TOKENS),
        config_of(GPT, TOKENS, strategy="fsdp"),
        config_of(GPT | {"experts": 4, "active": 2}, TOKENS, ranks=1),
        pytest.param(config_of({"kind": "resnet", "depth": 18}, IMAGES, ranks=1), marks=pytest.mark.exhaustive),
        MLP,
    ],
    ids=["gpt", "fsdp", "experts", "resnet", "mlp"],
)
def test_every_kernel_of_a_step_can_be_called_again(config: Config) -> None:
    calls = KeptCalls()
    (program,) = record_stages(config, ranks=config.parallel.decided_ranks, calls=calls)
    labels = {event.operation.label for event in program.events if hasattr(event, "operation")}
    assert len(labels) > 10
    assert labels <= calls.kept.keys()
    failed = {}
    for label in labels:
        try:
            assert time_call(calls.kept[label], CPU, QUICK) > 0
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            failed[label] = error
    assert len(failed) <= 0.02 * len(labels), failed


def test_a_tensor_is_made_as_it_was() -> None:
    turned = torch.empty(3, 5).t()
    expanded = torch.empty(4, 1).expand(4, 6)
    for source in (turned, expanded, torch.empty(0, 3), torch.empty((), dtype=torch.bfloat16)):
        made = TensorLike.of(source).make(CPU)
        assert (made.shape, made.stride(), made.dtype) == (source.shape, source.stride(), source.dtype)
        assert bool(((made >= 0) & (made <= 1)).all())
    assert TensorLike.of(expanded).num_bytes == 16
    assert not TensorLike.of(torch.ones(3, dtype=torch.int64)).make(CPU).any()  # a place in every table


def test_the_kernels_of_one_call_share_its_time() -> None:
    calls = KeptCalls()
    record_stages(config_of({"kind": "resnet", "depth": 18}, IMAGES, ranks=1), ranks=1, calls=calls)
    both = [call for call in calls.kept.values() if len(call.labels) == 2]
    assert both
    for call in both:
        assert sum(call.labels.values()) == pytest.approx(1.0)
        assert all(calls.kept[label] is call for label in call.labels)


def in_this_process(work: Any, ranks: int, *, args: tuple[Sequence[KernelCall], bool], **_: Any) -> list[Any]:
    """Times in this process, as one of the ranks: with all of its calls, and without waiting for others."""
    calls, is_cuda = args
    assert not is_cuda
    assert work is doubts._time_calls
    return [[time_call(each, CPU, QUICK) for each in calls]] * ranks


def test_kernels_that_were_timed_halve_the_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "run_processes", in_this_process)
    base, told = tmp_path / "mine.yaml", list[str]()
    base.write_text(SLOW_KERNELS)
    found = halve_doubt(MLP, HOST, base, told.append, train=never)
    assert found.part == "kernels"
    assert told[0].startswith("least certain: kernels, by ")
    assert found.after.doubts["kernels"] < 0.5 * found.before.doubts["kernels"]
    assert found.after.timed_share > found.before.timed_share == 0.0
    entry = parse_catalog(found.text, "the entry").devices["mine"]
    assert entry.kernels_us == {each.name: pytest.approx(1e6 * each.measured_s, rel=1e-3) for each in found.measured}
    assert sorted(found.measured, key=lambda each: -each.count * each.predicted_s) == list(found.measured)
    assert found.after.mfu <= 1.0  # a peak that was passed is none
    assert found.text.startswith("# Measured by: somebody\n#")
    assert json.loads(json.dumps(found.to_json()))["measured"][0]["name"] in entry.kernels_us
    # what is known is not timed again: of the rest, or of what was least certain then
    base.write_text(found.text)
    again = halve_doubt(MLP, HOST, base, told.append, train=fast_run)
    if again.part == "kernels":
        assert not {each.name for each in again.measured} & entry.kernels_us.keys()


def never(_: Config, folder: Path) -> Path:
    raise AssertionError(f"no steps are trained in {folder}")


def fast_run(config: Config, folder: Path) -> Path:
    assert config.train.steps == 12
    return make_run(folder / "run", step=STEP)


def test_the_host_is_told_by_steps_of_the_config(tmp_path: Path) -> None:
    base = tmp_path / "mine.yaml"
    base.write_text(SLOW_HOST)
    found = halve_doubt(MLP, HOST, base, lambda _: None, train=fast_run)
    assert found.part == "the host"
    assert found.after.seconds == pytest.approx(0.0012, rel=0.1)  # what the run's slowest rank took
    (row,) = found.measured
    assert row.measured_s == pytest.approx(0.0012)


def test_sizes_of_collectives_are_timed_where_ranks_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "mine.yaml"
    base.write_text(SLOW_LINK)
    asked: list[tuple[int, ...]] = []

    def measured(wanted: Any) -> dict[str, tuple[tuple[int, float], ...]]:
        asked.append(wanted.sizes)
        return {"shared_memory": tuple((size, 1e-4) for size in wanted.sizes)}

    monkeypatch.setattr(doubts, "measure_sizes", measured)
    found = halve_doubt(MLP, HOST, base, lambda _: None, train=never)
    assert found.part == "communication"
    (sizes,) = asked
    assert set(sizes) <= parse_catalog(found.text, "the entry").links["mine-shm"].all_reduce_us[2].keys()
    assert {each.measured_s for each in found.measured} == {1e-4}
    assert found.after.seconds < 0.1 * found.before.seconds


def test_kernels_of_other_ranks_are_not_taken_for_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "run_processes", in_this_process)
    base = tmp_path / "mine.yaml"
    base.write_text(SLOW_KERNELS)
    one = MLP.with_values("parallel", ranks=1, threads=2)
    with pytest.raises(UsageError, match="another number of cores"):
        halve_doubt(one, HOST, base, lambda _: None, train=never)


@pytest.mark.exhaustive
def test_the_command_times_on_ranks_and_predict_says_so(tmp_path: Path) -> None:
    entry = tmp_path / "mine.yaml"
    config = ["gpt_pydoc", "parallel.ranks=2", "model.layers=1"]
    run = CliRunner().invoke(app, ["calibrate", "--for", *config, "--output", str(entry), "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["part"] == "kernels"
    assert found["after"]["doubt_s"] < found["before"]["doubt_s"]
    told = CliRunner().invoke(app, ["predict", *config, "--cluster", str(entry)])
    assert "Kernels that were timed one by one make" in told.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_of_a_gpu_are_timed(tmp_path: Path) -> None:
    entry = tmp_path / "mine.yaml"
    config = ["gpt_124m", "model.compile=false", "parallel.ranks=1", "train.global_batch=8"]
    run = CliRunner().invoke(app, ["calibrate", "--for", *config, "--output", str(entry), "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["after"]["doubt_s"] < 0.6 * found["before"]["doubt_s"]
    for each in found["measured"]:
        assert 0.2 < each["measured_s"] / each["predicted_s"] < 5, each
