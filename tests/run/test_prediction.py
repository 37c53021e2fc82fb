"""What ``paceline train`` expects of runs that only a dry run prices, and what it writes down when a run is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_records as records
import pytest

from paceline.cluster.detect import Machine
from paceline.config import Config, load_config
from paceline.records.records import to_line
from paceline.rehearse.dryrun.expected import Background, expect_by_dry_run
from paceline.run.decide import BackgroundPrediction, predict_run
from paceline.search.expect import expect_run, expected_memory
from paceline.search.expectation import Expectation, read_expectation
from paceline.units import GIB

HOST = Machine(processor="a processor", cores=2, memory_bytes=8.0 * GIB)
GPT = (
    "model={kind: gpt, layers: 1, heads: 2, width: 16, context: 8}",
    "data={kind: synthetic_tokens, vocab_size: 16, samples: 64, context: 8}",
    "parallel={ranks: 2, device: cpu}",
    "train={steps: 40, global_batch: 8}",
    "optim={kind: adamw, lr: 1e-3}",
)
MLP = ("model={kind: mlp, hidden_dim: 8}", "data={kind: synthetic_classification, samples: 64}", *GPT[2:])


def _config(*changes: str) -> Config:
    return load_config(None, [*GPT, *changes])


def _by_dry_run(*changes: str) -> float:
    found = expect_by_dry_run(load_config(None, [*MLP, *changes]), HOST)
    assert found.step_s is not None, found.reason
    return found.step_s


def test_what_formulas_leave_to_the_dry_run_is_priced_there() -> None:
    plain = _by_dry_run()
    for policy in ("fp16", "topk", "powersgd"):
        changes = (f"comm.compression.policy={policy}", "comm.compression.min_size=1")
        assert _by_dry_run(*changes) > plain  # so little travels faster than it is compressed
        by_formulas = expect_run(_config(*changes), HOST)
        assert by_formulas.reason == f"comm.compression.policy = {policy} is priced kernel by kernel alone"
        assert by_formulas.memory_bytes == expected_memory(_config(*changes))
    assert _by_dry_run("comm.algorithm=ring") != plain
    offloaded = ("parallel.strategy=fsdp", "memory.offload=[optimizer, parameters]")
    assert _by_dry_run(*offloaded) == _by_dry_run(offloaded[0])  # on a CPU nothing moves


def test_what_is_owed_is_part_of_the_memory() -> None:
    plain, owing = expected_memory(_config()), expected_memory(_config("comm.compression.policy=topk"))
    assert plain is not None
    assert owing is not None
    assert owing > plain


@pytest.mark.parametrize("model", [GPT, MLP])
def test_what_nobody_prices_has_its_reason_and_its_memory(tmp_path: Path, model: tuple[str, ...]) -> None:
    config = load_config(None, [*model, "comm.compression.policy=threshold"])
    formula = predict_run(config)
    with BackgroundPrediction(config, tmp_path, formula):
        pass
    found = formula if model is GPT else read_expectation(tmp_path)
    assert found is not None
    assert found.reason.startswith("comm.compression.policy = threshold: how much it sends follows from values")
    assert (found.step_s, found.memory_bytes) == (None, expected_memory(config))
    assert found.memory_bytes is not None
    assert (tmp_path / "prediction.json").exists() == (model is MLP)  # the other's is there since before the run


def test_a_microbatch_that_the_ranks_find_is_predicted_with() -> None:
    auto, found = _config("train.microbatch=auto"), _config("train.microbatch=2")
    assert predict_run(auto) == Expectation(ranks=2, reason="train.microbatch = auto is decided by the ranks")
    assert predict_run(found) != predict_run(_config("train.microbatch=4"))


@pytest.mark.parametrize("is_known", [True, False])
def test_the_microbatch_is_that_of_this_attempts_first_record(tmp_path: Path, is_known: bool) -> None:
    config = _config("train.steps=10", "train.microbatch=auto")
    (tmp_path / "records").mkdir()
    before = replace(records.RUN, microbatch=4, global_batch=8, time=1.0)
    with BackgroundPrediction(config, tmp_path, predict_run(config)):
        now = replace(before, microbatch=2, time=time.time())
        lines = [before, now] if is_known else [before]
        (tmp_path / "records" / "rank-0.jsonl").write_text("".join(to_line(each) for each in lines))
    wanted = predict_run(_config("train.steps=10", "train.microbatch=2"))
    assert wanted is not None
    assert read_expectation(tmp_path) == (replace(wanted, is_later=True) if is_known else None)


@pytest.mark.parametrize("model", [GPT, MLP])
def test_what_was_predicted_before_the_start_is_still_there_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: tuple[str, ...]
) -> None:
    config = load_config(None, [*model])
    formula, beside = predict_run(config), Expectation(ranks=2, step_s=0.274, plan="kernel by kernel")
    monkeypatch.setattr(Background, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(Background, "result", lambda *_: beside)
    if formula is not None:
        (tmp_path / "prediction.json").write_text(formula.to_text())
    with BackgroundPrediction(config, tmp_path, formula):
        pass
    found = read_expectation(tmp_path)
    assert found is not None
    later = found if formula is None else found.later
    assert later is not None
    assert (later.step_s, later.is_later) == (0.274, True)
    if formula is not None:
        assert replace(found, later=None) == formula


def test_nothing_is_written_of_a_run_that_failed(tmp_path: Path) -> None:
    config = load_config(None, [*MLP, "comm.compression.policy=threshold"])
    with pytest.raises(KeyError), BackgroundPrediction(config, tmp_path, None):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("model", [GPT, MLP])
@pytest.mark.parametrize(
    "changes",
    [
        ["comm.compression.policy=topk"],
        ["comm.compression.policy=powersgd"],
        ["comm.compression.policy=fp16", "comm.algorithm=ring"],
        ["parallel.strategy=fsdp", "memory.offload=[optimizer]"],
        ["train.microbatch=auto"],
    ],
    ids=str,
)
def test_runs_of_real_ranks_are_predicted_kernel_by_kernel(
    project: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, model: tuple[str, ...], changes: list[str]
) -> None:
    result = Background.result  # it gets what nobody else wants of a machine under load
    monkeypatch.setattr(Background, "result", lambda self, _: result(self, 600.0))
    called = call("train", "tiny.yaml", *model, *changes, "--json")
    assert (called.code, called.err) == (0, "")
    found = json.loads(called.out)["prediction"]
    assert found["predicted"] == json.loads((project / "runs" / "tiny" / "prediction.json").read_text())
    later = found["predicted"]["later"] or found["predicted"]
    assert later["plan"].endswith("kernel by kernel")
    assert later["is_later"]
    assert found["step_ratio"] == found["measured_step_s"] / found["predicted"]["step_s"]
    assert found["memory_ratio"] == found["measured_memory_bytes"] / found["predicted"]["memory_bytes"]
    assert 0.4 < found["memory_ratio"] < 2.5  # most of it is the process
