"""A training on virtual ranks with clocks: real losses, and the times of the machine that was asked for.

    found = simulate(prepare(config, ranks=4), Conditions(cluster=load_cluster("4x a100-sxm")))
    found.records[0]        what rank 0 of a real run would have written
    found.summary           steps, throughput, exposed and hidden communication, idle time

One step is the step of ``paceline train``: the same code, on the same engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch

from paceline.cluster.detect import usable_cores
from paceline.cluster.devices import Cluster
from paceline.cluster.wires import WireCost, over_backend, wire_cost
from paceline.comm.virtual.clock import VirtualClock, VirtualTime
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import Config, check_ranks
from paceline.errors import ConfigError, PacelineError, RankFailedError, UsageError
from paceline.notebook import Shown, curve
from paceline.plan.plan import MemoryEstimate, Plan
from paceline.predict.memory.memory import EngineMemory, is_known
from paceline.records.records import EndRecord, HostRecord, Record, StepRecord
from paceline.records.sinks import Fanout, Sink
from paceline.rehearse.simulate.prices import KernelPrices, PricedCompute, Rates
from paceline.rehearse.simulate.recording import ClockMeter, ClockSink, Memory, StepBounds, run_record
from paceline.rehearse.simulate.summary import SimulationSummary, summarize_clocks
from paceline.train.assemble import build_trainer
from paceline.train.hooks import EvaluateHook, Every
from paceline.train.randomness import compute_threads
from paceline.train.trainer import Trainer

ComputeKind: TypeAlias = Literal["measured", "modelled"]
COMPUTE_KINDS: tuple[ComputeKind, ...] = ("measured", "modelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Where a simulated run takes place.

    ``cluster`` is whose wires the ranks talk over; None: processes of one host. ``compute`` is measured here, or
    modelled for the cluster's device (without a cluster: for one core), which gives the same times on every machine.
    ``slow`` multiplies the compute of ranks, ``slow_links`` the cost of operations that ranks take part in. ``backend``
    is what the ranks would talk through there: a config's ``comm.backend``, before ``prepare`` makes it virtual.
    """

    cluster: Cluster | None = None
    backend: str = "auto"
    compute: ComputeKind = "measured"
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)

    @property
    def rates(self) -> Rates | KernelPrices:
        """The rates that modelled compute is priced by."""
        return Rates() if self.cluster is None else KernelPrices(self.cluster.device)

    @property
    def gpu(self) -> str:
        """The GPU that ranks are taken to have; empty where they have none."""
        return "" if self.cluster is None or self.cluster.device.is_cpu else self.cluster.device.name

    def wire_cost(self, ranks: int, node_ranks: int | None) -> WireCost:
        """Returns what operations between ranks cost. Raises UsageError for a backend that cannot be priced."""
        if self.cluster is not None:
            cluster = over_backend(self.cluster, self.backend) if ranks > 1 else self.cluster
            return wire_cost(cluster, ranks)
        if self.backend in ("nccl", "shared_memory"):
            usual = f"{ranks}x {'h100-sxm' if self.backend == 'nccl' else 'cpu-host'}"
            raise UsageError(
                f"comm.backend = {self.backend} without a cluster\n  ranks are then processes that talk over Gloo\n"
                f'  name one: --cluster "{usual}", or set comm.backend = auto'
            )
        return wire_cost(None, ranks, node_ranks)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Simulation(Shown):
    """What a simulated run did: records, clocks and the bounds of steps, by rank."""

    config: Config
    conditions: Conditions
    records: tuple[tuple[Record, ...], ...]
    clocks: tuple[VirtualClock, ...]
    steps: tuple[tuple[StepBounds, ...], ...]
    summary: SimulationSummary

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
    """Returns the config of a run on virtual ranks. Raises ConfigError with all that this number of ranks breaks.

    ``source`` is what messages call the config: the name of its file. On a ``cluster`` the ranks share its hosts out.
    """
    asked = config.parallel
    count = ranks if ranks is not None else (asked.ranks if isinstance(asked.ranks, int) else 4)
    if count < 1:
        raise UsageError(f"{count} ranks\n  a run has one at least\n  give ranks = 4")
    where = device or ("cpu" if asked.device == "auto" else asked.device)
    if where not in ("cpu", "cuda"):
        raise UsageError(f"device = {where}\n  virtual ranks share a CPU, or one GPU\n  take cpu or cuda")
    if where == "cuda" and not torch.cuda.is_available():
        raise UsageError("device = cuda, and there is no CUDA device here\n  virtual ranks share one\n  take cpu")
    node_ranks = asked.node_ranks if cluster is None else _node_ranks(config, count, cluster)
    changes = {"ranks": count, "device": where, "node_ranks": node_ranks}
    settled = config.with_values("parallel", **changes).with_values("comm", backend="virtual")
    problems = check_ranks(settled, count, node_ranks)
    if problems:
        raise ConfigError(problems, source=source)
    return settled


def _node_ranks(config: Config, ranks: int, cluster: Cluster) -> int | None:
    """Returns how many ranks a host of the cluster has: they fill one before the next, and then may differ (None)."""
    each, asked = min(ranks, cluster.node.devices), config.parallel.node_ranks
    if asked is not None and asked != each:
        raise UsageError(
            f"parallel.node_ranks = {asked} on {cluster.name}\n"
            f"  {ranks} ranks fill hosts of {cluster.node.devices} devices, so that {each} share one\n"
            "  leave parallel.node_ranks out, or name another cluster"
        )
    needs_hosts = config.comm.algorithm == "hierarchical" or config.parallel.strategy == "hybrid"
    return each if ranks % each == 0 or needs_hosts else None


