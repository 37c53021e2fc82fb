"""What users do with a module, on an engine."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines import apply
from paceline.engines.apply import parallelize
from paceline.errors import RankFailedError, UsageError
from paceline.models.gpt import GPT, gpt_config


class Net(nn.Module):
    """A model with an attribute and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.width = nn.Linear(4, 6), nn.Linear(6, 2), 6

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.second(self.first(inputs).relu())

    def classify(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self(inputs).argmax(1)
        return found


STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])


@STRATEGIES
def test_states_gradients_modes_and_attributes_are_those_of_the_module(strategy: str) -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(Net(), comm, strategy)
        whole = Net()
        inputs = torch.randn(3, 4)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name])
        changed = {name: value + 1 for name, value in whole.state_dict().items()}
        assert engine.load_state_dict(changed) == ([], [])
        whole.load_state_dict(changed)
        torch.testing.assert_close(engine.forward(inputs), whole(inputs))
        part = {"first.bias": torch.zeros(6), "third": torch.zeros(1)}
        missing, unexpected = engine.load_state_dict(part, strict=False)
        assert (len(missing), unexpected) == (3, ["third"])
        assert not engine.state_dict()["first.bias"].any()
        with pytest.raises(RuntimeError, match=r"first\.weight"):
            engine.load_state_dict(part)
        engine(inputs).sum().backward()
        assert engine.gradients()
        engine.zero_grad()
        assert not engine.gradients()
        named: Any = engine
        assert (named.width, named.training, named.eval().training) == (6, True, False)
        assert [name for name, _ in named.named_modules()] == ["", "first", "second"]
        assert isinstance(named.first, nn.Linear)
        with torch.no_grad():
            assert named.classify(inputs).shape == (3,)
        assert engine.to("cpu") is engine.to(torch.float32) is engine
        assert named.float() is named.cpu() is engine

    run_virtual(work, ranks=2)


@STRATEGIES
def test_what_an_engine_cannot_do_is_refused_with_what_to_call(strategy: str) -> None:
    def work(comm: Communicator) -> None:
        engine: Any = parallelize(Net(), comm, strategy)
        asked = [
            (lambda: engine.to("meta"), r"paceline\.connect\(device"),
            (lambda: engine.cuda(), r"paceline\.connect\(device"),
            (lambda: engine.cuda(0), r"engine\.to\(cuda:0\)(.|\n)*paceline\.connect\(device"),
            (lambda: engine.half(), "cast the model before"),
            (lambda: engine.type(torch.float16), "cast the model before"),
            (lambda: engine.to(torch.bfloat16), "cast the model before"),
            (lambda: engine.apply(print), r"model\.apply"),
            (lambda: engine.compile(), "compile="),
            (lambda: copy.deepcopy(engine), "WeightAverage"),
            (lambda: torch.optim.swa_utils.AveragedModel(engine), "WeightAverage"),
            (lambda: pickle.dumps(engine), r"paceline\.save"),
        ]
        for call, message in asked:
            with pytest.raises(UsageError, match=message):
                call()
        with pytest.raises(AttributeError, match="nor its module, a Net, has an attribute 'wdith'"):
            engine.wdith  # noqa: B018

    run_virtual(work, ranks=2)


def test_a_split_model_has_them_too() -> None:
    def work(comm: Communicator) -> None:
        torch.manual_seed(0)
        model = GPT(gpt_config("gpt-nano", context=8, vocab_size=32))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        engine = parallelize(model, comm, pipeline=2)
        assert engine.state_dict().keys() == state.keys()
        engine.load_state_dict({name: value * 2 for name, value in state.items()})
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, state[name] * 2)

    run_virtual(work, ranks=2)


def test_the_groups_of_hybrid_follow_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def shards(comm: Communicator) -> int:
        return sum(parameter.numel() for parameter in parallelize(Net(), comm, "hybrid").parameters())

    with pytest.raises(RankFailedError, match="hybrid on 4 ranks of one host, without shard_ranks"):
        run_virtual(shards, ranks=4)
    monkeypatch.setattr(apply, "_host", lambda comm: f"host-{comm.rank // 2}")
    held = run_virtual(shards, ranks=4)
    assert held[:2] == held[2:]
    assert sum(held[:2]) == 44
    monkeypatch.setattr(apply, "_host", lambda comm: f"host-{comm.rank // 3}")
    with pytest.raises(RankFailedError, match=r"strategy = 'hybrid' on hosts with 3, 1 ranks(.|\n)*give shard_ranks"):
        run_virtual(shards, ranks=4)


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("ddp", {}, "<DataParallel: 44 parameters, rank 0 of 4, ddp, nothing sharded, buckets: 1, fp32>"),
        ("zero1", {}, "<ZeroParallel: 44 parameters, rank 0 of 4, zero1, optimizer state sharded, buckets: 1, fp32>"),
        (
            "hybrid",
            {"shard_ranks": 2, "precision": "bf16_master"},
            "<FullySharded: 44 parameters, rank 0 of 4, "
            "hybrid, all sharded over 2, replicas: 2, units: 3, bf16_master>",
        ),
    ],
)
def test_a_printed_engine_says_what_it_is(strategy: str, options: dict[str, Any], expected: str) -> None:
    found = run_virtual(lambda comm: str(parallelize(Net(), comm, strategy, **options)), ranks=4)
    assert found[0] == expected


def test_a_printed_engine_of_several_axes_names_them() -> None:
    def work(comm: Communicator) -> str:
        model = GPT(gpt_config("gpt-nano", vocab_size=16, context=8))
        return repr(parallelize(model, comm, "ddp", tensor=2))

    assert "rank 1 of 4, pipeline 1 x tensor 2 x data 2, ddp, nothing sharded" in run_virtual(work, ranks=4)[1]


@STRATEGIES
def test_a_model_with_lazy_modules_is_refused_before_anything_starts(strategy: str) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(RankFailedError, match=r"0\.weight, 0\.bias of the model have no shape yet"):
        run_virtual(lambda comm: parallelize(model, comm, strategy), ranks=2)
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert run_virtual(lambda comm: parallelize(copy.deepcopy(model), comm, strategy).num_parameters, ranks=2) == [
        23,
        23,
    ]


@STRATEGIES
@pytest.mark.parametrize(
    ("total", "what"), [(torch.Tensor.detach, "a tensor that requires no gradient"), (torch.Tensor.item, "a float")]
)
def test_a_loss_without_a_graph_is_named(strategy: str, total: Any, what: str) -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(Net(), comm, strategy)
        engine.run_microbatches([torch.ones(2, 4)], lambda model, batch: (total(model(batch).sum()), 2))

    with pytest.raises(RankFailedError, match=f"the loss is {what}"):
        run_virtual(work, ranks=2)
