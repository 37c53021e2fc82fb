"""What ranks offload must fit into the host that they share, all of it, before any of them starts."""

from __future__ import annotations

import pytest

from paceline.cluster.devices import load_cluster
from paceline.config import Config, layout_of, load_config
from paceline.errors import ConfigError
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import StateFacts, estimate_memory, framework_bytes
from paceline.run.decide import check_host
from paceline.search.expect import host_problems
from paceline.search.snapshots import choose_interval, describe_snapshots, snapshot_cost
from paceline.units import GIB

GPT = ("model={kind: gpt, size: gpt-1.1b}", "data={kind: synthetic_tokens, vocab_size: 50304, context: 2048}")


def _config(*changes: str, ranks: int = 4) -> Config:
    parallel = f"parallel={{strategy: fsdp, device: cuda, ranks: {ranks}}}"
    words = [*GPT, parallel, "memory.offload=[optimizer]", f"train.global_batch={ranks}"]
    return load_config(None, [*words, *changes])


def _on_host(config: Config, group: int) -> int:
    model = describe_model(config, "cuda")
    assert model is not None
    layout = layout_of(config, group)
    return estimate_memory(model, layout, StateFacts.of(config, "cuda")).host


def test_all_ranks_of_a_host_count() -> None:
    config = _config()
    each = _on_host(config, 4)
    assert each > 4 * GIB  # 16 bytes for a quarter of 1.1 billion parameters
    for node_ranks in (1, 4):
        assert host_problems(config, node_ranks=node_ranks, free_bytes=node_ranks * each) == []
        assert len(host_problems(config, node_ranks=node_ranks, free_bytes=node_ranks * each - 1)) == 1


def test_the_problem_tells_values_rule_and_fix() -> None:
    (problem,) = host_problems(_config("memory.offload=[optimizer, parameters]"), node_ranks=4, free_bytes=8 * GIB)
    assert problem.what.startswith("memory.offload = [optimizer, parameters]: 4 ranks keep ")
    assert problem.what.endswith("each), and 8.0 GiB are free")
    assert "share the memory of their host" in problem.rule
    assert "parallel.strategy = auto" in problem.fix


@pytest.mark.parametrize("changes", [["memory.offload=[]"], ["parallel.device=cpu"]])
def test_where_nothing_moves_nothing_is_needed(changes: list[str]) -> None:
    assert host_problems(_config(*changes), node_ranks=4, free_bytes=0) == []


def test_copies_on_every_host_take_more_than_one_over_all() -> None:
    over_all, on_each = _config(ranks=16), _config("parallel.strategy=hybrid", "parallel.node_ranks=4", ranks=16)
    assert _on_host(on_each, 4) > 3 * _on_host(over_all, 16)
    free = 4 * _on_host(over_all, 16)
    assert host_problems(over_all, node_ranks=4, free_bytes=free) == []
    assert len(host_problems(on_each, node_ranks=4, free_bytes=free)) == 1


def test_a_run_is_refused_that_no_host_could_hold() -> None:
    shape = "model={kind: gpt, layers: 200, heads: 400, width: 51200, context: 2048}"  # 100 TiB on this host
    with pytest.raises(ConfigError, match=r"1 rank keeps .* on this host"):
        check_host(_config(shape, ranks=1))
    check_host(_config(shape, "memory.offload=[]", ranks=1))


@pytest.mark.parametrize(
    ("ranks", "node_ranks", "copies", "states"), [(4, 4, 1, 3.0), (4, 2, 1, 5 / 2), (4, 1, 2, 7 / 4), (4, 2, 2, 5 / 2)]
)
def test_hosts_hold_two_snapshots_of_their_ranks_and_of_each_copy(
    ranks: int, node_ranks: int, copies: int, states: float
) -> None:
    """One host of several has a part of the state; there are no more copies than other hosts."""
    config = _config("checkpoint.memory.every_steps=10", f"checkpoint.memory.copies={copies}", ranks=ranks)
    found = snapshot_cost(config, ranks=ranks, node_ranks=node_ranks, device="cuda", bytes_per_s=1e12)
    model = describe_model(config, config.parallel.device)
    assert found is not None
    assert model is not None
    whole = 12 * model.parameters + model.buffer_bytes  # in float32, with two moments
    assert found.host_bytes == pytest.approx(states * whole)
    assert found.rank_bytes == pytest.approx(whole / ranks)
    assert found.blocked_s == pytest.approx(2e-12 * whole / ranks)
    beside = snapshot_cost(
        config, ranks=ranks, node_ranks=node_ranks, device="cuda", bytes_per_s=1e12, beside_bytes=1e9
    )
    assert beside is not None
    assert beside.blocked_s == pytest.approx(2e-12 * max(0.0, whole / ranks - 1e9))


def test_a_host_without_room_for_snapshots_is_refused_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        None,
        [*GPT, "parallel={device: cpu, ranks: 2}", "checkpoint.memory.copies=0", "checkpoint.memory.every_steps=10"],
    )

    class Usage:
        def __init__(self, _: object) -> None:
            self.free = 2**16  # as in a container without --shm-size

    monkeypatch.setattr("shutil.disk_usage", Usage)
    with pytest.raises(ConfigError, match=r"checkpoint.memory.every_steps = 10: .* 64.0 KiB of /dev/shm are free"):
        check_host(config)


def test_the_interval_between_snapshots_follows_failures_and_is_no_shorter_than_one_takes() -> None:
    config, cluster = _config(), load_cluster("h200")
    often, told = choose_interval(config, cluster, 4, 0.02, 600.0)
    seldom, _ = choose_interval(config, cluster, 4, 0.02, 100 * 600.0)
    assert often < seldom < 10 * often * 1.01
    assert told.startswith(f"with a failure every 10 min 0 s: checkpoint.memory.every_steps = {often}; ")
    cost = snapshot_cost(config, ranks=4, node_ranks=4, device="cuda")
    assert cost is not None
    assert choose_interval(config, cluster, 4, 0.2, 1.0)[0] == round(cost.rank_bytes / 1e9 / 0.2)


def test_a_prediction_tells_what_spares_take_and_counts_it() -> None:
    config, device = _config("memory.offload=[]"), load_cluster("h200")
    spare = config.with_values("recovery", spares=2)
    assert describe_snapshots(config, device, 4, 0.2) == []
    assert describe_snapshots(spare, device, 4, 0.2) == ["spares        2 a host: 1000.0 MiB of a GPU each, besides"]
    model = describe_model(config, "cuda")
    assert model is not None
    needs = [
        estimate_memory(model, layout_of(each, 4), StateFacts.of(each, "cuda")).device_bytes for each in (config, spare)
    ]
    assert needs[1] - needs[0] == framework_bytes("cuda")


def test_a_prediction_tells_what_snapshots_take() -> None:
    cluster = load_cluster("h200")
    assert describe_snapshots(_config(), cluster, 4, 0.2) == []
    (line,) = describe_snapshots(_config("checkpoint.memory.every_steps=10"), cluster, 4, 0.2)
    assert line.startswith("snapshots     every 10 steps: ")
    assert "of each host's memory" in line
