"""Muon: the same numbers on any number of ranks as in one process, and those of torch's own where that is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo_pool import GlooPool
from torch import nn

import paceline
from paceline import Muon
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import OptimConfig, config_from_dict
from paceline.config.schema import MuonConfig
from paceline.engines.apply import parallelize
from paceline.errors import ConfigError, UsageError
from paceline.models.gpt import GPT, gpt_config
from paceline.train.muon import rounds as rounds_module
from paceline.train.muon.muon import hidden_matrices
from paceline.train.muon.rounds import Matrix, cut_into_rounds, make_rounds, orthogonal_flops, orthogonalise, share_out
from paceline.train.optim import build_optimizer

STEPS = 3
TOKENS = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """Matrices of odd shapes, one of them in column order, and a branch that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(5, 7)
        self.wide = nn.Linear(7, 23, bias=False)
        self.tall = nn.Linear(23, 6)
        self.turned = nn.Linear(6, 11)
        self.turned.weight = nn.Parameter(self.turned.weight.detach().t().contiguous().t())
        self.unused = nn.Linear(11, 11)
        self.outputs = nn.Linear(11, 3)

    def forward(self, x: torch.Tensor, *, is_whole: bool = True) -> torch.Tensor:
        x = self.turned(self.tall(self.wide(self.inputs(x).tanh()).tanh()).tanh()).tanh()
        return self.outputs(self.unused(x) + x if is_whole else x)


def make_layers() -> nn.Module:
    torch.manual_seed(0)
    return Layers().double()


def make_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(replace(gpt_config("gpt-nano"), layers=2)).double()


def loss_of_layers(model: Any, step: int, rows: slice) -> torch.Tensor:
    inputs = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return model(inputs[rows], is_whole=step != 1).square().sum()


def train_layers(comm: Communicator | None, **layout: Any) -> dict[str, torch.Tensor]:
    model = make_layers()
    engine = None if comm is None else parallelize(model, comm, **layout)
    trained: Any = model if engine is None else engine
    optimizer = Muon(trained.named_parameters(), engine, lr=0.05, weight_decay=0.1)
    share, size = (0, 1) if engine is None else (engine.comm.rank, engine.comm.size)
    for step in range(STEPS):
        rows = slice(share * 8 // size, (share + 1) * 8 // size)
        (loss_of_layers(trained, step, rows) * size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()) if engine is None else engine.full_state_dict()


@pytest.fixture(scope="module")
def one_process() -> dict[str, torch.Tensor]:
    return train_layers(None)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"strategy": "ddp"}),
        (3, {"strategy": "zero1"}),
        (2, {"strategy": "zero2"}),
        (3, {"strategy": "fsdp"}),
        (4, {"strategy": "hybrid", "shard_ranks": 2}),
        (1, {"strategy": "fsdp"}),
    ],
    ids=lambda value: value["strategy"] if isinstance(value, dict) else str(value),
)
def test_ranks_compute_what_one_process_does(
    one_process: dict[str, torch.Tensor], ranks: int, layout: dict[str, Any]
) -> None:
    for found in run_virtual(lambda comm: train_layers(comm, **layout), ranks=ranks):
        assert_close(found, one_process)


def test_gloo_ranks_compute_what_one_process_does(gloo_pool: GlooPool, one_process: dict[str, torch.Tensor]) -> None:
    for found in gloo_pool.run(_train_on_gloo):
        assert_close(found, one_process)


def _train_on_gloo(comm: Communicator) -> dict[str, torch.Tensor]:
    return train_layers(comm, strategy="zero2")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.exhaustive)])
def test_stages_of_a_pipeline_update_their_own_matrices(strategy: str) -> None:
    """Nobody shares a matrix with another stage, and names tell the ends of the whole model."""
    whole = make_gpt()
    optimizer = Muon(whole.named_parameters(), lr=0.01)
    for _ in range(2):
        (_token_loss(whole, TOKENS)[0] / 32).backward()
        optimizer.step()
        optimizer.zero_grad()

    def work(comm: Communicator) -> dict[str, torch.Tensor]:
        engine = parallelize(make_gpt(), comm, strategy, pipeline=2)
        optimizer = Muon(engine.named_parameters(), engine, lr=0.01)
        for _ in range(2):
            mine: list[Any] = list(TOKENS.chunk(4)[engine.comm.rank :: engine.comm.size])
            engine.run_microbatches(mine, _token_loss, engine.comm.size / 32)
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    for found in run_virtual(work, ranks=4):
        assert_close(found, dict(whole.state_dict()))


