"""A training on virtual ranks with clocks: real losses, and the times of the machine that was asked for.

    found = simulate(prepare(config, ranks=4), Conditions(cluster=load_cluster("4x a100-sxm")))
    found.records[0]        what rank 0 of a real run would have written
    found.summary           steps, throughput, exposed and hidden communication, idle time

One step is the step of ``paceline train``: the same code, on the same engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch

from paceline.cluster.detect import usable_cores
from paceline.cluster.devices import Cluster
from paceline.cluster.wires import over_backend, wire_cost
from paceline.comm.virtual.clock import VirtualClock, VirtualTime
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import Config, check_ranks
from paceline.errors import ConfigError, PacelineError, RankFailedError, UsageError
from paceline.notebook import Shown, curve
from paceline.predict.memory.memory import EngineMemory, is_known
from paceline.records.records import EndRecord, HostRecord, Record, StepRecord
from paceline.records.sinks import Sink
from paceline.rehearse.simulate import recording
from paceline.rehearse.simulate.prices import KernelPrices, PricedCompute, Rates
from paceline.train.assemble import build_trainer
from paceline.train.randomness import compute_threads
from paceline.train.trainer import EvaluateHook, Every, Trainer

ComputeKind: TypeAlias = Literal["measured", "modelled"]
COMPUTE_KINDS: tuple[ComputeKind, ...] = ("measured", "modelled")
Watch: TypeAlias = Callable[[int, Trainer], None]  # of a rank, when its training is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Where a simulated run takes place.

    ``cluster`` is whose wires the ranks talk over; None: processes of one host. ``compute`` is measured here, or
    modelled for the cluster's device (else for one core), the same on every machine. ``slow`` multiplies the compute of
    ranks, ``slow_links`` the cost of their operations. ``backend``: the config's, before ``prepare`` makes it virtual.
    """

    cluster: Cluster | None = None
    backend: str = "auto"
    compute: ComputeKind = "measured"
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)

    @property
    def rates(self) -> Rates | KernelPrices:
        return Rates() if self.cluster is None else KernelPrices(self.cluster.device)

    @property
    def gpu(self) -> str:
        return "" if self.cluster is None or self.cluster.device.is_cpu else self.cluster.device.name

    def timing(self, config: Config) -> VirtualTime:
        """Returns the clocks of a config's ranks. Raises UsageError for a backend that cannot be priced."""
        ranks, cluster = config.parallel.decided_ranks, self.cluster
        if cluster is None and self.backend in ("nccl", "shared_memory"):
            usual = f"{ranks}x {'h100-sxm' if self.backend == 'nccl' else 'cpu-host'}"
            raise UsageError(
                f"comm.backend = {self.backend} without a cluster\n  ranks are then processes that talk over Gloo\n"
                f'  name one: --cluster "{usual}", or set comm.backend = auto'
            )
        if cluster is not None:
            cluster = over_backend(cluster, self.backend) if ranks > 1 else cluster
        cost = wire_cost(cluster, ranks, config.parallel.node_ranks if cluster is None else None)
        return VirtualTime(cost=cost, measures=self.compute == "measured", slow=self.slow, slow_links=self.slow_links)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Simulation(Shown):
    config: Config
    conditions: Conditions
    records: tuple[tuple[Record, ...], ...]
    clocks: tuple[VirtualClock, ...]
    steps: tuple[tuple[recording.StepBounds, ...], ...]
    summary: recording.SimulationSummary

    def facts(self) -> dict[str, object]:
        return self.summary.facts()

    @property
    def hosts(self) -> list[HostRecord]:
        """What drivers would read of modelled GPUs after each step: the share in which kernels computed."""
        found = []
        for row in zip(*self.steps, strict=True):
            shares = {
                f"hw.gpu.utilization/{rank}": min(1.0, step.busy_s * self.conditions.slow.get(rank, 1.0) / took_s)
                for rank, step in enumerate(row)
                if step.busy_s is not None and (took_s := step.end_s - step.start_s) > 0
            }
            found += [HostRecord(host="virtual", values=shares, time=row[0].end_s)] if shares else []
        return found

    def charts(self) -> list[str]:
        return [curve("training loss", [each.loss for each in self.records[0] if isinstance(each, StepRecord)])]


def prepare(
    config: Config,
    *,
    ranks: int | None = None,
    device: str | None = None,
    source: str = "config",
    cluster: Cluster | None = None,
) -> Config:
    """Returns the config of a run on virtual ranks. Raises ConfigError with all that this number of ranks breaks."""
    asked = config.parallel
    count = ranks if ranks is not None else (asked.ranks if isinstance(asked.ranks, int) else 4)
    if count < 1:
        raise UsageError(f"{count} ranks\n  a run has one at least\n  give ranks = 4")
    where = device or ("cpu" if asked.device == "auto" else asked.device)
    if where not in ("cpu", "cuda"):
        raise UsageError(f"device = {where}\n  virtual ranks share a CPU, or one GPU\n  take cpu or cuda")
    if where == "cuda" and not torch.cuda.is_available():
        raise UsageError("device = cuda, and there is no CUDA device here\n  virtual ranks share one\n  take cpu")
    node_ranks = asked.node_ranks
    if cluster is not None:  # ranks fill one host before the next, which may then have fewer (None)
        each = min(count, cluster.node.devices)
        if node_ranks is not None and node_ranks != each:
            raise UsageError(
                f"parallel.node_ranks = {node_ranks} on {cluster.name}\n"
                f"  {count} ranks fill hosts of {cluster.node.devices} devices, so that {each} share one\n"
                "  leave parallel.node_ranks out, or name another cluster"
            )
        needs_hosts = config.comm.algorithm == "hierarchical" or asked.strategy == "hybrid"
        node_ranks = each if count % each == 0 or needs_hosts else None
    changes = {"ranks": count, "device": where, "node_ranks": node_ranks}
    settled = config.with_values("parallel", **changes).with_values("comm", backend="virtual")
    problems = check_ranks(settled, count, node_ranks)
    if problems:
        raise ConfigError(problems, source=source)
    return settled


