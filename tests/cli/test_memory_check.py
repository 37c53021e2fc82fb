"""A run that this machine cannot hold is refused before any rank starts, unless it is to run all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cluster.detect import Machine
from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, load_config
from paceline.errors import UsageError
from paceline.plan.plan import RunMachine
from paceline.run.decide import check_memory, check_virtual
from paceline.search.expect import needed

CONFIGS = Path(__file__).parents[2] / "configs"
Call = Callable[..., Any]


def _config(name: str, *changes: str) -> Config:
    return load_config(CONFIGS / name, ["parallel.device=cpu", "parallel.ranks=2", *changes])


def test_a_model_that_no_host_holds_is_refused_with_all_there_is_to_say() -> None:
    with pytest.raises(UsageError) as caught:
        check_memory(_config("gpt_1t.yaml"))
    first, *_, last = str(caught.value).splitlines()
    assert first.startswith("out of memory: 2 ranks need ")
    assert "activations" in first
    assert "this host has" in first
    assert last == "  to start it all the same: --no-memory-check"


SMALL = ["digits", "gpt_fsdp", "gpt_moe", "gpt_pipeline", "gpt_pydoc", "gpt_small", "resnet_images"]


@pytest.mark.parametrize("name", SMALL)
def test_configs_for_small_machines_fit_into_two_gibibytes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.cluster.detect.host_memory", lambda: 2.0 * 2**30)
    check_memory(_config(f"{name}.yaml"))
    assert capsys.readouterr().err == ""


def test_near_the_limit_it_is_told_and_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config("gpt_pydoc.yaml")
    need = needed(config)
    assert need is not None
    monkeypatch.setattr("paceline.cluster.detect.host_memory", lambda: 1.05 * need.total)
    check_memory(config, is_told=False)
    assert capsys.readouterr().err == ""
    check_memory(config)
    assert capsys.readouterr().err.startswith("paceline: near the limit of memory: 2 ranks need ")
    monkeypatch.setattr("paceline.cluster.detect.host_memory", lambda: 0.99 * need.total)
    with pytest.raises(UsageError, match="out of memory: 2 ranks need"):
        check_memory(config)


def test_a_rank_on_a_gpu_has_the_memory_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("gpt_7b.yaml", "parallel.device=cuda", "train.microbatch=1")
    need = needed(config)
    assert need is not None
    machine = Machine(processor="x", cores=8, memory_bytes=2.0**40, gpus=("NVIDIA H100 80GB HBM3",) * 2)
    for has, is_refused in ((2 * need.total, False), (need.total - 1, True)):
        room = RunMachine(device="cuda", device_bytes=has, host_bytes=0, ranks=1, node_ranks=1)
        monkeypatch.setattr("paceline.free_memory.measure_machine", lambda *_, room=room: room)
        monkeypatch.setattr("paceline.cluster.detect.detect_machine", lambda **_: machine)
        refusal = pytest.raises(UsageError, match=r"out of memory: a rank needs .* the smallest GPU has")
        with refusal if is_refused else contextlib.nullcontext() as caught:
            check_memory(config)
        if caught is not None:
            assert "\n  fits with parallel.strategy=" in str(caught.value)


def test_a_rank_of_another_launcher_is_refused_too(project: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("paceline.run.worker.connect", lambda *_, **__: SoloCommunicator(torch.device("cpu")))
    monkeypatch.setattr("paceline.cluster.detect.host_memory", lambda: 2.0**20)
    words = ["tiny.yaml", "model={kind: mlp}", "data={kind: digits}", "parallel.ranks=auto"]
    refused = call("train", *words)
    assert "out of memory: 1 rank needs " in refused.err
    assert not (project / "runs").exists()


def test_virtual_ranks_that_no_host_holds_are_refused() -> None:
    with pytest.raises(UsageError, match=r"2 virtual ranks need .* this host has"):
        check_virtual(_config("gpt_1t.yaml"))
    check_virtual(_config("digits.yaml", "parallel.ranks=4"))


def test_train_refuses_before_it_makes_a_folder(project: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cluster.detect.host_memory", lambda: 2.0**20)
    words = ["tiny.yaml", "model={kind: mlp}", "data={kind: digits}", "recovery.warm=false"]
    refused = call("train", *words)
    assert refused.code != 0
    assert "out of memory: 2 ranks need " in refused.err
    assert not (project / "runs").exists()
    started: list[object] = []
    monkeypatch.setattr("paceline.run.train.run_decided", lambda *args, **_: started.append(args))
    assert call("train", *words, "--no-memory-check").code == 0
    assert len(started) == 1
