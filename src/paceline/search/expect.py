"""What a run on the present machine is expected to take, and whether it has room, before it starts.

GPUs are those of the catalog. A CPU rank is so many cores of the catalog's small host:

    cores of a rank = min(its threads, cores / ranks)        products run so many times as fast as on one core

One rank that has all cores was measured as such, where the entry says so: threads pay for large products alone.
What it needs of memory by the estimate, which counts what records count, and what there is:

    GPUs            what the rank that holds most takes           the memory of the smallest GPU
    CPU ranks       what all of them hold; torch counts once      the host's memory, or the limit of its container
    virtual ranks   states of all, and the activations of one     that of the one GPU, or of the host

What is above the limit cannot run, and what is near it may. What ranks offload must have room on their host as well:
bytes of a rank there x ranks of the host <= what is free.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

from paceline.cluster.detect import Machine, alone_device, detect_cluster
from paceline.cluster.devices import Cluster, Device, load_cluster
from paceline.cluster.wires import over_backend
from paceline.config import Config, config_from_dict, layout_of
from paceline.errors import ConfigError, Problem, UsageError
from paceline.plan.plan import MARGIN, MemoryEstimate
from paceline.plan.workload import config_values, layout_text
from paceline.predict.formulas.step import Prediction
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory, framework_bytes, is_known, rank_estimates
from paceline.search.expectation import Expectation
from paceline.search.request import COMPUTE, planned_values, request_for, task_of, workload_as_written
from paceline.search.result import plan_for
from paceline.search.search import Change, rank_one
from paceline.units import format_bytes


def expect_run(
    config: Config,
    machine: Machine,
    *,
    threads: int | None = None,
    hosts: int = 1,
    entry: Path | None = None,
    facts: ModelFacts | None = None,
) -> Expectation:
    """Predicts a run whose device and ranks are settled. What cannot be priced has its reason in the place of a time.

    ``threads`` of a CPU rank; None: the cores are shared out. ``entry``: a file that ``paceline calibrate`` wrote here.
    ``facts``: of a model that the config does not tell.
    """
    ranks = config.parallel.decided_ranks
    memory = expected_memory(config, hosts, facts)
    reason, policy = unpriced(config, hosts, entry), config.comm.compression.policy
    if not reason and policy != "none":
        reason = f"comm.compression.policy = {policy} is priced kernel by kernel alone"
    if reason:
        return Expectation(ranks=ranks, memory_bytes=memory, reason=reason)
    try:
        cluster, assumed = present_cluster(config, machine, ranks, threads, entry)
        workload = workload_as_written(config, task_of(config, ranks, facts=facts), cluster)
        if workload is None:
            reason = "the schedule or recomputation of this config is priced kernel by kernel alone"
            return Expectation(ranks=ranks, cluster=cluster.name, memory_bytes=memory, assumed=assumed, reason=reason)
        if config.comm.algorithm != "native" and ranks > 1:
            assumed += (f"comm.algorithm = {config.comm.algorithm} is as fast as native",)
        ranked = rank_one(workload, cluster)
    except (UsageError, ConfigError) as error:
        return Expectation(ranks=ranks, memory_bytes=memory, reason=str(error))
    low, high = ranked.band
    around = cluster.device.step_s + cluster.device.loop_s  # what formulas of kernels know nothing of
    if not cluster.device.is_cpu:
        assumed += tuple(f"outside the calibrated domain: {reason}" for reason in ranked.outside)
    return Expectation(
        ranks=ranked.layout.ranks,
        cluster=cluster.name,
        plan=str(ranked),
        step_s=ranked.seconds + around,
        step_s_low=low + around,
        step_s_high=high + around,
        memory_bytes=memory,
        fitted=ranked.fitted,
        assumed=assumed,
    )


def expected_memory(config: Config, hosts: int = 1, facts: ModelFacts | None = None) -> float | None:
    """Estimates what records will tell of the rank that holds most; None where that is not known beforehand."""
    stages = () if config.comm.backend == "virtual" else rank_estimates(config, hosts, facts)
    if not stages:
        return None
    # Of a GPU, records hold the allocator's bytes, which has no part in the framework's.
    outside = framework_bytes("cuda") if config.parallel.device == "cuda" else 0
    return float(max(each.device_bytes for each in stages) - outside)


def unpriced(config: Config, hosts: int, entry: Path | None = None) -> str:
    """Returns what no prediction knows of, by formulas or kernel by kernel; ``entry`` as for ``expect_run``."""
    if hosts > 1:
        return f"the network between {hosts} hosts is not known"
    if config.comm.backend == "virtual":
        return "virtual ranks take turns in one process"
    if config.comm.compression.policy == "threshold":
        return "comm.compression.policy = threshold: how much it sends follows from values, which no prediction has"
    if config.train.microbatch == "auto":
        return "train.microbatch = auto is decided by the ranks"
    if (config.parallel.device, config.comm.backend) == ("cuda", "gloo") and config.parallel.decided_ranks > 1:
        return "comm.backend = gloo between GPUs was not measured"
    precision = config.train.precision_on(config.parallel.device)
    if config.parallel.device != "cpu" or precision == "fp32":
        return ""
    if entry is None:
        return (
            f"train.precision = {precision} is as fast as fp32 on one processor and 300 times as slow on another, and "
            "this one was not measured: paceline calibrate --output mine.yaml, then PACELINE_MACHINE=mine.yaml"
        )
    try:
        check_measured(precision, load_cluster(str(entry)).device)
    except UsageError as error:
        return error.headline
    return ""


def check_measured(precision: str, device: Device) -> None:
    """Raises UsageError where a CPU was not measured in what a precision computes in: each emulates that in its way."""
    if device.is_cpu and COMPUTE[precision] not in device.peak_flops:
        raise UsageError(
            f"train.precision = {precision} on {device.name}, which was measured in {' and '.join(device.peak_flops)}\n"
            "  how fast a CPU computes in another dtype depends on the processor\n  set train.precision = fp32"
        )


def present_cluster(
    config: Config, machine: Machine, ranks: int, threads: int | None, entry: Path | None = None
) -> tuple[Cluster, tuple[str, ...]]:
    """Returns the present machine with a device for each rank. Raises UsageError where it is not known."""
    on_cpu = config.parallel.device == "cpu"
    found = detect_cluster(replace(machine, gpus=(), gpu_memory_bytes=()) if on_cpu else machine, entry)
    if found.cluster is None:
        raise UsageError(found.assumed[0])
    if not on_cpu and len(set(machine.gpus)) != 1:
        names = ", ".join(sorted(set(machine.gpus)))
        raise UsageError(f"GPUs of several kinds: {names}" if names else "nvidia-smi tells of no GPU")
    node, assumed = replace(found.cluster.node, devices=ranks), found.assumed
    if on_cpu:
        cores = min(config.parallel.threads or threads or max(1, machine.cores // ranks), machine.cores / ranks)
        alone = alone_device(entry) if ranks == 1 and cores > 1 else None
        is_measured = alone is not None and COMPUTE[config.train.precision_on("cpu")] in alone.peak_flops
        if alone is not None and is_measured and alone.sm_count == cores:
            node = replace(node, device=replace(alone, memory_bytes=node.device.memory_bytes * machine.cores))
        else:
            node = replace(node, device=_with_cores(node.device, cores))
            if cores != 1:
                assumed += (f"a rank with {cores:g} cores computes {cores:g} times as fast as with one",)
        if cores < 1:
            assumed += (f"{ranks} ranks take turns on {machine.cores} cores: messages wait for turns, unpriced",)
    cluster = Cluster(name=f"{ranks}x {entry or node.device.name}", node=node, nodes=1, between=None)
    return over_backend(cluster, config.comm.backend) if on_cpu and ranks > 1 else cluster, assumed


def _with_cores(device: Device, cores: float) -> Device:
    """Returns a core's device as so many. The memory is shared, and the host launches one kernel after another."""
    share = min(1.0, cores)  # of a core that several ranks take turns on
    times = ("tensor_s", "step_s", "loop_s", "launch_s", "compiled_launch_s", "operation_s")
    known = {name: getattr(device, name) for name in times if getattr(device, name) is not None}
    rates = device.memory_rates.items()
    return replace(
        device,
        peak_flops={dtype: rate * cores for dtype, rate in device.peak_flops.items()},
        matmul_ceiling={dtype: rate * cores for dtype, rate in device.matmul_ceiling.items()},
        shapes=tuple(replace(each, flops=each.flops * cores) for each in device.shapes),
        memory_bandwidth=device.memory_bandwidth * share,
        kernels=device.kernels if cores == 1 else {},  # timed on one core
        memory_rates={family: tuple((size, rate * share) for size, rate in points) for family, points in rates},
        **{name: seconds / share for name, seconds in known.items()},
    )


