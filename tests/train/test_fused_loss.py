"""The loss that is fused with the output layer, in training: every data strategy, precisions, whole runs, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kept_records import Kept
from torch import Tensor, nn

from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.engines.apply import parallelize
from paceline.errors import ConfigError, UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Layout
from paceline.predict.replay.program import Run
from paceline.rehearse.dryrun.record import record_stages
from paceline.train.assemble import build_trainer
from paceline.train.evaluate import Evaluation
from paceline.train.loss import IGNORED, CrossEntropy, fuses_loss

VOCABULARY, CONTEXT = 23, 6
SHARES = ([3, 1], [2, 2], [1, 0], [4, 3])  # samples of each rank's microbatches: ragged, and one sat out


def make_gpt(*, tied: bool) -> GPT:
    torch.manual_seed(0)
    config = gpt_config(layers=1, heads=2, width=8, context=CONTEXT, vocab_size=VOCABULARY, tied=tied)
    return GPT(config).to(torch.float64)


def batch_of(ranks: int) -> tuple[Tensor, Tensor]:
    samples = sum(map(sum, SHARES[:ranks]))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (samples, CONTEXT), generator=draw)
    targets = torch.randint(VOCABULARY, (samples, CONTEXT), generator=draw)
    targets[::3, 2:] = IGNORED
    return tokens, targets


def microbatches_of(rank: int, ranks: int) -> list[Any]:
    sizes = [size for share in SHARES[:ranks] for size in share]
    tokens, targets = (part.split(sizes)[2 * rank : 2 * rank + 2] for part in batch_of(ranks))
    return [batch if len(batch[0]) else None for batch in zip(tokens, targets, strict=True)]


STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero1": (2, {}),
    "zero2": (2, {}),
    "fsdp": (4, {}),
    "hybrid": (4, {"shard_ranks": 2}),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_under_every_strategy_are_those_of_one_process_with_logits(strategy: str, tied: bool) -> None:
    ranks, options = STRATEGIES[strategy]
    tokens, targets = batch_of(ranks)
    model = make_gpt(tied=tied)
    logits = model(tokens).reshape(-1, VOCABULARY)
    loss = F.cross_entropy(logits, targets.reshape(-1))
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    def work(comm: Communicator) -> tuple[dict[str, Any], list[float], Any]:
        engine = parallelize(make_gpt(tied=tied), comm, strategy, **options)
        fused = CrossEntropy(None, is_fused=True)
        mine = microbatches_of(comm.rank, ranks)
        for _ in range(2):  # engines learn in the first pass
            for parameter in engine.parameters():
                parameter.grad = None
            scale = engine.loss_scale(float(sum((b[1] != IGNORED).sum() for b in mine if b is not None)))
            values = engine.run_microbatches(mine, fused, scale)
        with torch.no_grad():
            score = engine.apply_loss(fused.score, (tokens, targets))
        return engine.full_gradients(), [float(value.total.detach()) for value in values], score

    results = run_virtual(work, ranks)
    total = sum(sum(totals) for _, totals, _ in results)
    assert total / int((targets != IGNORED).sum()) == pytest.approx(float(loss.detach()), abs=1e-12)
    for gradients, _, score in results:
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)
        assert int(score.correct) == int((logits.argmax(-1) == targets.reshape(-1)).sum())
        assert int(score.count) == int((targets != IGNORED).sum())


def config_of(**sections: Any) -> Config:
    values = {
        "model": {"kind": "gpt", "layers": 1, "heads": 2, "width": 16, "context": 8},
        "data": {"kind": "synthetic_tokens", "samples": 40, "context": 8, "vocab_size": 32, "eval_fraction": 0.2},
        "train": {"steps": 2, "global_batch": 8, "accumulate": 2, "eval_every": 1},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return config_from_dict(values)


def losses_and_evaluation(config: Config) -> tuple[list[float], Evaluation]:
    sink = Kept()
    trainer = build_trainer(config, SoloCommunicator(torch.device("cpu")), sink=sink)
    trainer.run()
    evaluation = trainer.evaluate()
    assert evaluation is not None
    return [record.loss_sum for record in sink.steps], evaluation


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        ("fp32", "float64", 1e-10),
        ("fp32", "float32", 1e-5),
        ("bf16", "float32", 1e-2),
        ("bf16_master", "float32", 1e-2),
    ],
)
def test_a_run_has_the_losses_of_one_without(precision: str, dtype: str, tolerance: float) -> None:
    (fused, ours), (plain, theirs) = (
        losses_and_evaluation(config_of(train={"precision": precision, "dtype": dtype, "fused_loss": asked}))
        for asked in (True, "auto")
    )
    assert fused == pytest.approx(plain, rel=tolerance)
    assert ours.loss == pytest.approx(theirs.loss, rel=tolerance)
    if dtype == "float64":
        assert ours.accuracy == theirs.accuracy


@pytest.mark.parametrize(
    ("layout", "kind", "device", "expected"),
    [
        (Layout(), "auto", "cuda", True),
        (Layout(), "auto", "cpu", False),
        (Layout(fused_loss=False), "auto", "cuda", False),
        (Layout(fused_loss=True), "auto", "cpu", True),
        (Layout(), "mine:loss", "cuda", False),
        (Layout(tensor=2), "auto", "cuda", False),
        (Layout(pipeline=2), "auto", "cuda", False),
    ],
)
def test_when_it_is_used(layout: Layout, kind: str, device: str, expected: bool) -> None:
    model = SimpleNamespace(loss_vocabulary=lambda: 8192)
    assert fuses_loss(kind, layout, model, device) is expected  # type: ignore[arg-type]


def test_a_small_vocabulary_is_left_to_the_plain_loss() -> None:
    model = make_gpt(tied=True)
    assert not fuses_loss("auto", Layout(), model, "cuda")
    assert fuses_loss("auto", Layout(fused_loss=True), model, "cuda")


def test_asked_of_a_model_that_has_no_loss_it_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train.fused_loss = true, but Linear does not compute a loss"):
        fuses_loss("auto", Layout(fused_loss=True), nn.Linear(2, 2), "cpu")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"tensor": 2, "ranks": 2}}, "train.fused_loss = true with parallel.tensor = 2"),
        ({"parallel": {"pipeline": 2, "ranks": 2}}, "train.fused_loss = true with parallel.pipeline = 2"),
        ({"train": {"loss": "mine:loss"}}, "train.fused_loss = true with train.loss = mine:loss"),
    ],
)
def test_where_it_cannot_be_it_is_refused_before_anything_starts(sections: dict[str, Any], message: str) -> None:
    train = {"fused_loss": True, "accumulate": None, **sections.pop("train", {})}
    with pytest.raises(ConfigError, match=message):
        config_of(train=train, **sections)


def test_a_classifier_has_nothing_to_fuse() -> None:
    values = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"fused_loss": True}}
    with pytest.raises(ConfigError, match=r"train\.fused_loss = true with model\.kind = mlp"):
        config_from_dict(values)


def test_no_field_of_a_layout_takes_anything_else() -> None:
    with pytest.raises(UsageError, match="fused_loss = 'yes'"):
        parallelize(nn.Linear(2, 2), SoloCommunicator(torch.device("cpu")), fused_loss="yes")


# Models as Hugging Face builds them, from a factory.


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 8)
        self.layer = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, use_cache: bool = True, return_dict: bool = False) -> Any:
        del use_cache, return_dict
        return SimpleNamespace(last_hidden_state=torch.tanh(self.layer(self.embed_tokens(input_ids))))


class Causal(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=32)
        self.base_model = Base()
        self.lm_head = nn.Linear(8, 32, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.scale * self.lm_head(self.base_model(input_ids).last_hidden_state))


def test_a_causal_model_trains_with_its_logits_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.registry.import_from_path", lambda *_: Causal)
    model = {"kind": "factory", "factory": "mine:Causal"}

    def losses(asked: Any) -> list[float]:
        values = config_of(train={"dtype": "float64", "fused_loss": asked}).model_dump(exclude_unset=True)
        return losses_and_evaluation(config_from_dict({**values, "model": model}))[0]

    assert losses(True) == pytest.approx(losses(False), rel=1e-10)


def test_a_causal_model_whose_logits_are_scaled_is_told_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Causal, "scale", 0.5)
    with pytest.raises(UsageError, match="the logits of Causal are not the products"):
        fuses_loss("auto", Layout(fused_loss=True), Causal(), "cpu")
    with pytest.warns(UserWarning, match="the loss is not fused with the output layer: the logits of Causal"):
        assert not fuses_loss("auto", Layout(), Causal(), "cuda")


# Without values.


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.exhaustive), "bf16_master"])
def test_a_dry_run_sees_the_products_of_chunks_and_no_logits(precision: str) -> None:
    def peak_and_products(asked: Any) -> tuple[float, int, set[str], float]:
        config = config_of(
            parallel={"device": "cuda"},
            data={"vocab_size": 65536, "context": 64},
            model={"context": 64},
            train={"precision": precision, "global_batch": 256, "accumulate": 1, "fused_loss": asked},
        )
        (program,) = record_stages(config, ranks=1)
        kernels = [event.operation for event in program.events if isinstance(event, Run)]
        heads = [kernel for kernel in kernels if kernel.family == "matmul" and 65536 in kernel.sizes]
        return sum(program.peak_memory().values()), len(heads), {kernel.dtype for kernel in heads}, program.model_flops

    fused, plain = peak_and_products("auto"), peak_and_products(False)
    assert plain[1] == 3
    assert fused[1] == 6  # 16,384 rows in two chunks of 1 GiB
    assert fused[2] == plain[2] == {"bf16"}
    assert fused[0] < 0.7 * plain[0]
    assert fused[3] == pytest.approx(plain[3], rel=1e-6)
