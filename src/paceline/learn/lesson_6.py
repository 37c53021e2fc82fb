"""The exercises of lesson 6: tensor and sequence parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.cluster.costs import Placement, sent_bytes
from paceline.cluster.devices import load_cluster
from paceline.config.sections import GPT_SIZES
from paceline.learn.exercise import Exercise, Verdict, right, wrong
from paceline.learn.number_answers import Mistake, judge_number
from paceline.plan.layout import Layout
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.block import BlockModel
from paceline.predict.formulas.constants import constants_for, fitted_constants

if TYPE_CHECKING:
    import torch

    from paceline.comm.base import Communicator, ReduceOp, Work

# 6.1
_RANKS, _SAMPLES, _LENGTH, _WIDTH, _ELEMENT_BYTES = 4, 2, 2048, 4096, 2
# 6.3
_CLUSTER, _SIZE, _TOKENS, _VOCABULARY = "1x dgx-a100", "gpt-1.1b", 1024, 32000
_DEGREES = (1, 2, 4, 8)


def block_bytes(ranks: int, stream_bytes: int) -> float:
    """Returns what one rank sends for a block in forward and backward: four all-reduces of the stream."""
    return 4 * sent_bytes("ring", stream_bytes, Placement(ranks=ranks), rank=0)


def _check_bytes(answer: Any) -> Verdict:
    stream = _SAMPLES * _LENGTH * _WIDTH * _ELEMENT_BYTES
    truth = block_bytes(_RANKS, stream)
    mistakes = [
        Mistake(value=truth / 2, words="Half of it: either forward alone, or each all-reduce counted as M (N-1)/N."),
        Mistake(
            value=truth / 4,
            words="That is one all-reduce: attention and MLP have one each, in forward and in backward.",
        ),
        Mistake(
            value=stream,
            words="That is the stream itself: how often is it summed, and what does a ring send for a sum?",
        ),
        Mistake(value=8 * stream, words="Close: in a ring a rank keeps its own part. Look at the factor (N-1)/N."),
        Mistake(value=4 * stream, words="You counted M for each all-reduce: a ring sends 2 M (N-1)/N."),
        Mistake(value=2 * truth, words="Twice too much: bf16 has 2 bytes for each number."),
        Mistake(value=truth * _RANKS, words="That is for all ranks together: the exercise asks for one of them."),
        Mistake(value=truth / 2**20, words="That is in MiB: the exercise asks for bytes."),
        Mistake(value=truth / 1e6, words="That is in MB: the exercise asks for bytes."),
    ]
    praise = "With more ranks this hardly changes, while each rank has less to compute."
    return judge_number(answer, truth, mistakes, praise=praise, tolerance=0.002)


def _check_mlp(function: Any) -> Verdict:
    for ranks in (2, 4):
        verdict = _check_mlp_on(function, ranks)
        if not verdict.is_right:
            return verdict
    return right("One sum behind the two matrices is enough, and the bias is added once.")


def _check_mlp_on(function: Any, ranks: int) -> Verdict:
    import torch.nn.functional as F

    from paceline.comm.traced import Trace, TracedCommunicator
    from paceline.comm.virtual.communicator import run_virtual

    x, up, down, bias = _mlp_tensors()

    summands: dict[int, torch.Tensor] = {}

    class Kept(TracedCommunicator):
        """Keeps what its rank brings to the first all-reduce."""

        def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
            summands.setdefault(self.rank, tensor.detach().clone())
            return super().all_reduce(tensor, op)

    def work(comm: Communicator) -> tuple[Any, dict[str, int], int]:
        trace = Trace(comm.device)
        found = function(Kept(comm, trace), x.clone(), up.clone(), down.clone(), bias.clone())
        return found, dict(trace.num_operations), trace.num_bytes["all_reduce"]

    found = run_virtual(work, ranks)
    product = F.gelu(x @ up.T) @ down.T
    verdict = _judge_mlp([each[0] for each in found], product, bias)
    verdict = verdict or _judge_sums(found[0][1], found[0][2], product.nbytes)
    return _judge_summands(summands) if verdict.is_right else verdict


def _mlp_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns x (3, 4), up (8, 4), down (4, 8) and bias (4), which are the same each time."""
    import torch

    numbers = [torch.arange(count, dtype=torch.float64).mul(step).sin() for count, step in ((12, 1), (32, 2), (32, 3))]
    bias = torch.arange(4, dtype=torch.float64).add(1)
    return numbers[0].view(3, 4), numbers[1].view(8, 4), numbers[2].view(4, 8), bias


