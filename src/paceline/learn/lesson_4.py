"""The exercises of lesson 4: where memory goes, and ZeRO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.learn.exercise import Exercise, Verdict, right, wrong
from paceline.learn.number_answers import Mistake, judge_number
from paceline.plan.layout import Layout, Strategy
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory

if TYPE_CHECKING:
    import torch

    from paceline.comm.base import Communicator

_GB = 1e9
# 4.1
_PARAMETERS, _RANKS = 3_000_000_000, 8
# 4.3
_LARGE, _DEVICE_GB, _ACTIVATIONS_GB = 7_000_000_000, 80, 30
_LADDER: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp")


def state_bytes(parameters: int, strategy: Strategy, ranks: int) -> int:
    """Returns the bytes of parameters, gradients and moments on one rank: AdamW in fp32."""
    model = ModelFacts(name="exercise", blocks=(), root=BlockFacts(parameters=parameters))
    need = estimate_memory(model, Layout(strategy=strategy).for_ranks(ranks), StateFacts())
    return int(need.parameters + need.gradients + need.optimizer)


def _check_states(answer: Any) -> Verdict:
    truth = state_bytes(_PARAMETERS, "zero1", _RANKS) / _GB
    others = {name: state_bytes(_PARAMETERS, name, _RANKS) / _GB for name in _LADDER}
    mistakes = [
        Mistake(
            value=others["ddp"], words="That is data parallelism: ZeRO 1 shares out one of the three kinds of states."
        ),
        Mistake(value=others["zero2"], words="That is ZeRO 2: in ZeRO 1 the gradients stay whole on every rank."),
        Mistake(
            value=others["fsdp"], words="That is FSDP: in ZeRO 1 parameters and gradients stay whole on every rank."
        ),
        Mistake(value=truth / 4, words="You counted numbers: a number in fp32 has 4 bytes."),
        Mistake(
            value=truth - 4 * _PARAMETERS / _GB,
            words="One kind is missing: a rank holds parameters and gradients besides its moments.",
        ),
        Mistake(value=8 * _PARAMETERS / _GB, words="You left out the slice: a rank keeps the moments of its part."),
        Mistake(
            value=truth - 4 * _PARAMETERS / _RANKS / _GB,
            words="AdamW keeps two moments for each parameter, so 8 bytes, of which a rank has its part.",
        ),
        Mistake(
            value=truth * _GB / 2**30, words="That is in GiB (2**30 bytes): the exercise asks for GB (10**9 bytes)."
        ),
        Mistake(value=truth * _GB, words="That is in bytes: the exercise asks for GB (10**9 bytes)."),
    ]
    praise = "8 P bytes stay on every rank, and with more ranks only the moments shrink."
    return judge_number(answer, truth, mistakes, praise=praise, tolerance=0.005)


def _check_step(function: Any) -> Verdict:
    for ranks in (4, 3):
        verdict = _check_step_on(function, ranks)
        if not verdict.is_right:
            return verdict
    return right(
        "Each rank averaged and updated one slice, and the ranks exchanged one reduce-scatter and one "
        "all-gather. With AdamW in the place of the plain step this is ZeRO 1."
    )


def _check_step_on(function: Any, ranks: int) -> Verdict:
    import torch

    from paceline.comm.traced import Trace, TracedCommunicator
    from paceline.comm.virtual.communicator import run_virtual

    before = torch.arange(24, dtype=torch.float64).sin()
    gradients = [torch.arange(24, dtype=torch.float64).add(7 * rank).cos() for rank in range(ranks)]

    def work(comm: Communicator) -> tuple[Any, dict[str, int]]:
        trace = Trace(comm.device)
        found = function(TracedCommunicator(comm, trace), before.clone(), gradients[comm.rank].clone(), 0.1)
        return found, dict(trace.num_operations)

    found = run_virtual(work, ranks)
    mean = sum(gradients[1:], gradients[0]) / ranks
    values = [each for each, _ in found]
    return _judge_values(values, before, mean, gradients) or _judge_operations(found[0][1])


def _judge_values(
    values: list[Any], before: torch.Tensor, mean: torch.Tensor, gradients: list[torch.Tensor]
) -> Verdict | None:
    import torch

    ranks = len(values)
    for rank, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or value.shape != before.shape:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            return wrong(f"Rank {rank} of {ranks} returned {shape}: return all {before.numel()} parameters, flat.")
    if all(torch.allclose(value, before - 0.1 * mean) for value in values):
        return None
    if all(torch.allclose(value, before - 0.1 * ranks * mean) for value in values):
        return wrong(
            f"On {ranks} ranks the step is {ranks} times too far: take the mean of the gradients, not their sum."
        )
    if all(torch.allclose(value, before) for value in values):
        return wrong("The parameters are those from before the step.")
    if all(torch.allclose(value, before + 0.1 * mean) for value in values):
        return wrong("The step goes up the gradient: subtract it.")
    own = torch.cat([each.chunk(ranks)[rank] for rank, each in enumerate(gradients)])
    if all(torch.allclose(value, before - 0.1 * own) for value in values):
        return wrong(
            "Each slice was updated by its own rank's gradients alone: they must be averaged over the ranks first."
        )
    if not all(torch.allclose(value, values[0]) for value in values):
        return wrong(
            f"The {ranks} ranks return different parameters. After the update each rank has only its own slice new: "
            "the others must get it."
        )
    return wrong(
        "The ranks agree, but the parameters are not those of one process: compare one slice by hand. A tensor has "
        "what a collective puts into it only after wait()."
    )


def _judge_operations(operations: dict[str, int]) -> Verdict:
    if operations.get("all_reduce"):
        return wrong(
            "The parameters are right, but you call all_reduce: then every rank has all averaged gradients, and no "
            "slice to itself. Give each rank the mean of its slice alone."
        )
    if operations != {"reduce_scatter": 1, "all_gather": 1}:
        called = ", ".join(f"{count} x {kind}" for kind, count in sorted(operations.items())) or "no collective"
        return wrong(f"The parameters are right, but a rank called {called}: one reduce_scatter and one all_gather do.")
    return right("")


def _check_strategy(answer: Any) -> Verdict:
    word = str(answer).strip().lower().replace("-", "").replace(" ", "")
    word = {"zero3": "fsdp", "dp": "ddp", "dataparallel": "ddp"}.get(word, word)
    if word not in _LADDER:
        return wrong(f"{answer!r} is none of {', '.join(_LADDER)}: give one of these words.")
    needs = {name: state_bytes(_LARGE, name, _RANKS) / _GB + _ACTIVATIONS_GB for name in _LADDER}
    first = next(name for name in _LADDER if needs[name] <= _DEVICE_GB)
    if word == first:
        return right(
            f"It needs {needs[word]:.1f} of {_DEVICE_GB} GB, and what comes before it on the list does not fit."
        )
    if needs[word] > _DEVICE_GB:
        return wrong(f"{word} needs {needs[word]:.0f} GB with the activations, and the device has {_DEVICE_GB}.")
    return wrong(f"{word} fits, but it sends more than a strategy that comes before it on the list and fits as well.")


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        number="4.1",
        title="The states of one rank",
        asks=(
            "A model has P = 3,000,000,000 parameters. AdamW trains it in fp32 with ZeRO 1 on N = 8 ranks. How many GB "
            "(10**9 bytes) of parameters, gradients and moments does one rank hold?"
        ),
        answer="number",
        hints=(
            "Three kinds of states: how many bytes of each does a parameter have, and which of them does ZeRO 1 share?",
            "Parameters and gradients stay whole, 4 P bytes each. The two moments are cut into N slices.",
        ),
        check=_check_states,
    ),
    Exercise(
        number="4.2",
        title="A step that shares the update",
        asks=(
            "Write sharded_step(comm, parameters, gradients, step_size). Both tensors are flat and have P numbers, "
            "and N divides P; parameters are the same on all ranks, gradients are this rank's. Return all P "
            "parameters after one step of plain gradient descent, parameters - step_size x mean gradient, where each "
            "rank updates only its slice. Use one reduce_scatter and one all_gather."
        ),
        answer="function",
        function="sharded_step",
        hints=(
            "Begin with this rank's slice: parameters.chunk(comm.size)[comm.rank].clone().",
            'comm.reduce_scatter(output, gradients, "avg").wait() puts the mean of this rank\'s slice into output.',
            "Update the slice, then comm.all_gather(parameters, slice).wait() brings all slices together.",
        ),
        check=_check_step,
    ),
    Exercise(
        number="4.3",
        title="The cheapest strategy that fits",
        asks=(
            "A model has P = 7,000,000,000 parameters; AdamW trains it in fp32 on 8 devices of 80 GB. Activations "
            "and all else take 30 GB on each. Of ddp, zero1, zero2, fsdp, in this order, which is the first that fits?"
        ),
        answer="word",
        hints=(
            "Subtract the 30 GB first: how many bytes for each of the P parameters are left?",
            "Put N = 8 into the table of the formula: 16 P, 8 P + 8 P / N, 4 P + 12 P / N, 16 P / N.",
        ),
        check=_check_strategy,
    ),
)
