"""Where training ends under each compression: a config's own run, whole, with and without error feedback.

For each policy, beside the uncompressed runs of the same seeds, as means over them:

    accuracy, loss            of the evaluation set after the last step
    accuracy_points           above the uncompressed accuracy, in points (hundredths)
    loss_percent              above the uncompressed loss, in percent
    is_close                  a classifier's accuracy is at most 0.5 points lower; a GPT's loss at most 1 % higher
    bytes_ratio               what a rank sends uncompressed / compressed over the whole run, as the tracer saw it

A seed changes the weights and the order of samples; what is set aside for evaluation stays. Cost: for each seed a run
under each policy, with feedback and without, on virtual ranks, which take turns; several runs at a time, each a process
of its own with one thread.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from measures.compression import check_policy_ranks, run_policy, sent_bytes, setting_text, with_compression
from paceline.config import Config
from paceline.config.schema import CompressionConfig
from paceline.errors import UsageError
from paceline.plan.plan import RunMachine
from paceline.run.processes import end_children
from paceline.run.signals import interrupts_withheld
from paceline.search.request import make_plan, with_length
from paceline.train.assemble import build_workload
from paceline.train.trainer import Trainer

CLOSE_POINTS = 0.5
CLOSE_PERCENT = 1.0
_PLAIN_SHARE = 0.1  # of the steps, before compression begins

_CHANGES: tuple[dict[str, Any], ...] = (
    {"policy": "topk", "ratio": 0.01},
    {"policy": "randomk", "ratio": 0.05},
    {"policy": "powersgd", "factor_rank": 4},
    {"policy": "int8"},
    {"policy": "sign"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one run ended: the same on every rank but for the bytes, which are rank 0's."""

    loss: float
    accuracy: float | None
    sent_bytes: float
    num_steps: int


def arms_to_run(config: Config, total_steps: int) -> list[CompressionConfig]:
    """Returns the policies, each with error feedback and without; a tenth of the steps is plain unless others are."""
    asked = config.comm.compression
    plain = asked.plain_steps or round(_PLAIN_SHARE * total_steps)
    return [
        asked.model_copy(update={**change, "plain_steps": plain, "error_feedback": feedback})
        for change in _CHANGES
        for feedback in (True, False)
    ]


def bench_convergence(
    config: Config, ranks: int, seeds: int, workers: int = 1, progress: Callable[[str], None] = lambda _text: None
) -> list[dict[str, Any]]:
    """Runs a config under each policy, once for each seed; returns a row for each, the uncompressed one first.

    ``workers`` runs go on at a time. Raises UsageError for a config that evaluates nothing, ConfigError for ranks that
    it cannot run on.
    """
    if getattr(config.data, "eval_fraction", None) == 0:
        raise UsageError(
            "data.eval_fraction = 0\n  where a run ends is judged by an evaluation set\n  set data.eval_fraction = 0.1"
        )
    check_policy_ranks(config, ranks)
    arms = [CompressionConfig(), *arms_to_run(config, _total_steps(config, ranks))]
    tasks = [(_seeded(config, seed), arm, ranks) for seed in range(seeds) for arm in arms]
    endings: dict[int, Ending] = {}
    for place, ending in _run_all(tasks, workers):
        endings[place] = ending
        _, arm, _ = tasks[place]
        feedback = "" if arm.error_feedback else " without error feedback"
        progress(f"{config.name}: {len(endings)} of {len(tasks)} runs, {arm.policy}{feedback}")
    by_arm = [[endings[seed * len(arms) + place] for seed in range(seeds)] for place in range(len(arms))]
    return [_row(config, arm, runs, by_arm[0]) for arm, runs in zip(arms, by_arm, strict=True)]


def _total_steps(config: Config, ranks: int) -> int:
    data = build_workload(with_compression(config, CompressionConfig())).data
    num_eval = 0 if data.eval is None else len(data.eval)
    plan = make_plan(config, RunMachine(device="cpu", ranks=ranks))
    return with_length(plan, config, train_samples=len(data.train), eval_samples=num_eval).total_steps


_Task = tuple[Config, CompressionConfig, int]


def _run_all(tasks: Sequence[_Task], workers: int) -> Iterator[tuple[int, Ending]]:
    """Yields the places of runs as they end, and how they ended."""
    if workers == 1:
        yield from ((place, _run(*task)) for place, task in enumerate(tasks))
        return
    # Spawned: a process that has run threads is not safe to fork.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        try:
            with interrupts_withheld():
                waiting = {pool.submit(_run, *task): place for place, task in enumerate(tasks)}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BaseException:
            end_children()  # else the pool waits for all that is under way
            raise


def _seeded(config: Config, number: int) -> Config:
    first, data = config.train.seed, config.data.seed
    return config.with_values("train", seed=first + number).with_values("data", seed=first if data is None else data)


def _run(config: Config, compression: CompressionConfig, ranks: int) -> Ending:
    return run_policy(config, compression, ranks, _train, 3600.0)[0]


def _train(trainer: Trainer) -> Ending:
    for _ in trainer.steps():
        pass
    sent, result = sent_bytes(trainer.parts.engine.comm), trainer.evaluate()
    assert result is not None
    return Ending(loss=result.loss, accuracy=result.accuracy, sent_bytes=sent, num_steps=trainer.step)


def _row(config: Config, asked: CompressionConfig, runs: Sequence[Ending], plain: Sequence[Ending]) -> dict[str, Any]:
    loss, base = (statistics.fmean(run.loss for run in each) for each in (runs, plain))
    sent, plain_bytes = (sum(run.sent_bytes for run in each) for each in (runs, plain))
    percent = 100 * (loss / base - 1)
    accuracy, points = None, None
    found = [(run.accuracy, other.accuracy) for run, other in zip(runs, plain, strict=True)]
    pairs = [(mine, theirs) for mine, theirs in found if mine is not None and theirs is not None]
    if len(pairs) == len(runs):
        accuracy = statistics.fmean(mine for mine, _ in pairs)
        points = 100 * statistics.fmean(mine - theirs for mine, theirs in pairs)
    is_by_loss = config.model.kind == "gpt" or points is None
    return {
        "config": config.name,
        "policy": asked.policy,
        "setting": setting_text(asked),
        "error_feedback": asked.error_feedback and asked.policy != "none",
        "plain_steps": asked.plain_steps,
        "steps": runs[0].num_steps,
        "seeds": len(runs),
        "loss": loss,
        "losses": [run.loss for run in runs],
        "loss_percent": percent,
        "accuracy": accuracy,
        "accuracies": [run.accuracy for run in runs],
        "accuracy_points": points,
        "judged_by": "loss" if is_by_loss else "accuracy",
        "is_close": percent <= CLOSE_PERCENT if is_by_loss or points is None else points >= -CLOSE_POINTS,
        "bytes_ratio": plain_bytes / sent if sent else None,
    }
