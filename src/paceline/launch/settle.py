"""The plan of a run for machines that are elsewhere, so that one that cannot run there is refused before it is queued.

ranks    nodes x GPUs of a node; without GPUs, those of the config shared out, or two a node
memory   what a rank needs on its GPU, or all ranks of a host, by estimate, beside what the target says there is
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.detect import Machine
from paceline.config import Config, check_hosts, with_precision
from paceline.errors import ConfigError, Problem, UsageError
from paceline.launch.target import TargetMachines
from paceline.plan.plan import RunMachine
from paceline.predict.memory.activations import describe_model
from paceline.search.automatic import apply_choice, choose
from paceline.search.make_plan import make_plan
from paceline.search.memory_verdict import MemoryVerdict, needed
from paceline.units import format_bytes

CPU_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledRun:
    """What was decided for the target's machines: overrides of the config that say so, and lines that tell it."""

    overrides: tuple[str, ...]
    lines: tuple[str, ...]


def ranks_of_node(config: Config, nodes: int, gpus: int) -> int:
    """Returns the ranks of each node. Raises ConfigError where the config asks for other ranks than there would be."""
    asked, each = config.parallel.ranks, gpus or config.parallel.node_ranks
    if isinstance(asked, int):
        each = each or asked // nodes
        if each * nodes != asked:
            given = f"{nodes} node{'s' if nodes > 1 else ''}" + (f" with {gpus} GPUs each" if gpus else "")
            raise ConfigError(
                [
                    Problem(
                        what=f"parallel.ranks = {asked} on {given}",
                        rule="every node has as many ranks as the others, and a rank a GPU of its own",
                        fix=f"set parallel.ranks = auto, or {max(1, each) * nodes}",
                    )
                ],
                source="launch",
            )
    return each or CPU_RANKS


def settle(config: Config, machines: TargetMachines, *, least: int, nodes: int, gpus: int) -> SettledRun:
    """Makes the plan for the target's machines. Raises ConfigError or UsageError for a run that cannot be there."""
    each = ranks_of_node(config, nodes, gpus)
    device = "cuda" if gpus else "cpu"
    if config.parallel.device not in ("auto", device):
        problem = Problem(
            what=f"parallel.device = {config.parallel.device}, and --gpus-per-node is {gpus}",
            rule="ranks on GPUs need as many of them on each node; ranks on CPUs need none",
            fix="give --gpus-per-node" if device == "cpu" else "leave --gpus-per-node out",
        )
        raise ConfigError([problem], source="launch")
    if config.comm.backend == "virtual":
        raise UsageError("comm.backend = virtual\n  virtual ranks take turns in one process\n  use paceline train")
    ranks = each * nodes
    spread = with_precision(config.with_values("parallel", device=device, ranks=ranks), device)
    if found := check_hosts(spread, each, range(least, nodes + 1)):
        raise ConfigError(found, source="launch")
    keys = [f"parallel.device={device}", f"parallel.ranks={ranks}"]
    what = f"{ranks} rank{'s' if ranks > 1 else ''} on {'GPUs' if gpus else 'CPUs'}, {each} on each of {nodes} nodes"
    chosen, lines = _with_memory(spread, machines, each), [what if nodes > 1 else what.partition(",")[0]]
    plan = make_plan(chosen, RunMachine(device=device, ranks=ranks, node_ranks=each)) if _is_decided(chosen) else None
    lines[0] += f": {chosen.parallel.strategy}" + (f", microbatch {plan.layout.microbatch}" if plan else "")
    return SettledRun(overrides=tuple(keys), lines=(*lines, _memory_line(chosen, machines, each), *machines.notes))


def _is_decided(config: Config) -> bool:
    return "auto" not in (config.parallel.strategy, config.train.microbatch)


def _with_memory(config: Config, machines: TargetMachines, each: int) -> Config:
    """Returns the config with the strategy that fits, where it is left open. Raises where nothing does."""
    where = _ranks_with_memory(config, machines, each)
    if where is None:
        return config
    if config.parallel.strategy == "auto":
        model = describe_model(config, where.device)
        known = Machine(processor="", cores=each, memory_bytes=float(where.host_bytes))
        return config if model is None else apply_choice(config, choose(config, model, where, known))
    verdict = _verdict(config, machines, each)
    if verdict is not None and verdict.kind == "too large":
        raise UsageError(
            f"out of memory: {verdict}\n  a run that does not fit is not queued\n  paceline plan CONFIG --cluster NAME "
            "finds what fits; parallel.strategy=auto takes it; to start it all the same: --no-memory-check"
        )
    return config


def _ranks_with_memory(config: Config, machines: TargetMachines, each: int) -> RunMachine | None:
    device, host = config.parallel.device, machines.host_bytes
    memory = machines.device_bytes if device == "cuda" else None if host is None else host / each
    if memory is None:
        return None
    ranks = config.parallel.decided_ranks
    return RunMachine(
        device=device, device_bytes=int(memory), host_bytes=int(host or 2**60), ranks=ranks, node_ranks=each
    )


def _verdict(config: Config, machines: TargetMachines, each: int) -> MemoryVerdict | None:
    need = needed(config, node_ranks=each)
    has = machines.device_bytes if config.parallel.device == "cuda" else machines.host_bytes
    if need is None or has is None:
        return None
    where = f"a GPU of {machines.where}" if config.parallel.device == "cuda" else machines.where
    return MemoryVerdict(need=need, where=where, has_bytes=has, free_bytes=has)


def _memory_line(config: Config, machines: TargetMachines, each: int) -> str:
    verdict = _verdict(config, machines, each)
    if verdict is not None:
        return f"memory: {verdict}"
    need = needed(config, node_ranks=each)
    if need is None:
        return "memory: not known before the run (a model of your own code, or a microbatch that ranks find)"
    return f"memory: {need.who} {format_bytes(need.total)} by estimate; what {machines.where} has is not known"
