"""``torch.save({"m": engine.state_dict(), "o": optimizer.state_dict()})``, and what it gives when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.errors import PacelineError
from paceline.models.gpt import GPT, gpt_config
from paceline.shards import own_optimizer_state

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "fsdp": {"strategy": "fsdp"},
    "hybrid": {"strategy": "hybrid", "shard_ranks": 2},
    "offload": {"strategy": "fsdp", "offload": ("optimizer", "gradients", "parameters")},
    "tensor": {"tensor": 2, "gathers_logits": True},
    "pipeline": {"pipeline": 2},
    "pipeline, zero1": {"pipeline": 2, "strategy": "zero1"},
}
MASTERS = {f"{name}, masters": {"strategy": name, "precision": "bf16_master"} for name in ("ddp", "zero2", "fsdp")}


def make_model(options: dict[str, Any] | None = None) -> GPT:
    torch.manual_seed(0)
    model = GPT(gpt_config("gpt-nano", layers=2, context=8, vocab_size=31))
    return model if "precision" in (options or {}) else model.double()


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def cross_entropy(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    outputs = model(tokens).flatten(0, 1)
    return F.cross_entropy(outputs.float() if outputs.dtype == torch.bfloat16 else outputs, tokens.flatten()), 1


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        rows = (torch.arange(32).view(4, 8) * (step + 3)) % 31
        if isinstance(model, Engine):
            model.run_microbatches([rows.chunk(model.comm.size)[model.comm.rank]], cross_entropy)
        else:
            cross_entropy(model, rows)[0].backward()
        optimizer.step()
        optimizer.zero_grad()


def ranks_of(options: dict[str, Any]) -> int:
    return 4 if options.keys() & {"shard_ranks"} or options == STRATEGIES["pipeline, zero1"] else 2


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*STRATEGIES, *MASTERS])
def test_a_run_saved_the_usual_way_goes_on_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    options = {**STRATEGIES, **MASTERS}[name]
    path = tmp_path / "saved.pt"

    def straight(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = parallelize(make_model(options), comm, **options)
        optimizer = make_optimizer(engine)
        train(engine, optimizer, range(2))
        state = {"m": engine.state_dict(), "o": optimizer.state_dict()}
        if comm.rank == 0:
            torch.save(state, path)
        train(engine, optimizer, range(2, 4))
        return engine.state_dict()

    def resumed(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = parallelize(make_model(options), comm, **options)
        optimizer = make_optimizer(engine)
        state = torch.load(path)
        engine.load_state_dict(state["m"])
        optimizer.load_state_dict(state["o"])
        train(engine, optimizer, range(2, 4))
        return engine.state_dict()

    expected = run_virtual(straight, ranks=ranks_of(options))[0]
    same(run_virtual(resumed, ranks=ranks_of(options))[0], expected, atol=0)
    alone = make_optimizer(make_model(options))  # and one process takes it, too
    alone.load_state_dict(torch.load(path)["o"])
    for parameter, state in alone.state.items():
        assert state["exp_avg"].shape == parameter.shape


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, ranks_of(each)) for name, each in STRATEGIES.items()), ("fsdp", 1), ("offload", 1)]
)
def test_an_optimizer_state_of_one_process_goes_on_under_every_strategy(name: str, ranks: int, tmp_path: Path) -> None:
    options = STRATEGIES[name]
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(model, optimizer, range(2, 4))

    def resumed(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = parallelize(make_model(), comm, **options)
        optimizer = make_optimizer(engine)
        state = torch.load(tmp_path / "saved.pt")
        engine.load_state_dict(state["m"])
        optimizer.load_state_dict(state["o"])
        train(engine, optimizer, range(2, 4))
        return engine.state_dict()

    same(run_virtual(resumed, ranks=ranks)[0], model.state_dict(), atol=1e-10)


@pytest.mark.parametrize("options", [{"strategy": "fsdp"}, {"pipeline": 2}])
def test_rank_0_alone_cannot_ask_for_the_state_of_parts_and_nobody_hangs(options: dict[str, Any]) -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(make_model(), comm, **options)
        optimizer = make_optimizer(engine)
        train(engine, optimizer, range(1))
        if comm.rank == 0:
            optimizer.state_dict()
        train(engine, optimizer, range(1, 2))

    with pytest.raises(PacelineError, match=rf"{Path(__file__).name}:\d+ in work through paceline"):  # its own line
        run_virtual(work, ranks=2)


def test_the_part_of_one_rank_is_refused_with_the_fix() -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(make_model(), comm, "fsdp")
        optimizer = make_optimizer(engine)
        train(engine, optimizer, range(1))
        with pytest.raises(ValueError, match=r"load what optimizer\.state_dict\(\) gave on all ranks"):
            optimizer.load_state_dict(own_optimizer_state(optimizer))

    run_virtual(work, ranks=2)


def test_a_state_taken_before_the_first_step_has_the_groups_of_one_process() -> None:
    def work(comm: Communicator) -> dict[str, Any]:
        engine = parallelize(make_model(), comm, pipeline=2)
        return make_optimizer(engine).state_dict()

    expected = make_optimizer(make_model()).state_dict()
    for found in run_virtual(work, ranks=2):
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"] == {}
