"""Whether a run has room before it starts: what it needs, what there is, and what makes it fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.detect import Machine
from paceline.config import Config, load_config
from paceline.predict.memory.memory import rank_estimates
from paceline.search.expect import MemoryNeed, MemoryVerdict, expected_memory, needed, ways_out
from paceline.units import GIB

HOST = Machine(processor="a processor", cores=2, memory_bytes=8.0 * GIB)
GPT = ("model={kind: gpt, size: gpt-124m}", "data={kind: synthetic_tokens, vocab_size: 50304, context: 1024}")


def _config(*changes: str, ranks: int = 2) -> Config:
    words = [f"parallel={{device: cpu, ranks: {ranks}}}", "train.global_batch=16", *changes]
    return load_config(None, [*GPT, *words])


def _need(config: Config) -> MemoryNeed:
    found = needed(config)
    assert found is not None
    return found


def _verdict(need: MemoryNeed, has: float, free: float | None = None) -> MemoryVerdict:
    return MemoryVerdict(need=need, where="this host", has_bytes=has, free_bytes=has if free is None else free)


def test_cpu_ranks_share_a_host_and_torch_is_loaded_once() -> None:
    config = _config()
    (each,) = rank_estimates(config)
    assert expected_memory(config) == each.device_bytes
    assert _need(config).total == 2 * each.device_bytes - each.framework
    assert _need(config).who == "2 ranks need"


def test_of_gpus_the_rank_that_holds_most_counts() -> None:
    config = _config("parallel.device=cuda", "parallel.pipeline=2")
    stages = rank_estimates(config)
    assert len(stages) == 2
    assert _need(config).total == max(each.device_bytes for each in stages)


def test_the_stages_of_a_pipeline_are_added_up() -> None:
    config = _config("parallel.pipeline=2", ranks=4)
    stages = rank_estimates(config)
    framework = stages[0].framework
    assert _need(config).total == framework + 2 * sum(each.device_bytes - framework for each in stages)


def test_virtual_ranks_need_the_states_of_all_and_the_activations_of_one() -> None:
    config = _config(ranks=4)
    (each,), found = rank_estimates(config), needed(config, in_turns=True)
    assert found is not None
    assert (found.parts["optimizer"], found.parts["activations"]) == (4 * each.optimizer, each.activations)
    assert found.parts["framework"] == each.framework
    assert found.who == "4 virtual ranks need"


@pytest.mark.parametrize(
    "changes",
    [
        ["train={microbatch: auto, global_batch: 16}"],
        ["comm.backend=virtual"],
        ["model={kind: factory, factory: a.module:function}", "data.context=64"],
        ["parallel.strategy=auto"],
    ],
)
def test_what_is_not_known_beforehand_is_not_judged(changes: list[str]) -> None:
    assert needed(_config(*changes)) is None


def test_more_than_there_is_is_refused_and_what_is_near_is_told() -> None:
    need = MemoryNeed(who="2 ranks need", parts={"activations": 6 * GIB, "optimizer": 3 * GIB, "buffers": 0})
    kinds = {has: _verdict(need, has * GIB).kind for has in (8.9, 9.0, 9.9, 10.1)}
    assert kinds == {8.9: "too large", 9.0: "near", 9.9: "near", 10.1: "fits"}
    assert _verdict(need, 64 * GIB, free=8 * GIB).kind == "near"  # others hold it, and may give it back
    told = str(_verdict(need, 64 * GIB, free=8 * GIB))
    assert told == (
        "2 ranks need 9.0 GiB of memory by estimate (activations 6.0 GiB, optimizer 3.0 GiB), and this host has "
        "64.0 GiB, of which 8.0 GiB are free"
    )


def test_changes_that_fit_come_fastest_first_and_do_fit() -> None:
    config = _config("train.global_batch=64")
    verdict = _verdict(_need(config), 16 * GIB)
    assert verdict.kind == "too large"
    lines = ways_out(config, verdict, HOST)
    assert len(lines) > 1
    assert all(line.startswith("fits with ") and " a step, " in line for line in lines)
    words = [line.removeprefix("fits with ").partition(":")[0].split() for line in lines]
    for each in words:
        assert _need(_config("train.global_batch=64", *each)).total <= 16 * GIB
    assert len(words[0]) > len(words[-1])  # more is changed only where that is faster


def test_a_config_that_formulas_do_not_price_gets_the_first_plan() -> None:
    config = _config("train.global_batch=64", "parallel.pipeline=2", "parallel.schedule=gpipe")
    verdict = _verdict(_need(config), 16 * GIB)
    (line,) = ways_out(config, verdict, HOST)
    assert line.startswith("fits with ")
    assert "parallel.tensor" not in line  # it is 1 already
    assert "parallel.pipeline=1" in line


def test_where_nothing_fits_the_nearest_is_told() -> None:
    config = _config("model.size=gpt-7b", "model.vocab_size=50304")
    first, *_, last = ways_out(config, _verdict(_need(config), 8 * GIB), HOST)
    assert first.startswith("nothing fits here: of ")
    assert "needs least, " in first
    assert "paceline plan CONFIG" in last


def test_a_machine_that_is_not_known_is_told() -> None:
    config = _config("parallel.device=cuda", "train.global_batch=512")
    machine = replace(HOST, gpus=("some new thing",) * 2)
    first, last = ways_out(config, _verdict(_need(config), 8 * GIB), machine)
    assert first.startswith("which changes fit is not known: ")
    assert "parallel.strategy=auto" in last