def _judge_mlp(values: list[Any], product: torch.Tensor, bias: torch.Tensor) -> Verdict | None:
    import torch

    ranks = len(values)
    for rank, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or value.shape != product.shape:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            return wrong(f"Rank {rank} of {ranks} returned {shape}: x is (3, 4) and down (4, 8), so return (3, 4).")
    if all(torch.allclose(value, product + bias) for value in values):
        return None
    if all(torch.allclose(value, product + ranks * bias) for value in values):
        return wrong(f"On {ranks} ranks the bias is added {ranks} times: add it after the sum, or on one rank alone.")
    if all(torch.allclose(value, product) for value in values):
        return wrong("The bias is missing.")
    if all(torch.allclose(value, product / ranks + bias) for value in values):
        return wrong(f"The product is {ranks} times too small: the ranks' parts must be added up, not averaged.")
    if all(torch.allclose(value, ranks * product + bias) for value in values):
        return wrong(
            f"The product is {ranks} times too large: every rank computes with whole matrices, then they are summed."
        )
    if not all(torch.allclose(value, values[0]) for value in values):
        return wrong(f"The {ranks} ranks return different values: each has a part of the sum, which they must add up.")
    return wrong(
        "The ranks agree, but not on the MLP's output. GELU needs whole numbers, not parts of sums: cut up by its "
        "outputs (dim 0) and down by its inputs (dim 1)."
    )


def _judge_sums(operations: dict[str, int], num_bytes: int, expected: int) -> Verdict:
    if not operations:
        return wrong("The output is right, but the ranks exchanged nothing: each computed the whole MLP.")
    if operations != {"all_reduce": 1}:
        called = ", ".join(f"{count} x {kind}" for kind, count in sorted(operations.items()))
        return wrong(f"The output is right, but a rank called {called}: one all-reduce behind the second matrix does.")
    if num_bytes != expected:
        return wrong(
            f"The output is right, but the all-reduce carried {num_bytes} bytes: the output itself has {expected}."
        )
    return right("")


def _judge_summands(summands: dict[int, torch.Tensor]) -> Verdict:
    """Refuses ranks that bring the same to the sum: none of them computed a part."""
    import torch

    if all(torch.allclose(each, summands[0]) for each in summands.values()):
        return wrong(
            "The output is right, but all ranks bring the same tensor to the sum: each computed the whole MLP. Use "
            "only this rank's part of up and down."
        )
    return right("")


@cache
def block_seconds(cluster_name: str, size: str, tensor: int, tokens: int) -> tuple[float, float]:
    """Returns what one block computes and waits in a step, in seconds: one of ``tensor`` ranks, one sequence."""
    cluster = load_cluster(cluster_name)
    workload = Workload(
        model=replace(GPT_SIZES[size], vocab_size=_VOCABULARY),
        layout=Layout(tensor=tensor).for_ranks(tensor),
        run=Running(seq_len=tokens, compute="bf16"),
    )
    constants, _ = constants_for(fitted_constants(), cluster.device.generation, "eager")
    costs = BlockModel(workload, cluster, constants).costs()
    both = costs.forward + costs.backward
    return both.device, both.wait


def _check_degree(answer: Any) -> Verdict:
    try:
        degree = int(answer)
    except (TypeError, ValueError):
        degree = 0
    if degree not in _DEGREES or degree != float(answer):
        return wrong(f"{answer} is none of {', '.join(map(str, _DEGREES))}: give one of these numbers.")
    device, wait = block_seconds(_CLUSTER, _SIZE, degree, _TOKENS)
    times = f"With N_t = {degree} a rank computes {device * 1e3:.2f} ms and waits {wait * 1e3:.2f} ms"
    if wait >= device:
        return wrong(f"Too many. {times}.")
    larger = [each for each in _DEGREES if each > degree]
    if any(wait < device for device, wait in (block_seconds(_CLUSTER, _SIZE, each, _TOKENS) for each in larger)):
        return wrong(f"{times}, so that it pays. A larger one pays as well.")
    return right(f"{times}. With twice as many ranks it waits longer than it computes.")


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        number="6.1",
        title="What a block sends",
        asks=(
            "N_t = 4 ranks share a block of width d = 4,096. A microbatch has b = 2 samples of S = 2,048 tokens, and "
            "activations are in bf16. How many bytes does one rank send for this block in forward and backward "
            "together? Count an all-reduce of M bytes as 2 M (N-1)/N, as a ring sends them."
        ),
        answer="number",
        hints=(
            "How many bytes has the stream: samples x tokens x width x bytes of a number?",
            "There are two all-reduces in forward (behind attention and behind the MLP), and as many in backward.",
        ),
        check=_check_bytes,
    ),
    Exercise(
        number="6.2",
        title="An MLP with a bias",
        asks=(
            "Write split_mlp(comm, x, up, down, bias), which returns gelu(x @ up.T) @ down.T + bias on every rank. "
            "All ranks get the whole tensors; each rank computes with its part of up and down alone. Use exactly one "
            "all-reduce, and nothing else."
        ),
        answer="function",
        function="split_mlp",
        hints=(
            "up is cut along dim 0, its outputs, and down along dim 1, its inputs.",
            "What happens to the bias if every rank adds it before the sum?",
        ),
        check=_check_mlp,
    ),
    Exercise(
        number="6.3",
        title="Where it stops paying",
        asks=(
            "One block of gpt-1.1b runs on an A100 node (1x dgx-a100) with one sequence of S = 1,024 tokens. Of N_t "
            "= 1, 2, 4 and 8, which is the largest for which a rank computes longer than it waits? Use block_seconds "
            "of the lesson."
        ),
        answer="number",
        hints=(
            'Call block_seconds("1x dgx-a100", "gpt-1.1b", N_t, 1024) for each N_t: it returns computing and waiting.',
            "Waiting must be the smaller of the two.",
        ),
        check=_check_degree,
    ),
)
