"""The numbers of a record as named scalars, for curves: TensorBoard's tags and the metrics of other trackers."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.records.records import CommRecord, EvalRecord, EventRecord, HostRecord, Record, StepRecord


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a step, an evaluation, communication, a host, or an event of scalars; of others none."""
    match record:
        case StepRecord():
            yield from _of_step(record)
        case EvalRecord():
            yield "eval/loss", record.loss
            if record.accuracy is not None:
                yield "eval/accuracy", record.accuracy
            yield from ((f"eval/{name}", value) for name, value in record.metrics.items())
            yield "eval/seconds", record.seconds
        case CommRecord():
            name = f"comm/{record.group}/{record.kind}"
            yield f"{name}/calls", record.calls
            yield f"{name}/bytes", record.bytes
            yield f"{name}/seconds", record.seconds
            yield f"{name}/bytes_per_s", record.bandwidth
            yield f"{name}/bus_bytes_per_s", record.bus_bandwidth
        case HostRecord():
            yield from ((f"host/{record.host}/{name}", value) for name, value in record.values.items())
        case EventRecord(name="scalars"):
            yield from ((tag, value) for tag, value in record.detail.items() if isinstance(value, int | float))


def _of_step(record: StepRecord) -> Iterator[tuple[str, float]]:
    if record.loss is not None:
        yield "train/loss", record.loss
    if record.grad_norm is not None:
        yield "train/grad_norm", record.grad_norm
    if record.loss_scale != 1.0:
        yield "train/loss_scale", record.loss_scale
    yield "train/lr", record.lr
    yield "train/epoch", record.epoch
    for name in ("step_s", "data_s", "forward_s", "backward_s", "comm_s", "optimizer_s"):
        yield f"time/{name}", getattr(record, name)
    if record.host_s is not None:
        yield "time/host_s", record.host_s
    yield "speed/samples_per_s", record.samples_per_s
    if record.flops_per_s is not None:
        yield "speed/tflops", record.flops_per_s / 1e12
    if record.mfu is not None:
        yield "speed/mfu", record.mfu
    yield "memory/peak_bytes", record.memory_bytes
    if record.allocated_bytes is not None:
        yield "memory/allocated_bytes", record.allocated_bytes
    if record.reserved_bytes is not None:
        yield "memory/reserved_bytes", record.reserved_bytes
