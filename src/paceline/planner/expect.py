"""What a run on the present machine is expected to take, from its config alone and before it starts.

GPUs are those of the catalog. A CPU rank is so many cores of the catalog's small host:

    cores of a rank = min(its threads, cores / ranks)        products run so many times as fast as on one core

One rank that has all cores was measured as such, where the entry says so: threads pay for large products alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.cluster.detect import Machine, alone_device, detect_cluster, gloo_link
from paceline.cluster.devices import Cluster, Device
from paceline.config import Config
from paceline.errors import ConfigError, UsageError
from paceline.estimate.memory import framework_bytes
from paceline.planner.candidates import Candidate
from paceline.planner.engine_memory import EngineMemory
from paceline.planner.expectation import Expectation
from paceline.planner.from_config import candidate_of, task_of
from paceline.planner.search import rank_one


def expect_run(
    config: Config, machine: Machine, *, threads: int | None = None, hosts: int = 1, entry: Path | None = None
) -> Expectation:
    """Predicts a run whose device and ranks are settled. What cannot be priced has its reason in the place of figures.

    ``threads`` are those of a CPU rank where the config does not say; None: the cores are shared out. ``entry`` is a
    file that ``paceline calibrate`` wrote on this machine.
    """
    ranks = config.parallel.ranks
    assert isinstance(ranks, int)
    reason = unpriced(config, hosts)
    if reason:
        return Expectation(ranks=ranks, reason=reason)
    try:
        cluster, assumed = present_cluster(config, machine, ranks, threads, entry)
        candidate = candidate_of(config, task_of(config, ranks), cluster)
        if candidate is None:
            reason = "the schedule, offload or recomputation of this config is not priced"
            return Expectation(ranks=ranks, cluster=cluster.name, assumed=assumed, reason=reason)
        return _priced(config, candidate, cluster, assumed)
    except (UsageError, ConfigError) as error:
        return Expectation(ranks=ranks, reason=str(error))


def _priced(config: Config, candidate: Candidate, cluster: Cluster, assumed: tuple[str, ...]) -> Expectation:
    """Memory is by the estimate that the engines are checked against, which counts what records count."""
    ranked = rank_one(candidate, cluster)
    need = EngineMemory.of(config, config.parallel.device)
    num_bytes = None if need is None else need(candidate)
    if num_bytes is not None and config.parallel.device == "cuda":
        num_bytes -= framework_bytes("cuda")  # records hold the allocator's bytes, which has no part in those
    low, high = ranked.prediction.band
    around = cluster.device.step_s + cluster.device.loop_s  # what formulas of kernels know nothing of
    if not cluster.device.is_cpu:
        assumed += tuple(f"outside the calibrated domain: {reason}" for reason in ranked.prediction.outside)
    return Expectation(
        ranks=candidate.layout.devices,
        cluster=cluster.name,
        plan=str(candidate),
        step_s=ranked.seconds + around,
        step_s_low=low + around,
        step_s_high=high + around,
        memory_bytes=None if num_bytes == float("inf") else num_bytes,
        fitted=ranked.prediction.fitted,
        assumed=assumed,
    )


def unpriced(config: Config, hosts: int) -> str:
    """Returns what no prediction knows of."""
    if hosts > 1:
        return f"the network between {hosts} hosts is not known"
    if config.comm.backend == "virtual":
        return "virtual ranks take turns in one process"
    if config.comm.compression.policy != "none":
        return f"comm.compression.policy = {config.comm.compression.policy} is not priced"
    if config.train.microbatch == "auto":
        return "train.microbatch = auto is decided by the ranks"
    return ""


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
        is_known = alone is not None and alone.sm_count == cores
        if alone is not None and is_known:
            node = replace(node, device=replace(alone, memory_bytes=node.device.memory_bytes * machine.cores))
        else:
            node = replace(node, device=_with_cores(node.device, cores))
        if config.comm.backend == "gloo":
            node = replace(node, inside=gloo_link(entry))
        if cores != 1 and not is_known:
            assumed = (*assumed, f"a rank with {cores:g} cores computes {cores:g} times as fast as with one")
    cluster = Cluster(name=f"{ranks}x {node.device.name}", node=node, nodes=1, between=None)
    return cluster, assumed


def _with_cores(device: Device, cores: float) -> Device:
    """Returns a core's device as so many. The memory is shared, and the host launches one kernel after another."""
    share = min(1.0, cores)  # of a core that several ranks take turns on
    return replace(
        device,
        peak_flops={dtype: rate * cores for dtype, rate in device.peak_flops.items()},
        matmul_ceiling={dtype: rate * cores for dtype, rate in device.matmul_ceiling.items()},
        shapes=tuple(replace(each, flops=each.flops * cores) for each in device.shapes),
        memory_bandwidth=device.memory_bandwidth * share,
        memory_rates={
            family: tuple((size, rate * share) for size, rate in points)
            for family, points in device.memory_rates.items()
        },
        operation_s=None if device.operation_s is None else device.operation_s / share,
        tensor_s=device.tensor_s / share,
        step_s=device.step_s / share,
        loop_s=device.loop_s / share,
        launch_s=device.launch_s / share,
        compiled_launch_s=device.compiled_launch_s / share,
    )