def _token_loss(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), float(tokens[:, 1:].numel())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_an_update_is_that_of_torch(rule: Any, nesterov: bool) -> None:
    """In bf16, which torch's own computes in everywhere, to the rounding of products in another order."""
    ours, theirs = make_layers().float(), make_layers().float()
    settings = MuonConfig(lr_shape=rule, nesterov=nesterov, momentum=0.9)
    optimizer = Muon(ours.named_parameters(), lr=0.02, weight_decay=0.1, settings=settings)
    optimizer.dtype = torch.bfloat16
    matrices = [each.weight for each in (theirs.wide, theirs.tall, theirs.turned, theirs.unused)]  # type: ignore[union-attr]
    settings_of_torch = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": rule}
    reference = torch.optim.Muon(matrices, **settings_of_torch)  # type: ignore[attr-defined]
    adamw = torch.optim.AdamW(
        [
            {"params": [theirs.inputs.weight, theirs.outputs.weight]},  # type: ignore[union-attr]
            {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.02,
        weight_decay=0.1,
    )
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for each in (optimizer, reference, adamw):
            each.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        step = 0.02 * 0.2 * 23**0.5 if name.endswith("weight") else 0.02
        torch.testing.assert_close(mine, other, rtol=0, atol=0.03 * step, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (2, 30)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(stack, full_matrices=False)
    x = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    torch.testing.assert_close(orthogonalise(stack, 5), u @ torch.diag_embed(x) @ v, rtol=0, atol=1e-10)
    assert bool(((x > 0.3) & (x < 1.3)).all())


def test_zeros_stay_zeros() -> None:
    assert not orthogonalise(torch.zeros(1, 3, 8), 5).any()


def test_the_work_is_balanced_by_cost_and_cut_into_rounds() -> None:
    shapes = [(768, 768)] * 48 + [(3072, 768)] * 24
    costs = [float(orthogonal_flops(shape, 5, torch.bfloat16)) for shape in shapes]
    owners = share_out(costs, 8)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(8)]
    assert max(loads) < 1.02 * min(loads)
    parts = cut_into_rounds(range(len(costs)), costs, 5)
    assert [index for part in parts for index in part] == list(range(len(costs)))
    assert max(sum(costs[i] for i in part) for part in parts) < 1.1 * sum(costs) / 5
    assert sorted(share_out([1.0], 3)) == [0]


def test_each_matrix_is_owned_once_and_equal_shapes_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "_ROUND_BYTES", {"cpu": 4096})
    matrices = {number: Matrix(shape=(16, 16) if number % 2 else (8, 32)) for number in range(12)}

    def owned(comm: Communicator) -> list[Sequence[int]]:
        return [each.owned for each in make_rounds(matrices, comm, torch.float32, 5)]

    by_rank = run_virtual(owned, ranks=2)
    assert sorted(number for rounds in by_rank for part in rounds for number in part) == list(range(12))
    assert len(by_rank[0]) == len(by_rank[1]) > 1
    for rounds in by_rank:
        shapes = [matrices[number].shape for part in rounds for number in part]
        assert sum(first != second for first, second in pairwise(shapes)) <= 1


def test_rounds_that_overlap_compute_the_same(
    one_process: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds_module, "_ROUND_BYTES", {"cpu": 512})
    for strategy in ("ddp", "fsdp"):
        for found in run_virtual(lambda comm, s=strategy: train_layers(comm, strategy=s), ranks=2):
            assert_close(found, one_process)


@pytest.mark.parametrize(
    ("names", "hidden"),
    [
        (["wte.weight", "h.0.attn.weight", "h.0.mlp.weight", "lm_head.weight"], ["h.0.attn.weight", "h.0.mlp.weight"]),
        (["model.embed_tokens.weight", "model.layers.0.q_proj.weight"], ["model.layers.0.q_proj.weight"]),
        (["0.weight", "2.weight", "4.weight"], ["2.weight"]),
        (["bert.embeddings.word.weight", "encoder.output.weight", "classifier.weight"], ["encoder.output.weight"]),
    ],
)
def test_ends_of_a_model_are_known_by_name_or_by_order(names: list[str], hidden: list[str]) -> None:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (4, 4))
    assert hidden_matrices({**shapes, "norm.weight": (4,), "conv.weight": (4, 4, 3, 3)}) == set(hidden)


