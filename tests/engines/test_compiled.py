"""torch.compile of blocks and whole models: one graph for ragged batches, and notes of what was done."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from paceline.comm.solo import SoloCommunicator
from paceline.engines import blocks as compiled
from paceline.engines.apply import parallelize
from paceline.engines.blocks import Compiled, compile_model, fix_sizes, take_notes
from paceline.errors import UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    return counter


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(gpt_config("gpt-nano", layers=2, vocab_size=32, context=8))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_ragged_batches_take_one_graph_and_evaluation_another(counter: CompileCounterWithBackend) -> None:
    plain, compiled = make_model(), make_model()
    compile_model(compiled, whole=True)
    for samples in (8, 5, 7):
        inputs = torch.randn(samples, 4)
        torch.testing.assert_close(compiled(inputs), plain(inputs))
    assert counter.frame_count == 1
    with torch.no_grad():
        for samples in (6, 3):
            compiled(torch.randn(samples, 4))
    assert counter.frame_count == 2
    training, evaluation = take_notes(compiled)
    assert (training.what, evaluation.what) == ("the whole model", "the whole model, without gradients")
    assert training.seconds > 0
    assert take_notes(compiled) == []


def test_batches_that_are_all_alike_get_a_graph_of_their_size(counter: CompileCounterWithBackend) -> None:
    model = make_model()
    compile_model(model, whole=True)
    fix_sizes(model, training=True, evaluation=False)
    for samples in (8, 8, 5):
        model(torch.randn(samples, 4))
    assert counter.frame_count == 2  # one for each size


@pytest.mark.exhaustive
def test_each_block_is_noted(counter: CompileCounterWithBackend) -> None:
    model = make_gpt()
    compile_model(model, whole=False)
    model(torch.randint(32, (4, 8))).sum().backward()
    assert [note.what for note in take_notes(model)] == ["block 1 of 2", "block 2 of 2"]
    assert counter.frame_count >= 1


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("no such kernel")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refuse))
    torch._dynamo.reset()
    model = nn.Linear(3, 2)
    expected = model(torch.ones(4, 3))
    compile_model(model, whole=True)
    for _ in range(2):
        torch.testing.assert_close(model(torch.ones(4, 3)), expected)
    (note,) = take_notes(model)
    assert "no such kernel" in note.problem
    assert note.what == "the whole model"


def test_an_error_of_the_model_itself_stays_an_error(counter: CompileCounterWithBackend) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise UsageError("of the model")

    with pytest.raises(Exception, match="of the model"):
        Compiled(fail, "it")(torch.ones(2))
    assert counter.frame_count == 0


@pytest.mark.parametrize(
    ("asked", "ranks", "options", "decided"),
    [
        (True, 1, {}, "whole"),
        (True, 2, {}, "blocks"),
        (True, 1, {"strategy": "fsdp"}, "blocks"),
        (True, 1, {"checkpoint_activations": "full"}, "blocks"),
        ("blocks", 1, {}, "blocks"),
        ("whole", 2, {}, "whole"),
        (False, 1, {}, "none"),
    ],
)
def test_auto_takes_one_graph_where_nothing_overlaps(
    asked: Any, ranks: int, options: dict[str, Any], decided: str
) -> None:
    assert Layout(compile=asked, **options).for_ranks(ranks).compile == decided


def test_an_unknown_way_to_compile_is_refused() -> None:
    with pytest.raises(UsageError, match=r"compile = 'all'.*\n.*none, blocks, whole, auto"):
        parallelize(make_gpt(), SoloCommunicator(torch.device("cpu")), compile="all")


@pytest.mark.usefixtures("counter")
def test_what_is_compiled_waits_until_the_compiler_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[float] = []
    loading = threading.Thread(target=lambda: (time.sleep(0.02), loaded.append(1.0)))
    monkeypatch.setattr(compiled, "_loading", [loading])
    loading.start()
    compiled.load_compiler()  # once is enough
    Compiled(make_model().forward, "a model")
    assert (loaded, compiled._loading) == ([1.0], [loading])