def simulate(
    config: Config,
    conditions: Conditions | None = None,
    *,
    view: Sink | None = None,
    watch: Callable[[int, Trainer], None] | None = None,
) -> Simulation:
    """Trains on virtual ranks, as many as the config (see ``prepare``) says, and tells what each rank's clock saw.

    Rank 0's records also go to ``view``, as they come. ``watch(rank, trainer)`` is called on each rank when its
    training is over. Raises what a rank raised.
    """
    where = conditions or Conditions()
    check_conditions(config, where)
    ranks, timing = _timing(config, where)
    places = [_SimulatedRank(config, where, rank, view if rank == 0 else None) for rank in range(ranks)]
    try:
        # As many threads as a rank of a real run on this machine has: the numbers, and the times, are its own.
        with compute_threads(config.parallel.threads or max(1, len(usable_cores()) // ranks)):
            run_virtual(
                lambda comm: places[comm.rank].run(comm, watch),
                ranks,
                device=config.parallel.device,
                timeout_s=config.comm.timeout_s,
                timing=timing,
            )
    except RankFailedError as error:
        if isinstance(error.__cause__, PacelineError):
            raise error.__cause__ from error
        raise
    steps = tuple(tuple(place.steps) for place in places)
    return Simulation(
        config=config,
        conditions=where,
        records=tuple(tuple(place.kept.records) for place in places),
        clocks=tuple(timing.clocks),
        steps=steps,
        summary=summarize_clocks([place.kept.records for place in places], timing.clocks, steps),
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
    ranks, timing = _timing(config, conditions)
    timing.start(ranks, torch.device("cpu"))


def _timing(config: Config, conditions: Conditions) -> tuple[int, VirtualTime]:
    """Returns the number of ranks, and the settings of their clocks."""
    ranks = config.parallel.decided_ranks
    return ranks, VirtualTime(
        cost=conditions.wire_cost(ranks, config.parallel.node_ranks),
        measures=conditions.compute == "measured",
        slow=conditions.slow,
        slow_links=conditions.slow_links,
    )


class _SimulatedRank:
    """One rank's part in a simulated run."""

    def __init__(self, config: Config, conditions: Conditions, rank: int, view: Sink | None) -> None:
        self.kept = Memory()
        self.steps: Sequence[StepBounds] = ()
        self._config = config
        self._conditions = conditions
        self._rank = rank
        self._view = view

    def run(self, comm: VirtualCommunicator, watch: Callable[[int, Trainer], None] | None) -> None:
        """Trains this rank's share and writes its records."""
        clock = comm.clock
        assert clock is not None
        config = self._config
        hooks = [Every(config.train.eval_every, EvaluateHook())]
        trainer = build_trainer(config, comm, hooks=hooks, node_ranks=config.parallel.node_ranks)
        meter = self._put_on_clock(trainer, comm, clock)
        comm.barrier()  # set-up is over everywhere: the run begins
        clock.name("set-up")
        began_s = clock.take()
        sinks: list[Sink] = [self.kept] if self._view is None else [self.kept, self._view]
        with contextlib.closing(ClockSink(Fanout(sinks), clock)) as trainer.sink:
            assert trainer.sink is not None
            trainer.sink.write(run_record(trainer, self._rank, self._device(comm), self._host()))
            with self._pricing(clock, meter):
                trainer.run()
            clock.name("evaluation")
            seconds = clock.take() - began_s
            trainer.sink.write(EndRecord(status="done", step=trainer.step, seconds=seconds, message="", time=0.0))
        self.steps = meter.steps
        if watch is not None:
            with clock.paused():
                watch(self._rank, trainer)

    def _put_on_clock(self, trainer: Trainer, comm: VirtualCommunicator, clock: VirtualClock) -> ClockMeter:
        trace = trainer.parts.engine.world.trace
        assert trace is not None
        memory = self._memory(trainer.parts.plan)
        meter = ClockMeter(comm.device, trace, clock, 0 if memory is None else int(memory.device_bytes))
        trainer.parts = replace(trainer.parts, meter=meter)
        return meter

    def _memory(self, plan: Plan) -> MemoryEstimate | None:
        """Returns the estimate of a rank: on the GPU that it is taken to have, where that is another device."""
        if not self._conditions.gpu:
            return plan.memory
        need = EngineMemory.of(self._config, "cuda")
        return need.estimate(plan.layout) if need is not None and is_known(need.facts, plan.layout) else None

    def _pricing(self, clock: VirtualClock, meter: ClockMeter) -> contextlib.AbstractContextManager[object]:
        if self._conditions.compute == "measured":
            return contextlib.nullcontext()
        rates = self._conditions.rates
        meter.launches = rates if isinstance(rates, KernelPrices) else None
        return PricedCompute(rates, clock.spend)

    def _device(self, comm: VirtualCommunicator) -> str:
        if self._conditions.compute == "modelled":
            return self._conditions.rates.name
        return torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "cpu"

    def _host(self) -> str:
        cluster = self._conditions.cluster
        node_ranks = self._config.parallel.node_ranks if cluster is None else cluster.node.devices
        return "virtual-0" if node_ranks is None else f"virtual-{self._rank // node_ranks}"
