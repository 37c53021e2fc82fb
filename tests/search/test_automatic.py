"""What predicted time decides: which candidate is taken, and where trials of a microbatch begin."""

from __future__ import annotations

from paceline.cluster.detect import Machine
from paceline.config import Config, config_from_dict, layout_of
from paceline.plan.plan import RunMachine
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, largest_microbatch
from paceline.search.automatic import choose, first_microbatch

MACHINE = Machine(processor="any", cores=2, memory_bytes=16e9, gpus=("NVIDIA H100 80GB HBM3",) * 2)


def make_config(**sections: dict[str, object]) -> Config:
    values: dict[str, dict[str, object]] = {
        "model": {"kind": "gpt", "size": "gpt-124m", "vocab_size": 50304},
        "data": {"kind": "synthetic_tokens", "vocab_size": 50304, "context": 1024},
        "train": {"global_batch": 128, "microbatch": "auto", "precision": "bf16", "steps": 2},
        "parallel": {"device": "cuda", "strategy": "ddp"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return config_from_dict(values)


def facts_of(config: Config) -> ModelFacts:
    facts = describe_model(config, "cuda")
    assert facts is not None
    return facts


def first(config: Config, sizes: list[int], ranks: int = 2, node_ranks: int = 2) -> int | None:
    return first_microbatch(config, facts_of(config), MACHINE, sizes, ranks=ranks, node_ranks=node_ranks)


def test_trials_begin_with_what_is_predicted_to_be_fastest() -> None:
    config = make_config()
    sizes = [1, 2, 4, 8, 16, 32, 64]
    found = first(config, sizes)
    assert found in sizes[2:]  # one sample leaves the device waiting for its host
    assert first(config, [1, 2]) == 2
    assert first(config, sizes) == found


def test_without_a_price_the_estimate_alone_says_where_to_begin() -> None:
    assert first(make_config(), []) is None
    assert first(make_config(), [1, 2], ranks=4) is None  # two hosts
    assert first(make_config(comm={"backend": "virtual"}), [1, 2]) is None
    unknown = Machine(processor="any", cores=2, memory_bytes=16e9, gpus=("An unknown card",))
    config = make_config()
    assert first_microbatch(config, facts_of(config), unknown, [1], ranks=1, node_ranks=1) is None


def test_candidates_are_priced_with_the_largest_microbatch_that_has_room() -> None:
    """Also where it has room to the byte, and is all that a rank has."""
    config = make_config()
    where = RunMachine(device="cuda", ranks=2, device_bytes=2**35, host_bytes=2**40)
    most = largest_microbatch(
        facts_of(config), layout_of(config, 2, 2), StateFacts.of(config, "cuda"), where.budget_bytes
    )
    times = []
    for size in ("auto", most, most // 2):
        task = {"microbatch": size, "global_batch": 2 * most if size != most // 2 else most // 2 * 2}
        taken = make_config(parallel={"strategy": "auto"}, train=task)
        ladder = choose(taken, facts_of(taken), where, MACHINE).ladder
        times.append(next(each.seconds for each in ladder if each.layout.strategy == "ddp"))
    assert times[0] == times[1] != times[2]


def test_a_stage_that_has_an_end_of_the_model_alone_is_priced() -> None:
    """Two blocks and both ends make four stages, the last of which has no block."""
    model: dict[str, object] = {"layers": 2, "heads": 4, "width": 64, "vocab_size": 50304}
    config = make_config(
        model={"kind": "gpt", "size": None, **model},
        parallel={"strategy": "auto"},
        train={"microbatch": 1, "global_batch": 32},
    )
    where = RunMachine(device="cuda", ranks=8, device_bytes=2**36, host_bytes=2**40)
    machine = Machine(processor="any", cores=8, memory_bytes=1e12, gpus=(MACHINE.gpus[0],) * 8)
    choice = choose(config, facts_of(config), where, machine)
    deep = [each for each in choice.ladder if each.layout.pipeline == 4]
    assert deep
    assert all(each.seconds and each.seconds > choice.chosen.seconds for each in deep)