NEAR = 1 - MARGIN  # of the memory there is
_TOLD = 3  # categories, the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    who: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """What is needed beside what there is: ``has_bytes`` of ``where``, of which ``free_bytes`` are free now."""

    need: MemoryNeed
    where: str
    has_bytes: float
    free_bytes: float

    @property
    def kind(self) -> Literal["fits", "near", "too large"]:
        """Memory that others hold may come back: only what there is in all refuses."""
        if self.need.total > self.has_bytes:
            return "too large"
        return "fits" if self.need.total <= min(NEAR * self.has_bytes, self.free_bytes) else "near"

    def __str__(self) -> str:
        has, ordered = format_bytes(self.has_bytes), sorted(self.need.parts.items(), key=lambda item: -item[1])
        largest = ", ".join(f"{name} {format_bytes(value)}" for name, value in ordered[:_TOLD] if value)
        free = f", of which {format_bytes(self.free_bytes)} are free" if self.free_bytes < NEAR * self.has_bytes else ""
        return (
            f"{self.need.who} {format_bytes(self.need.total)} of memory by estimate ({largest}), and "
            f"{self.where} has {has}{free}"
        )


def needed(config: Config, *, node_ranks: int | None = None, in_turns: bool = False) -> MemoryNeed | None:
    """Returns what the ranks of one host need of the memory that they share; None where that is not known.

    A GPU is not shared: of several, the one that needs most counts. ``node_ranks`` of the ranks are on a host; None:
    all of them. ``in_turns``: the least that virtual ranks need, all of them in one process.
    """
    if config.comm.backend == "virtual" and not in_turns:
        return None
    ranks = node_ranks or config.parallel.decided_ranks
    stages = rank_estimates(config, config.parallel.decided_ranks // ranks)
    if not stages:
        return None
    name = "virtual rank" if in_turns else "rank"
    who = f"1 {name} needs" if ranks == 1 else f"{ranks} {name}s need"
    if config.parallel.device == "cuda" and not in_turns:
        stages, ranks, who = (max(stages, key=lambda each: each.device_bytes),), 1, "a rank needs"
    names = [field.name for field in fields(MemoryEstimate) if field.name != "host"]
    # As many ranks of each stage; the framework is there once.
    parts = {name: ranks * sum(getattr(each, name) for each in stages) // len(stages) for name in names}
    parts["framework"] = int(stages[0].framework)
    if in_turns:
        largest = max(stages, key=lambda each: each.activations + each.temporary)  # of the one whose turn it is
        parts |= {"activations": int(largest.activations), "temporary": int(largest.temporary)}
    return MemoryNeed(who=who, parts=parts)


def host_problems(config: Config, *, node_ranks: int, free_bytes: int) -> list[Problem]:
    """Lists why a host cannot hold what is offloaded, for a config whose device, ranks and strategy are settled."""
    offload = config.memory.offload
    if not offload or config.parallel.device != "cuda":
        return []
    model, layout = describe_model(config, "cuda"), layout_of(config, config.parallel.decided_ranks, node_ranks)
    if model is None or not is_known(model, layout):
        return []
    own = estimate_memory(model, layout, StateFacts.of(config, "cuda")).host
    if own * node_ranks <= free_bytes:
        return []
    needed, each = format_bytes(own * node_ranks), format_bytes(own)
    count = "1 rank keeps" if node_ranks == 1 else f"{node_ranks} ranks keep"
    problem = Problem(
        what=f"memory.offload = [{', '.join(offload)}]: {count} {needed} on this host ({each} each), "
        f"and {format_bytes(free_bytes)} are free",
        rule="ranks share the memory of their host, and what is offloaded stays there for the whole run",
        fix="spread the ranks over more hosts, offload less, or remove memory.offload and set "
        "parallel.strategy = auto, which takes what fits",
    )
    return [problem]


def ways_out(config: Config, verdict: MemoryVerdict, machine: Machine, entry: Path | None = None) -> list[str]:
    """Returns the smallest changes that make a run fit, the fastest first; else what comes nearest, or why not."""
    is_gpu = config.parallel.device == "cuda"
    try:
        cluster, _ = present_cluster(config, machine, config.parallel.decided_ranks, None, entry)
        share = verdict.has_bytes / (1 if is_gpu else cluster.devices)  # which CPU ranks have of one memory
        node = replace(cluster.node, device=replace(cluster.device, memory_bytes=share))
        cluster = replace(cluster, node=node)
        request = request_for(config, cluster)
        if is_gpu:
            request = replace(request, host_memory=machine.memory_bytes)
        found = plan_for(request)
    except (UsageError, ConfigError) as error:
        return [
            f"which changes fit is not known: {error.headline}",
            "parallel.strategy=auto takes the first way that fits, where one does",
        ]
    winner, changes = found.winner, list(found.changes)
    if winner is not None and not changes:  # the config is not priced as it is written: its first plan
        settings = config_values(winner.layout, names_precision=winner.workload.run.names_precision)
        written = {key: attrgetter(key)(found.request.config) for key in settings}
        changes = [Change(keys={key: to for key, to in settings.items() if written[key] != to}, ranked=winner)]

    def is_enough(ranked: Prediction) -> bool:
        """Whether the changed config fits by the estimate that has refused this one, which counts all that it says."""
        try:
            changed = config_from_dict(planned_values(config, ranked.workload, cluster), "plan")
        except ConfigError:
            return False
        need = needed(changed.with_values("parallel", device=config.parallel.device))
        return need is not None and need.total <= verdict.has_bytes

    fitting = [each for each in changes if winner and each.ranked and is_enough(each.ranked)]
    fitting.sort(key=lambda each: each.seconds)
    if fitting:
        return [f"fits with {each}" for each in fitting]
    lines = [f"would fit with {each}" for each in changes if winner is None]
    if found.found.nearest is not None:
        nearest = found.found.nearest
        lines.insert(
            0,
            f"nothing fits here: of {found.found.looked_at} ways to train it "
            f"{layout_text(nearest.layout)} needs least, {format_bytes(nearest.memory_bytes)} of a rank",
        )
    return [*lines, "take a smaller model or context, or look for another machine: paceline plan CONFIG --cluster NAME"]
