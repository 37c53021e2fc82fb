"""Other libraries' readers and writers: torch's DCP, safetensors and PEFT read what we export, and we read theirs.

A small transformer takes a step of AdamW on two ranks; the oracle is one process. torch's DCP checkpoint of two ranks
is written under torch's own ``fully_shard``.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_encoder import batch_of, build, train_step
from small_models import batch_of as text_of
from small_models import build as build_model
from small_models import logits_of, loss_of

from paceline import checkpoint
from paceline.checkpoint.read import fill_model, open_checkpoint
from paceline.checkpoint.tools.incoming import format_of, open_incoming, save_incoming
from paceline.checkpoint.tools.outgoing import ExportOptions, Format, export
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize

pytestmark = [pytest.mark.judge, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
RANKS = 2
State = dict[str, torch.Tensor]


@functools.cache
def trained_alone() -> tuple[Any, torch.optim.AdamW]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_step(model, optimizer, batch_of(tuple(range(RANKS))))
    return model, optimizer


def weights_alone() -> State:
    return {name: value.detach() for name, value in trained_alone()[0].state_dict().items()}


def averages_alone() -> State:
    model, optimizer = trained_alone()
    return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}


def saved_by_ranks(comm: Communicator, strategy: str, folder: Path) -> None:
    engine = parallelize(build(), comm, strategy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    train_step(engine, optimizer, batch_of((comm.rank,)))
    checkpoint.save(folder, engine, optimizer, step=1)


def exported(strategy: str, folder: Path, form: Format) -> Path:
    run_virtual(lambda comm: saved_by_ranks(comm, strategy, folder / "saved"), RANKS)
    saved = open_checkpoint(folder / "saved" / "step-00000001")
    name = {"dcp": "out", "safetensors": "out.safetensors", "torch": "out.pt"}[form]
    return export(saved, folder / name, ExportOptions(format=form, with_optimizer=form != "safetensors"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torchs_dcp_reads_what_we_export(strategy: str, tmp_path: Path) -> None:
    path = exported(strategy, tmp_path, "dcp")
    model = build()
    weights = model.state_dict()
    moments = {name: {"exp_avg": torch.zeros_like(value)} for name, value in model.named_parameters()}
    dcp.load({"model": weights, "optim": {"state": moments}}, checkpoint_id=path, no_dist=True)
    torch.testing.assert_close(dict(weights), weights_alone(), **CLOSE)
    found = {name: state["exp_avg"] for name, state in moments.items()}
    torch.testing.assert_close(found, averages_alone(), **CLOSE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torch_load_reads_what_we_export(strategy: str, tmp_path: Path) -> None:
    content = torch.load(exported(strategy, tmp_path, "torch"), weights_only=True)
    torch.testing.assert_close(content["model"], weights_alone(), **CLOSE)
    found = {name: state["exp_avg"] for name, state in content["optim"]["state"].items()}
    torch.testing.assert_close(found, averages_alone(), **CLOSE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_safetensors_reads_what_we_export(strategy: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    found = safetensors.load_file(exported(strategy, tmp_path, "safetensors"))
    torch.testing.assert_close(found, weights_alone(), **CLOSE)


def filled(path: Path, strategy: str, ranks: int) -> list[State]:
    def work(comm: Communicator) -> State:
        engine = parallelize(build(), comm, strategy)
        fill_model(open_checkpoint(path), engine)
        return dict(engine.full_state_dict())

    return run_virtual(work, ranks)


def take_in(path: Path, folder: Path) -> Path:
    incoming = open_incoming(path, format_of(path), "", allows_pickle=True)
    return save_incoming(incoming, folder / "start", str(path))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that torch's DCP wrote of a model under ``fully_shard`` on two ranks."""
    folder = tmp_path_factory.mktemp("theirs")
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    command = [sys.executable, "-m", *launcher, "localhost:0", "--module", "save_sharded", str(folder / "dcp")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "dcp"


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_we_read_what_torchs_dcp_wrote_under_fully_shard(
    strategy: str, ranks: int, theirs: Path, tmp_path: Path
) -> None:
    path = take_in(theirs, tmp_path)
    for state in filled(path, strategy, ranks):
        torch.testing.assert_close(state, weights_alone(), **CLOSE)
    saved = open_checkpoint(path)
    found = {name: saved.read(f"optimizer/{name}/exp_avg") for name, _ in build().named_parameters()}
    torch.testing.assert_close(found, averages_alone(), **CLOSE)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_we_read_what_libraries_wrote(form: str, strategy: str, tmp_path: Path) -> None:
    path = tmp_path / ("theirs.pt" if form == "torch" else "theirs.safetensors")
    if form == "torch":
        torch.save(weights_alone(), path)
    else:
        pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file(weights_alone(), path)
    for state in filled(take_in(path, tmp_path), strategy, 3):
        torch.testing.assert_close(state, weights_alone(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit"])
def test_peft_loads_adapters_that_ranks_trained(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")

    def adapted() -> Any:
        torch.manual_seed(7)
        return (
            peft.get_peft_model(build_model(name), peft.LoraConfig(r=2, target_modules="all-linear")).double().train()
        )

    def work(comm: Communicator) -> State:
        engine = parallelize(adapted(), comm, "fsdp")
        optimizer = torch.optim.SGD([each for each in engine.parameters() if each.requires_grad], lr=0.5)
        loss_of(engine, text_of(name, (comm.rank,))).backward()
        optimizer.step()
        return dict(engine.full_state_dict())

    state = run_virtual(work, RANKS)[0]
    ours = adapted()
    before = logits_of(ours, text_of(name, (5,)))
    ours.load_state_dict(state)
    ours.save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(build_model(name), tmp_path).double().eval()
    batch = text_of(name, (5,))
    with torch.no_grad():
        found = logits_of(theirs, batch)
        torch.testing.assert_close(found, logits_of(ours.eval(), batch), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, before)
