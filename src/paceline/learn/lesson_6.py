"""Checks of lesson 6: tensor and sequence parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from paceline.cluster.costs import Placement, sent_bytes
from paceline.cluster.devices import load_cluster
from paceline.comm.base import ReduceOp, Work
from paceline.config.sections import GPT_SIZES
from paceline.learn.counted import CountingCommunicator, all_close, compare, run_counted, shown_calls
from paceline.learn.exercise import RIGHT, Said, judge_number, says
from paceline.plan.layout import Layout
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.block import BlockModel
from paceline.predict.formulas.constants import constants_for, fitted_constants

_RANKS, _SAMPLES, _LENGTH, _WIDTH, _ELEMENT_BYTES = 4, 2, 2048, 4096, 2  # 6.1
_CLUSTER, _SIZE, _TOKENS, _VOCABULARY = "1x dgx-a100", "gpt-1.1b", 1024, 32000  # 6.3
_DEGREES = (1, 2, 4, 8)


def block_bytes(ranks: int, stream_bytes: int) -> float:
    """Returns what one rank sends for a block in forward and backward: four all-reduces of the stream."""
    return 4 * sent_bytes("ring", stream_bytes, Placement(ranks=ranks), rank=0)


def check_bytes(answer: float) -> Said:
    stream = _SAMPLES * _LENGTH * _WIDTH * _ELEMENT_BYTES
    truth = block_bytes(_RANKS, stream)
    mistakes = {
        "half": truth / 2,
        "one": truth / 4,
        "stream": stream,
        "own_part": 8 * stream,
        "once_each": 4 * stream,
        "twice": 2 * truth,
        "all_ranks": truth * _RANKS,
        "mib": truth / 2**20,
        "mb": truth / 1e6,
    }
    return judge_number(answer, truth, mistakes, tolerance=0.002)


def check_mlp(function: Any) -> Said:
    """Runs the reader's MLP on two and four ranks: the output, then what was summed."""
    parts = [torch.arange(count, dtype=torch.float64).mul(step).sin() for count, step in ((12, 1), (32, 2), (32, 3))]
    x, up, down = parts[0].view(3, 4), parts[1].view(8, 4), parts[2].view(4, 8)
    bias = torch.arange(4, dtype=torch.float64).add(1)
    product = F.gelu(x @ up.T) @ down.T
    summands: dict[int, torch.Tensor] = {}

    class Keeping(CountingCommunicator):
        """Keeps what its rank brings to the first all-reduce."""

        def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
            summands.setdefault(self.rank, tensor.detach().clone())
            return super().all_reduce(tensor, op)

    def work(comm: Any) -> Any:
        return function(comm, x.clone(), up.clone(), down.clone(), bias.clone())

    for ranks in (2, 4):
        summands.clear()
        found = run_counted(work, ranks, Keeping)
        usual = {
            "biases": product + ranks * bias,
            "no_bias": product,
            "averaged": product / ranks + bias,
            "whole_and_summed": ranks * product + bias,
        }
        said = compare(found.results, product + bias, usual) or _sums_wrong(found.comms[0], product.nbytes)
        if said is not None:
            return said
        if all_close(list(summands.values()), summands[0]):
            return says("whole")
    return RIGHT


def _sums_wrong(first: CountingCommunicator, expected: int) -> Said | None:
    """Says what is wrong with what the first rank sent: one sum of ``expected`` bytes is enough."""
    if not first.calls:
        return says("nothing_sent")
    if first.calls != {"all_reduce": 1}:
        return says("calls", called=shown_calls(first.calls))
    if (sent := first.trace.num_bytes["all_reduce"]) != expected:
        return says("bytes", sent=sent, expected=expected)
    return None


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


def check_degree(answer: float) -> Said:
    """Compares with what the formulas say of each number of ranks."""
    if answer not in _DEGREES:
        return says("unknown", answer=answer, known=", ".join(map(str, _DEGREES)))
    times = {each: block_seconds(_CLUSTER, _SIZE, each, _TOKENS) for each in _DEGREES}
    paying = [each for each, (device, wait) in times.items() if wait < device]
    degree = int(answer)
    device, wait = times[degree]
    name = "too_many" if degree not in paying else "right" if degree == paying[-1] else "too_few"
    return says(name, degree=degree, device=device * 1e3, wait=wait * 1e3)


CHECKS = {"6.1": check_bytes, "6.2": check_mlp, "6.3": check_degree}