def test_patterns_say_what_adamw_updates() -> None:
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (4, 4), "a.weight": (4, 4), "b.weight": (4, 4)}
    assert hidden_matrices(shapes, ("a.*",)) == {"embedding.weight", "b.weight"}


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to do"):
        Muon(nn.Linear(3, 3).named_parameters())


def test_slices_without_an_engine_are_refused() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=r"build it as Muon\(engine"):
            Muon(parallelize(make_layers(), comm, "fsdp").named_parameters())

    run_virtual(work, ranks=2)


def test_tensor_ranks_are_refused() -> None:
    def work(comm: Communicator) -> None:
        engine = parallelize(make_gpt(), comm, "ddp", tensor=2)
        with pytest.raises(UsageError, match="tensor"):
            Muon(engine.named_parameters(), engine)

    run_virtual(work, ranks=2)
    with pytest.raises(ConfigError, match=r"optim\.kind = muon with parallel\.tensor = 2"):
        config_from_dict({"model": {"kind": "gpt"}, "optim": {"kind": "muon"}, "parallel": {"tensor": 2, "ranks": 2}})


def test_a_config_builds_it_with_its_settings() -> None:
    optim = OptimConfig(
        kind="muon", lr=0.02, muon=MuonConfig(momentum=0.8, nesterov=False, lr_shape="original", adamw_lr_factor=0.1)
    )
    hidden, matrices, vectors = build_optimizer(optim, make_layers().named_parameters()).param_groups
    assert len(hidden["params"]) == 4
    assert (hidden["lr"], hidden["momentum"], hidden["nesterov"], hidden["lr_shape"]) == (0.02, 0.8, False, "original")
    assert matrices["lr"] == vectors["lr"] == pytest.approx(0.002)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.01, 0.0)


@pytest.mark.parametrize("key", ["momentum", "nesterov"])
def test_keys_of_sgd_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"optim.{key}"):
        config_from_dict({"optim": {"kind": "muon", key: 0.5 if key == "momentum" else True}})


@pytest.mark.parametrize(("before", "after"), [(("zero2", 3), ("fsdp", 2)), (("ddp", 2), ("zero1", 3))])
def test_a_checkpoint_is_read_by_other_strategies_and_ranks(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int], one_process: dict[str, torch.Tensor]
) -> None:
    """Two steps on some ranks, the third on others: what one process computes in three."""

    def steps(comm: Communicator, strategy: str, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        engine = parallelize(make_layers(), comm, strategy)
        optimizer = Muon(engine.named_parameters(), engine, lr=0.05, weight_decay=0.1)
        if numbers[0]:
            paceline.load(tmp_path, engine, optimizer)
        share, size = comm.rank, comm.size
        for step in numbers:
            rows = slice(share * 8 // size, (share + 1) * 8 // size)
            (loss_of_layers(engine, step, rows) * size).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not numbers[0]:
            paceline.save(tmp_path, engine, optimizer, step=2)
        return engine.full_state_dict()

    run_virtual(lambda comm: steps(comm, before[0], [0, 1]), ranks=before[1])
    for found in run_virtual(lambda comm: steps(comm, after[0], [2]), ranks=after[1]):
        assert_close(found, one_process)


def test_state_is_one_momentum_a_matrix() -> None:
    def work(comm: Communicator) -> tuple[int, int]:
        engine = parallelize(make_layers(), comm, "zero1")
        optimizer = Muon(engine.named_parameters(), engine)
        loss_of_layers(engine, 0, slice(None)).backward()
        optimizer.step()
        hidden = {id(p) for p in optimizer.param_groups[0]["params"]}
        held = {key: value for p, state in optimizer.state.items() if id(p) in hidden for key, value in state.items()}
        assert held.keys() == {"momentum_buffer"}
        return sum(p.numel() for p in optimizer.param_groups[0]["params"]), sum(
            state["momentum_buffer"].numel() for p, state in optimizer.state.items() if id(p) in hidden
        )

    found = run_virtual(work, ranks=2)
    assert sum(pieces for pieces, _ in found) == sum(momenta for _, momenta in found) == 7 * 23 + 23 * 6 + 66 + 121
