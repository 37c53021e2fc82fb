"""What ranks that share each sequence take and hold: by formula, beside a dry run of the real engine; and by method."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from paceline.cluster.devices import Cluster, load_cluster
from paceline.config import Config, config_from_dict, layout_of
from paceline.predict.formulas.engine_costs import price
from paceline.predict.memory.memory import EngineMemory
from paceline.rehearse.prediction import predict_decided
from paceline.search.request import request_for, task_of, with_context_method, workload_as_written
from paceline.search.result import plan_for

NODE = load_cluster("1x dgx-h200")


def config_of(tokens: int, ranks: int, method: str, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"kind": "gpt", "size": "gpt-1.1b", "layers": 2, "context": tokens, "compile": True},
        "data": {"kind": "synthetic_tokens", "context": tokens, "vocab_size": 1024},
        "train": {"global_batch": 1, "precision": "bf16_master"},
        "parallel": {"device": "cuda", "ranks": ranks, "context": ranks, "context_method": method, "strategy": "fsdp"},
        "memory": {"checkpoint_activations": "full"},
    }
    return config_from_dict(values | sections)


def formula_of(config: Config, cluster: Cluster, ranks: int) -> float:
    layout = layout_of(config, ranks, min(ranks, cluster.node.devices))
    return price(task_of(config, ranks).workload(layout), cluster).seconds


@pytest.mark.some(1)
@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_formulas_agree_with_a_dry_run_of_the_engine(method: str) -> None:
    config = config_of(131_072, 8, method)
    decided, found = predict_decided(config, NODE, 8)
    need = EngineMemory.of(decided, "cuda")
    assert need is not None
    estimate = need.estimate(layout_of(decided, 8, 8))
    assert estimate is not None
    assert formula_of(config, NODE, 8) == pytest.approx(found.seconds, rel=0.08)
    assert 0.98 < estimate.device_bytes / found.total_memory < 1.15


def test_a_ring_in_zigzag_order_is_the_eighth_of_one_rank() -> None:
    """At most 15 % is lost on 8 GPUs of a node, and on 64 of eight."""
    whole = formula_of(config_of(524_288, 1, "ring", parallel={"device": "cuda", "ranks": 1}), NODE, 1)
    assert 0.9 < whole / 8 / formula_of(config_of(524_288, 8, "ring"), NODE, 8) < 1
    far = load_cluster("8x dgx-h200")
    assert 0.85 < whole / 64 / formula_of(config_of(524_288, 64, "auto"), far, 64) < 1


def test_every_method_has_its_price() -> None:
    seconds = {each: formula_of(config_of(32_768, 8, each), NODE, 8) for each in ("ring", "ulysses", "both", "gather")}
    assert seconds["gather"] > 1.3 * max(seconds["ring"], seconds["ulysses"])  # it computes what the mask hides
    best = with_context_method(config_of(32_768, 8, "auto"), NODE, 8).parallel.context_method
    assert seconds[best] == min(seconds.values())
    held = config_of(32_768, 8, "gather")
    assert with_context_method(held, NODE, 8) == held


def test_short_documents_take_the_method_that_waits_least_for_what_travels() -> None:
    """Whole documents do not travel in a ring; keys and values of one long text do, and heads then take less."""
    model = {"kind": "gpt", "size": "gpt-1.1b", "context": 16_384, "vocab_size": 32_000, "compile": True}
    data = {"kind": "tokens", "path": "rows.npy", "context": 16_384}
    found = {}
    for documents in ({"documents": "joined"}, {"documents": "apart", "end_token": 0}):
        config = config_of(16_384, 8, "auto", model=model, data=data | documents)
        found[documents["documents"]] = with_context_method(config, NODE, 8).parallel.context_method
    assert found == {"joined": "ulysses", "apart": "ring"}


def test_a_plan_shares_sequences_where_the_batch_is_too_small_for_the_ranks() -> None:
    config = config_of(262_144, 1, "auto", parallel={"device": "cuda"}, memory={})
    found = plan_for(request_for(config, NODE))
    winner = found.winner
    assert winner is not None
    assert winner.layout.context_ranks * winner.layout.tensor * winner.layout.pipeline == 8
    written = config_from_dict(yaml.safe_load(found.to_yaml()))
    workload = workload_as_written(written, task_of(written, 8), NODE)
    assert workload is not None
    assert workload.layout.context_ranks == winner.layout.context_ranks
