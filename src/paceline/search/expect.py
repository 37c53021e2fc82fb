"""What a run on the present machine is expected to take, from its config alone and before it starts.

GPUs are those of the catalog. A CPU rank is so many cores of the catalog's small host:

    cores of a rank = min(its threads, cores / ranks)        products run so many times as fast as on one core

One rank that has all cores was measured as such, where the entry says so: threads pay for large products alone.
Memory is told in any case: the estimate counts what records count.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.cluster.detect import Machine, alone_device, detect_cluster
from paceline.cluster.devices import Cluster, Device, load_cluster
from paceline.cluster.wires import over_backend
from paceline.config import Config
from paceline.errors import ConfigError, UsageError
from paceline.predict.memory.memory import framework_bytes, rank_estimates
from paceline.search.expectation import Expectation
from paceline.search.request import COMPUTE, task_of, workload_as_written
from paceline.search.search import rank_one


def expect_run(
    config: Config, machine: Machine, *, threads: int | None = None, hosts: int = 1, entry: Path | None = None
) -> Expectation:
    """Predicts a run whose device and ranks are settled. What cannot be priced has its reason in the place of a time.

    ``threads`` are those of a CPU rank where the config does not say; None: the cores are shared out. ``entry`` is a
    file that ``paceline calibrate`` wrote on this machine.
    """
    ranks = config.parallel.decided_ranks
    memory = expected_memory(config, hosts)
    reason, policy = unpriced(config, hosts, entry), config.comm.compression.policy
    if not reason and policy != "none":
        reason = f"comm.compression.policy = {policy} is priced kernel by kernel alone"
    if reason:
        return Expectation(ranks=ranks, memory_bytes=memory, reason=reason)
    try:
        cluster, assumed = present_cluster(config, machine, ranks, threads, entry)
        workload = workload_as_written(config, task_of(config, ranks), cluster)
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


def expected_memory(config: Config, hosts: int = 1) -> float | None:
    """Estimates what records will tell of the rank that holds most; None where that is not known beforehand.

    Virtual ranks share one process, and a microbatch that the ranks find is not known yet.
    """
    stages = () if config.comm.backend == "virtual" else rank_estimates(config, hosts)
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
