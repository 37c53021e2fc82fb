"""What is decided before ranks start: device, number of ranks and strategy, and whether this host has the memory.

    decide_run(config)                                     ranks of this machine, which are to be started
    decide_run(config, Participants(hosts=range(1, 5)))    ranks of one to four hosts like this one
    decide_run(config, Participants(comm=comm))            ranks that another launcher has started and connected

Raises ConfigError with all problems at once for what does not fit together, UsageError for what memory cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from paceline import free_memory
from paceline.cluster import detect
from paceline.cluster.detect import Machine
from paceline.comm.base import Communicator
from paceline.config import Config, check_hosts, check_ranks, why_not_sharded, with_precision
from paceline.engines import precision
from paceline.errors import ConfigError, Problem, UsageError
from paceline.plan.plan import Plan, RunMachine
from paceline.run.console import say
from paceline.run.prediction import entry_problem, machine_entry
from paceline.run.rank_process import node_ranks
from paceline.run.warm import CPU_RANKS
from paceline.search.expect import MemoryNeed, MemoryVerdict, host_problems, needed, ways_out
from paceline.search.make_plan import make_plan
from paceline.train.resolve import resolve_strategy, resolve_together

if TYPE_CHECKING:
    from paceline.search.automatic import Choice

_ANYWAY = "to start it all the same: --no-memory-check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Participants:
    """Who takes part in a run; by default the ranks of this machine, which are still to be started.

    ``hosts`` are the numbers of hosts that the run must work on, and ``host_ranks`` the ranks of this one; None: one
    per GPU. ``comm`` connects ranks that a launcher has started, on a ``machine`` of which they may see a part.
    """

    hosts: range | None = None
    host_ranks: int | None = None
    comm: Communicator | None = None
    machine: Machine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided before ranks start: the plan, the config without what it left open, and why if it was chosen.

    ``notes``: what else was decided, a line for each.
    """

    plan: Plan
    config: Config
    choice: Choice | None = None
    notes: tuple[str, ...] = ()


def decide_run(asked: Config, participants: Participants | None = None, *, checks_memory: bool = True) -> Decision:
    """Decides device, ranks and strategy, and makes the plan of a run.

    ``checks_memory``: raises UsageError for a run of this host that is estimated to need more memory than there is.
    """
    who = participants or Participants()
    if who.comm is not None:
        here = node_ranks(asked)
        _refuse(check_ranks(asked, who.comm.size, here))
        config = asked.with_values("parallel", device=who.comm.device.type, ranks=who.comm.size)
        is_alone = here in (None, who.comm.size)
    elif who.hosts is not None:
        config, here = _spread_over_hosts(asked, who.hosts, who.host_ranks)
        is_alone = False  # of several hosts, each has memory of its own
    else:
        config, here, is_alone = resolve_config(asked), None, True
    config = decide_precision(config)
    choice: Choice | None = None
    if config.parallel.strategy == "auto":
        if who.comm is None:
            config, choice = decide_strategy(config)
        else:
            config, choice = resolve_together(config, who.comm, here, who.machine)
    check_host(config, here)
    if checks_memory and is_alone and choice is None:  # what was chosen was chosen because it fits
        check_memory(config, is_told=who.comm is None or who.comm.rank == 0)
    machine = RunMachine(device=config.parallel.device, ranks=config.parallel.decided_ranks, node_ranks=here)
    plan, notes = make_plan(config, machine), [*precision_notes(asked, config)]
    if alone := why_not_sharded(config, machine.ranks):
        notes.append(alone)
    return Decision(plan=plan, config=config, choice=choice, notes=tuple(notes))


