"""What routers do, from real small runs: sums over ranks, and each verdict on a router that was made to go wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mixture_runs import EXPERTS, mixture_config, prefer, train_mixture

from paceline.health.experts import WINDOWS, judge_experts
from paceline.records.records import EventRecord, ExpertsRecord, Record, parse_line, to_line
from paceline.records.report import summarize
from paceline.records.sinks import scalars
from paceline.records.summary import loads_by_layer
from paceline.records.thin import add_loads, thin_lines

STILL = {"lr": 1e-12}  # a router that was made to choose so stays as it is
LAYERS = {f"layers.{layer}.mlp" for layer in range(2)}


def loads_of(ranks: list[list[Record]]) -> list[ExpertsRecord]:
    return [each for own in ranks for each in own if isinstance(each, ExpertsRecord)]


def told(ranks: list[list[Record]]) -> list[dict[str, Any]]:
    return [e.detail for own in ranks for e in own if isinstance(e, EventRecord) and e.name == "experts"]


def test_all_choices_of_all_steps_are_counted(tmp_path: Path) -> None:
    config = mixture_config(train={"steps": 9}, monitor={"log_every": 4})
    found = loads_of(train_mixture(tmp_path, config))
    assert [(each.step, each.steps) for each in found if each.layer == "layers.0.mlp"] == [(4, 4), (8, 4), (9, 1)]
    assert {each.layer for each in found} == LAYERS
    for each in found:
        assert each.tokens == each.steps * 8 * 64
        assert sum(each.choices) == 2 * each.tokens
        assert 0.5 < each.entropy <= 1
        assert 0.9 < each.auxiliary < 2
        assert (each.dropped, each.ranks) == (0, 1)
        assert parse_line(to_line(each)) == each


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        (2, {"parallel": {"strategy": "fsdp"}, "train": {"accumulate": 2}}),
        (2, {"parallel": {"pipeline": 2}, "train": {"accumulate": 2}}),
        (2, {"memory": {"checkpoint_activations": "full"}}),
    ],
    ids=["ddp", "fsdp", "pipeline", "computed again"],
)
def test_ranks_add_up_to_what_one_counts(ranks: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """Also where each rank has some of the layers, in several passes, and where forward runs twice."""
    one = mixture_config(train={"steps": 4, "dtype": "float64"})
    values = {**changes, "train": {"steps": 4, "dtype": "float64", **changes.get("train", {})}}
    values["parallel"] = {"ranks": ranks, **changes.get("parallel", {})}
    alone = loads_of(train_mixture(tmp_path / "one", one))
    together = loads_of(train_mixture(tmp_path / "all", mixture_config(ranks, **values), ranks=ranks))
    assert len(together) == len(alone) == 2 * 2
    for each in together:
        (same,) = (own for own in alone if (own.step, own.layer) == (each.step, each.layer))
        assert (each.choices, each.tokens, each.steps) == (same.choices, same.tokens, same.steps)
        assert each.entropy == pytest.approx(same.entropy, rel=1e-5)
        assert each.auxiliary == pytest.approx(same.auxiliary, rel=1e-5)


def test_a_capacity_drops_what_is_beyond_it(tmp_path: Path) -> None:
    config = mixture_config(model={"router": {"capacity": 1.0}}, train={"steps": 2}, optim=STILL)
    found = loads_of(train_mixture(tmp_path, config, force=prefer(0, 1)))
    crowded = next(each for each in found if each.layer == "layers.0.mlp")
    # Two experts take all choices, a row's share of an expert is 64 x 2 / 8 = 16 of the 64 that come to each.
    assert crowded.choices[:2] == (1024, 1024)
    assert crowded.dropped == 2 * 2 * 8 * (64 - 16)
    values = dict(scalars(crowded))
    assert values["experts/layers.0.mlp/dropped"] == 0.75
    assert (values["experts/layers.0.mlp/most"], values["experts/layers.0.mlp/least"]) == (4.0, 0.0)


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("balance", ["aux", "bias"])
def test_a_balanced_run_has_no_verdict(balance: str, seed: int, tmp_path: Path) -> None:
    config = mixture_config(
        model={"router": {"balance": balance}}, train={"steps": 24, "seed": seed}, monitor={"log_every": 1}
    )
    ranks = train_mixture(tmp_path, config)
    assert not told(ranks)
    for own in loads_by_layer(loads_of(ranks)).values():
        assert len(own) == 24
        for end in range(25):
            shared = [replace(each, ranks=4) for each in own[:end]]
            assert not judge_experts([own[:end], shared])
    assert not summarize(tmp_path).experts_wrong


@pytest.mark.parametrize(
    ("chosen", "ranks", "kinds"),
    [
        ((0, 1, 2, 3, 4, 6, 7), 1, {"dead"}),
        ((2, 5), 1, {"collapsed"}),
        ((0, 1, 2, 3), 2, {"dead", "straggler"}),
        ((0, 2, 4, 6), 2, {"dead"}),
    ],
)
def test_a_router_that_goes_wrong_is_told_of(
    chosen: tuple[int, ...], ranks: int, kinds: set[str], tmp_path: Path
) -> None:
    """``ranks``: among which the experts would be dealt out."""
    recorded = train_mixture(tmp_path, mixture_config(optim=STILL), force=prefer(*chosen))
    own = [replace(each, ranks=ranks) for each in loads_of(recorded)]
    layers = loads_by_layer(own)
    found = judge_experts(list(layers.values()))
    assert {each.kind for each in found} == kinds
    assert {each.layer for each in found} == {"layers.0.mlp"}
    by_kind = {each.kind: each for each in found}
    if "dead" in kinds:
        left = [expert for expert in range(EXPERTS) if expert not in chosen]
        named = f"expert{'s' if len(left) > 1 else ''} {', '.join(map(str, left))} of layers.0.mlp"
        assert by_kind["dead"].sentence.startswith(named)
        assert by_kind["dead"].evidence == "0 of 10,240 choices in steps 11 to 20, where 1,280 are the fair share"
    if "collapsed" in kinds:
        assert by_kind["collapsed"].sentence == "the router of layers.0.mlp sends nearly all tokens to experts 2, 5"
        assert by_kind["collapsed"].evidence == "100 % of the choices in steps 11 to 20, where 25 % are the fair share"
    if "straggler" in kinds:
        assert by_kind["straggler"].sentence.startswith("rank 0 of the 2 that share the experts of layers.0.mlp")
        assert by_kind["straggler"].evidence.startswith("its experts took at least 2.00 times the fair share")
    for end in range(WINDOWS):  # the first steps of a run are left alone
        assert not judge_experts([records[:end] for records in layers.values()])
    if ranks == 1:  # told while the run goes on, once, and in its report
        events = told(recorded)
        assert [each["kind"] for each in events] == list(kinds)
        assert events[0]["advice"]
        summary = summarize(tmp_path)
        assert summary.experts_wrong == tuple(found)
        assert summary.to_json()["experts_wrong"][0]["sentence"] == found[0].sentence


def test_a_rank_with_most_of_the_rows_is_told_of_by_its_load(tmp_path: Path) -> None:
    """A run whose two ranks hold different experts: those of rank 0 take nearly all tokens."""
    config = mixture_config(2, parallel={"expert": 2}, optim=STILL)
    recorded = train_mixture(tmp_path, config, ranks=2, force=prefer(0, 1, 2, 3))
    assert {each.ranks for each in loads_of(recorded)} == {2}
    (found,) = (each for each in told(recorded) if each["kind"] == "straggler")
    assert found["sentence"] == "rank 0 of the 2 that share the experts of layers.0.mlp has most of the work"
    assert found["evidence"].startswith(
        "its experts took at least 2.00 times the fair share of a rank in steps 3 to 12"
    )
    assert "balance the experts" in found["advice"]
    assert "straggler" in {each.kind for each in summarize(tmp_path).experts_wrong}


def test_scores_without_a_choice_are_told_of(tmp_path: Path) -> None:
    """Each token is sure of its experts, and tokens differ: loads are even, and the router learns nothing more."""

    def sharpen(model: Any) -> None:
        model.layers[0].mlp.router.weight.mul_(1e5)

    ranks = train_mixture(tmp_path, mixture_config(optim=STILL), force=sharpen)
    (found,) = told(ranks)
    assert (found["kind"], found["layer"]) == ("collapsed", "layers.0.mlp")
    assert "leave nothing to choose" in found["sentence"]
    crowded = loads_of(ranks)[-2]
    assert crowded.layer == "layers.0.mlp"
    assert max(crowded.loads) < 4


def test_loads_are_added_up_where_steps_are(tmp_path: Path) -> None:
    config = mixture_config(train={"steps": 160}, monitor={"log_every": 1}, model={"layers": 1})
    (own,) = train_mixture(tmp_path, config)
    data = (tmp_path / "records" / "rank-0.jsonl").read_bytes()
    thinned = thin_lines(data, 64)
    assert thinned is not None
    kept = [each for line in thinned.splitlines() if isinstance(each := parse_line(line), ExpertsRecord)]
    every = [each for each in own if isinstance(each, ExpertsRecord)]
    assert len(kept) < len(every) / 2
    assert sum(each.steps for each in kept) == sum(each.steps for each in every) == 160
    assert add_loads(kept).choices == add_loads(every).choices
    assert add_loads(kept).entropy == pytest.approx(add_loads(every).entropy, rel=1e-12)
    assert math.isclose(add_loads(kept).auxiliary, sum(e.auxiliary * e.tokens for e in every) / (160 * 512))
