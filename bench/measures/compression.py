"""Which compression pays: a config's own model, a few steps under each policy on virtual ranks.

For each policy, beside the uncompressed run:

    bytes_ratio        what a rank sends uncompressed / compressed, of the operations that the tracer saw
    loss_difference    of the mean training loss over the last quarter of the steps
    residual_norm      what a rank still owes at the end, beside the norm of the last gradient
    compute_ms         compressing and decompressing in one step, without the communication itself
    pays_below_gbps    the link on which compute_ms and the bytes saved weigh the same: (bytes saved) / compute_ms

Virtual ranks run one at a time on the CPU, so that a rank's own processor time is what it would take
alone, on one thread.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from paceline.comm.base import DONE, BucketShape, Call, Communicator, Work, WrappedCommunicator
from paceline.comm.compress import Compressor
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, check_ranks
from paceline.config.schema import CompressionConfig
from paceline.errors import ConfigError, UsageError
from paceline.plan.layout import Compression
from paceline.shards import flat_layout
from paceline.train.assemble import build_trainer
from paceline.train.randomness import compute_threads
from paceline.train.trainer import Trainer

_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "all_to_all": 1.0}  # of (N-1)/N of the bytes; see comm/base.py
_KEYS = {"topk": "ratio", "randomk": "ratio", "threshold": "threshold", "powersgd": "factor_rank"}  # read by a policy
_REPEATS = 5
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PolicyRun:
    """What one rank saw of a run under one policy."""

    losses: list[tuple[float, float]]  # sum and count of each step
    sent_bytes: float  # a step
    grad_norm: float
    residual_norm: float
    shape: BucketShape  # of the whole model


def policies_to_try(config: Config, numbers: Mapping[str, Any], *, both: bool = False) -> list[CompressionConfig]:
    """Returns every policy with the config's own numbers, top-k at 0.1 % too; with ``both`` also without feedback."""
    asked = config.comm.compression.model_copy(update=dict(numbers))
    asked_ratio = {"ratio": asked.ratio} if "ratio" in asked.model_fields_set else {}
    changes: list[dict[str, Any]] = [
        {"policy": "topk", **asked_ratio},
        {"policy": "topk", "ratio": 0.001},
        {"policy": "randomk", "ratio": 0.05, **asked_ratio},
        *({"policy": name} for name in ("threshold", "powersgd", "sign", "int8", "fp16", "bf16")),
    ]
    found = [_without_unread(asked.model_copy(update=change)) for change in changes]
    if both:
        found += [each.model_copy(update={"error_feedback": False}) for each in found]
    return list(dict.fromkeys(found))


def _without_unread(asked: CompressionConfig) -> CompressionConfig:
    """Returns the compression with the defaults of what its policy does not read."""
    default, read = CompressionConfig(), _KEYS.get(asked.policy)
    return asked.model_copy(update={key: getattr(default, key) for key in set(_KEYS.values()) if key != read})


def bench_compression(
    config: Config, ranks: int, steps: int, numbers: Mapping[str, Any] | None = None, *, both: bool = False
) -> list[dict[str, Any]]:
    """Runs each policy and returns a row for each, the uncompressed run first. ``numbers`` go before the config's own.

    Raises UsageError for a run that is too short to see anything.
    """
    if steps < 4 + config.comm.compression.plain_steps or ranks < 2:
        raise UsageError(
            f"{steps} steps on {ranks} ranks\n  a comparison needs 4 steps after the warm-up, and 2 ranks\n"
            "  ask for more"
        )
    check_policy_ranks(config, ranks)
    plain = _run(config, CompressionConfig(policy="none"), ranks, steps)
    base_loss, base_bytes = _loss(plain), plain[0].sent_bytes
    rows = [_row(CompressionConfig(policy="none"), plain, base_loss, base_bytes, 0.0)]
    for asked in policies_to_try(config, numbers or {}, both=both):
        runs = _run(config, asked, ranks, steps)
        seconds = _compute_seconds(Compression(**asked.model_dump()), plain[0], ranks)
        rows.append(_row(asked, runs, base_loss, base_bytes, seconds))
    return rows


def with_compression(config: Config, compression: CompressionConfig) -> Config:
    """Returns a config that trains data-parallel with this compression, every collective traced."""
    traced = config.with_values("comm", compression=compression, algorithm="native")  # which is traced whole
    return traced.with_values("parallel", strategy="ddp")


def check_policy_ranks(config: Config, ranks: int) -> None:
    """Raises ConfigError for ranks that a config cannot run on."""
    if problems := check_ranks(with_compression(config, CompressionConfig()), ranks):
        raise ConfigError(problems)