def resolve_config(config: Config) -> Config:
    """Decides device and ranks by what this machine has. Raises ConfigError if they do not fit."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = config.parallel.device if config.parallel.device != "auto" else ("cuda" if num_gpus else "cpu")
    ranks = config.parallel.ranks if config.parallel.ranks != "auto" else (num_gpus if device == "cuda" else CPU_RANKS)
    problems: list[Problem] = []
    if device == "cpu":  # GPUs are asked by the ranks that own them
        name = config.train.precision_on(device)
        found = precision.precision_problem(precision.precision_named(name), torch.device("cpu"))
        problems = [] if found is None else [replace(found, what=f"train.precision = {name}: {found.what}")]
    if device == "cuda" and num_gpus == 0:
        problems.append(
            Problem(
                what="parallel.device = cuda, and torch reaches no GPU here",
                rule="every rank needs a GPU of its own; virtual ranks share one",
                fix="set parallel.device = cpu; paceline doctor tells what is missing",
            )
        )
    elif device == "cuda" and ranks > num_gpus and config.comm.backend != "virtual":
        problems.append(
            Problem(
                what=f"parallel.ranks = {ranks} on {num_gpus} GPUs",
                rule="every rank needs a GPU of its own",
                fix=f"set parallel.ranks = {num_gpus}, or parallel.device = cpu",
            )
        )
    else:
        problems += check_ranks(config, ranks)
    _refuse(problems)
    return decide_precision(config.with_values("parallel", device=device, ranks=ranks))


def decide_precision(config: Config) -> Config:
    """Decides ``train.precision: auto`` of a config whose device is decided, by what that computes in."""
    return with_precision(config, config.parallel.device, has_bf16=_has_bf16(config.parallel.device))


def precision_notes(asked: Config, decided: Config) -> Iterator[str]:
    """Yields which precision was taken and why, unless it was asked for, or is what CPU ranks always have."""
    train, device = asked.train, decided.parallel.device
    if train.precision == "auto" and (device == "cuda" or "precision" in train.model_fields_set):
        reason = train.precision_reason(device, has_bf16=_has_bf16(device))
        yield f"train.precision = auto takes {decided.train.precision_on(device)}: {reason}"
    if device == "cpu" and train.precision in ("bf16", "bf16_master") and not detect.bf16_instructions():
        yield f"train.precision = {train.precision}: this CPU has no bf16 instructions: it is slower than fp32"


def _has_bf16(device: str) -> bool:
    return device != "cuda" or not torch.cuda.is_available() or precision.has_bf16(torch.device("cuda"))


def decide_strategy(config: Config) -> tuple[Config, Choice | None]:
    """Decides ``strategy: auto`` of a config whose ranks are decided, by the memory there is.

    Raises ConfigError where nothing fits into memory.
    """
    if config.parallel.strategy != "auto":
        return config, None
    ranks = config.parallel.decided_ranks
    where = free_memory.measure_machine(config.parallel.device, ranks, config.parallel.node_ranks or ranks)
    return resolve_strategy(config, where)


def check_host(config: Config, ranks_of_host: int | None = None) -> None:
    """Raises ConfigError where this host cannot hold what its ranks would offload; None: it has all of them."""
    ranks = ranks_of_host or config.parallel.decided_ranks
    _refuse(host_problems(config, node_ranks=ranks, free_bytes=free_memory.free_host_bytes()))


def check_memory(config: Config, *, is_told: bool = True) -> None:
    """Tells of a run of this host that comes near the limit. Raises UsageError for one that cannot fit.

    Device, ranks and strategy are decided. What is not known beforehand is not judged: a microbatch that ranks find,
    virtual ranks, models of the user's own code. ``is_told``: of several ranks that look, one tells.
    """
    need = needed(config)
    if need is None:
        return
    verdict = _compare(config, need)
    if verdict.kind == "near" and is_told:
        say(f"near the limit of memory: {verdict}")
    if verdict.kind == "too large":
        machine = detect.detect_machine(with_gpus=config.parallel.device == "cuda")
        lines = [f"out of memory: {verdict}", *ways_out(config, verdict, machine, machine_entry()), _ANYWAY]
        raise UsageError("\n  ".join(lines))


def check_virtual(config: Config) -> None:
    """Raises UsageError for virtual ranks whose states alone are more than there is; device and ranks are decided."""
    need = needed(config, in_turns=True)
    if need is None:
        return
    verdict = _compare(config, need)
    if verdict.kind == "too large":
        raise UsageError(
            f"out of memory: {verdict}\n  virtual ranks share the memory of one process, and each has its own states\n"
            "  take fewer ranks (--ranks) or a smaller model; paceline predict tells time and memory without a run\n"
            f"  {_ANYWAY}"
        )


def show_decisions(config: Config, choice: Choice | None, others: Sequence[str] = ()) -> None:
    """Prints what was decided before the run, and why."""
    from paceline.terminal import new_console

    notes = [None if choice is None else choice.reason(), *others]
    if config.memory.offload and config.parallel.device == "cpu":
        notes.append("memory.offload moves nothing here: on CPU ranks the host's memory is the device's")
    if config.train.precision in ("fp8", "fp8_row") and config.parallel.device == "cpu":
        notes.append(
            f"train.precision = {config.train.precision} is emulated on CPU ranks: the same numbers of 8 bits are "
            "multiplied in fp32; bf16_master is faster here"
        )
    if config.comm.nccl != type(config.comm.nccl)() and config.parallel.device == "cpu":
        notes.append("comm.nccl is not read here: CPU ranks do not use NCCL")
    for note in filter(None, [*notes, entry_problem()]):
        new_console().print(note, highlight=False, markup=False)


def _spread_over_hosts(asked: Config, hosts: range, ranks: int | None) -> tuple[Config, int]:
    """Returns the config for the most hosts, and the ranks of this one. Raises ConfigError where any number fails."""
    if asked.comm.backend == "virtual":
        raise UsageError("comm.backend = virtual with --nnodes\n  virtual ranks take turns in one process")
    here = resolve_config(asked.with_values("parallel", ranks=ranks or "auto"))
    per_host = here.parallel.decided_ranks
    config = asked.with_values("parallel", device=here.parallel.device, ranks=per_host * hosts[-1])
    _refuse(check_hosts(config, per_host, hosts))
    return config, per_host


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems, source="config")


def _compare(config: Config, need: MemoryNeed) -> MemoryVerdict:
    """Compares what a run needs with what this machine has and has free."""
    if config.parallel.device == "cuda":
        has = float(free_memory.measure_machine("cuda", 1, 1).device_bytes)
        return MemoryVerdict(need=need, where="the smallest GPU", has_bytes=has, free_bytes=has)
    import psutil

    free = float(psutil.virtual_memory().available)
    return MemoryVerdict(need=need, where="this host", has_bytes=detect.host_memory(), free_bytes=free)