def simulate(
    config: Config, conditions: Conditions | None = None, *, view: Sink | None = None, watch: Watch | None = None
) -> Simulation:
    """Trains on virtual ranks, as many as the config (see ``prepare``) says, and tells what each rank's clock saw.

    Rank 0's records also go to ``view``. ``watch(rank, trainer)`` is called when training is over.
    """
    where = conditions or Conditions()
    check_conditions(config, where)
    ranks, timing = config.parallel.decided_ranks, where.timing(config)
    found: list[tuple[recording.KeptRecords, list[recording.StepBounds]]] = []
    try:
        # As many threads as a rank of a real run on this machine has: the numbers, and the times, are its own.
        with compute_threads(config.parallel.threads or max(1, len(usable_cores()) // ranks)):
            found = run_virtual(
                lambda comm: _run_rank(comm, config, where, None if comm.rank else view, watch),
                ranks,
                device=config.parallel.device,
                timeout_s=config.comm.timeout_s,
                timing=timing,
            )
    except RankFailedError as error:
        if isinstance(error.__cause__, PacelineError):
            raise error.__cause__ from error
        raise
    records, steps = [kept.records for kept, _ in found], tuple(tuple(bounds) for _, bounds in found)
    return Simulation(
        config=config,
        conditions=where,
        records=tuple(map(tuple, records)),
        clocks=tuple(timing.clocks),
        steps=steps,
        summary=recording.summarize_clocks(records, timing.clocks, steps),
    )


def check_conditions(config: Config, conditions: Conditions) -> None:
    """Raises UsageError where a config's ranks (see ``prepare``) cannot run so: before anything does."""
    if conditions.compute not in COMPUTE_KINDS:
        raise UsageError(f"compute = {conditions.compute!r}\n  it is one of {', '.join(COMPUTE_KINDS)}")
    if conditions.compute == "modelled" and config.model.compile not in (False, "none"):
        raise UsageError(
            f"model.compile = {config.model.compile} with modelled compute\n"
            "  operations inside a compiled block are not seen one by one\n"
            "  set model.compile = none, or take measured compute"
        )
    conditions.timing(config).start(config.parallel.decided_ranks, torch.device("cpu"))


def _run_rank(
    comm: VirtualCommunicator, config: Config, where: Conditions, view: Sink | None, watch: Watch | None
) -> tuple[recording.KeptRecords, list[recording.StepBounds]]:
    clock, node_ranks = comm.clock, config.parallel.node_ranks
    assert clock is not None
    hooks = [Every(config.train.eval_every, EvaluateHook())]
    trainer = build_trainer(config, comm, hooks=hooks, node_ranks=node_ranks)
    trace, plan = trainer.parts.engine.world.trace, trainer.parts.plan
    memory = plan.memory
    if where.gpu:  # what a rank needs on the GPU that it is taken to have
        need = EngineMemory.of(config, "cuda")
        memory = need.estimate(plan.layout) if need is not None and is_known(need.facts, plan.layout) else None
    assert trace is not None
    meter = recording.ClockMeter(comm.device, trace, clock, 0 if memory is None else int(memory.device_bytes))
    trainer.parts = replace(trainer.parts, meter=meter)
    device = "cpu"
    pricing: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if comm.device.type == "cuda":
        device = torch.cuda.get_device_name(comm.device)
    if where.compute == "modelled":
        rates = where.rates
        device, pricing = rates.name, PricedCompute(rates, clock.spend)
        meter.launches = rates if isinstance(rates, KernelPrices) else None
    node_ranks = node_ranks if where.cluster is None else where.cluster.node.devices
    host = "virtual-0" if node_ranks is None else f"virtual-{comm.rank // node_ranks}"
    comm.barrier()  # set-up is over everywhere: the run begins
    clock.name("set-up")
    began_s, kept = clock.take(), recording.KeptRecords(clock, view)
    with contextlib.closing(kept):
        trainer.sink = kept
        kept.write(recording.run_record(trainer, comm.rank, device, host))
        with pricing:
            trainer.run()
        clock.name("evaluation")
        seconds = clock.take() - began_s
        kept.write(EndRecord(status="done", step=trainer.step, seconds=seconds, message="", time=0.0))
    if watch is not None:
        with clock.paused():
            watch(comm.rank, trainer)
    return kept, meter.steps