def run_policy(
    config: Config, compression: CompressionConfig, ranks: int, train: Callable[[Trainer], T], timeout_s: float
) -> list[T]:
    """Runs a config under a compression on virtual ranks; returns what ``train`` made of each rank's trainer."""
    wanted = with_compression(config, compression)

    def run(comm: Communicator) -> T:
        trainer = build_trainer(wanted, comm)
        found = train(trainer)
        if trainer.parts.eval_loader is not None:
            trainer.parts.eval_loader.close()
        return found

    return run_virtual(run, ranks, timeout_s=timeout_s)


def _run(config: Config, compression: CompressionConfig, ranks: int, steps: int) -> list[_PolicyRun]:
    counted_from = max(1, compression.plain_steps)
    return run_policy(config, compression, ranks, lambda trainer: _train(trainer, steps, counted_from), 600.0)


def _train(trainer: Trainer, steps: int, counted_from: int) -> _PolicyRun:
    traced = trainer.parts.engine.comm
    losses, norm, first_bytes = [], 0.0, 0.0
    for number, result in enumerate(trainer.steps(), start=1):
        losses.append((float(result.outcome.loss_sum), float(result.outcome.count)))
        norm = float(result.outcome.grad_norm)
        if number == counted_from:  # the first step also agrees on the order of gradients
            first_bytes = sent_bytes(traced)
        if number == steps:
            break
    compressor = trainer.parts.compressor
    named = dict(trainer.parts.engine.named_parameters())
    shape = BucketShape(names=tuple(named), layout=flat_layout([tuple(p.shape) for p in named.values()]))
    return _PolicyRun(
        losses=losses,
        sent_bytes=(sent_bytes(traced) - first_bytes) / max(1, len(losses) - counted_from),
        grad_norm=norm,
        residual_norm=0.0 if compressor is None else compressor.residual_norm(),
        shape=shape,
    )


def sent_bytes(comm: Communicator) -> float:
    """Returns what this rank sent so far, by the bandwidth-optimal collectives."""
    assert comm.trace is not None
    share = (comm.size - 1) / comm.size
    return sum(share * factor * comm.trace.num_bytes[kind] for kind, factor in _FACTORS.items())


def _loss(runs: Sequence[_PolicyRun]) -> float:
    """Returns the mean loss over all ranks, of the last quarter of the steps."""
    last = max(1, len(runs[0].losses) // 4)
    pairs = [pair for run in runs for pair in run.losses[-last:]]
    return sum(total for total, _ in pairs) / sum(count for _, count in pairs)


def _row(
    asked: CompressionConfig, runs: Sequence[_PolicyRun], base_loss: float, base_bytes: float, seconds: float
) -> dict[str, Any]:
    loss, sent = _loss(runs), runs[0].sent_bytes
    saved = base_bytes - sent
    return {
        "policy": asked.policy,
        "setting": setting_text(asked),
        "error_feedback": asked.error_feedback and asked.policy != "none",
        "ranks": len(runs),
        "sent_bytes": sent,
        "bytes_ratio": base_bytes / sent if sent else None,
        "loss": loss,
        "loss_difference": loss - base_loss,
        "grad_norm": runs[0].grad_norm,
        "residual_norm": statistics.fmean(run.residual_norm for run in runs),
        "compute_ms": 1e3 * seconds,
        "pays_below_gbps": 8e-9 * saved / seconds if seconds > 0 and saved > 0 else None,
    }


def setting_text(asked: CompressionConfig) -> str:
    """Returns the number that a policy goes by, if it has one."""
    key = _KEYS.get(asked.policy)
    return f"{key}={getattr(asked, key):g}" if key else ""


# What compression itself takes.


def _compute_seconds(settings: Compression, run: _PolicyRun, ranks: int) -> float:
    """Times one step's compression of gradients as large as the model's, on one thread; the slowest rank counts."""
    settings = dataclasses.replace(settings, plain_steps=0)
    with compute_threads(1):  # a thread's own time is all there is then
        return max(run_virtual(lambda comm: _time_steps(settings, run, comm), ranks, timeout_s=600.0))


def _time_steps(settings: Compression, run: _PolicyRun, comm: Communicator) -> float:
    compressor, timed = Compressor(settings), _TimedCommunicator(comm)
    (bucket,) = compressor.bind((run.shape,))
    length = run.shape.layout.length
    taken = []
    for _ in range(_REPEATS):
        buffer = torch.randn(length) * (run.grad_norm / length**0.5)
        before, elsewhere = time.thread_time(), timed.seconds
        bucket.start(buffer, cast(Communicator, timed)).wait()
        compressor.end_pass()
        taken.append(time.thread_time() - before - (timed.seconds - elsewhere))
    return statistics.median(taken[1:])


class _TimedCommunicator(WrappedCommunicator):
    """Passes on the verbs that policies use, and adds up the processor time that they take."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.seconds = 0.0

    def issue(self, call: Call) -> Work:
        start = time.thread_time()
        super().issue(call).wait()
        self.seconds += time.thread_time() - start
        return DONE
