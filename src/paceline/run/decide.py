"""What is decided before ranks start: device, number of ranks and strategy, and whether this host has the memory.

    decide_run(config)                        ranks of this machine, which are to be started
    decide_run(config, hosts=range(1, 5))     ranks of one to four hosts like this one
    decide_run(config, comm=comm)             ranks that another launcher has started and connected

Also the variables of NCCL and Gloo, which stand in a rank's environment before it connects; and what is predicted: by
formulas before the start, by a dry run beside it where that pays. Where ranks find the microbatch, the run is predicted
when the first of them writes its first record.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from paceline import free_memory
from paceline.cluster import detect
from paceline.cluster.devices import load_cluster
from paceline.comm.base import Communicator
from paceline.comm.control.kept import FOLDER
from paceline.config import Config, check_hosts, check_ranks, dump_yaml, why_by_blocks, why_not_sharded, with_precision
from paceline.config.settings import check_exported, check_interfaces, config_settings, exported_settings, variables_of
from paceline.engines import precision
from paceline.errors import ConfigError, ForeignAttentionError, PacelineError, Problem, UsageError
from paceline.plan.plan import Plan, RunMachine
from paceline.predict.formulas.saving import SnapshotCost
from paceline.records.records import RunRecord, follow_records
from paceline.run.logs import say
from paceline.run.processes import MACHINE, machine_entry, node_ranks
from paceline.run.signals import start_thread
from paceline.run.warm import CPU_RANKS, WarmRanks
from paceline.search import expect
from paceline.search.expectation import FILE, Expectation
from paceline.search.request import make_plan, with_context_method
from paceline.search.snapshots import snapshot_cost
from paceline.terminal import new_console
from paceline.train.resolve import resolve_strategy, resolve_together
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.rehearse.dryrun.expected import Background
    from paceline.search.automatic import Choice

_ANYWAY = "to start it all the same: --no-memory-check"
_FEWEST_STEPS = 40  # of a run that is worth a process beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan, the config without what it left open, and why if it was chosen; ``notes`` tell the rest."""

    plan: Plan
    config: Config
    choice: Choice | None = None
    notes: tuple[str, ...] = ()


def decide_run(
    asked: Config,
    *,
    hosts: range | None = None,
    host_ranks: int | None = None,
    comm: Communicator | None = None,
    machine: detect.Machine | None = None,
    checks_memory: bool = True,
) -> Decision:
    """Decides device, ranks and strategy, and makes the plan of a run; by default of ranks of this machine.

    ``hosts`` are the numbers of hosts that the run must work on, and ``host_ranks`` the ranks of this one; None: one
    per GPU. ``comm`` connects ranks that a launcher has started, on a ``machine`` of which they may see a part. Raises
    ConfigError with all problems at once for what does not fit together, and with ``checks_memory`` UsageError for a
    run of this host that is estimated to need more memory than there is.
    """
    if comm is not None:
        here = node_ranks(asked)
        _refuse(check_ranks(asked, comm.size, here))
        config = asked.with_values("parallel", device=comm.device.type, ranks=comm.size)
        is_alone = here in (None, comm.size)
    elif hosts is not None:
        if asked.comm.backend == "virtual":
            raise UsageError("comm.backend = virtual with --nnodes\n  virtual ranks take turns in one process")
        config = resolve_config(asked.with_values("parallel", ranks=host_ranks or "auto"))
        here = config.parallel.decided_ranks
        config = asked.with_values("parallel", device=config.parallel.device, ranks=here * hosts[-1])
        _refuse(check_hosts(config, here, hosts))  # where any number of them fails
        is_alone = False  # of several hosts, each has memory of its own
    else:
        config, here, is_alone = resolve_config(asked), None, True
    config = decide_precision(config)
    choice: Choice | None = None
    if config.is_open:
        if comm is None:
            config, choice = decide_strategy(config)
        else:
            config, choice = resolve_together(config, comm, here, machine)
    if comm is None and hosts is None:
        config = decide_sharing(config)
        check_attention(config)
    check_host(config, here)
    if checks_memory and is_alone and choice is None:  # what was chosen was chosen because it fits
        check_memory(config, is_told=comm is None or comm.rank == 0)
    ranks = config.parallel.decided_ranks
    plan = make_plan(config, RunMachine(device=config.parallel.device, ranks=ranks, node_ranks=here))
    reasons = why_not_sharded(config, ranks), why_by_blocks(config)
    method = config.parallel.context_method
    took = None if method == asked.parallel.context_method else f"parallel.context_method = auto takes {method}"
    need = _snapshots(config, here or ranks) if config.checkpoint.memory.every_steps else None
    told = None if need is None else f"checkpoint.memory takes {format_bytes(need.host_bytes)} of each host's memory"
    if told is not None and hosts is None and asked.checkpoint.memory.is_changed("copies"):
        told += f"; this run has one, so checkpoint.memory.copies = {asked.checkpoint.memory.copies} has no effect"
    notes = filter(None, [*precision_notes(asked, config), *reasons, took, told])
    return Decision(plan=plan, config=config, choice=choice, notes=tuple(notes))


def resolve_config(config: Config) -> Config:
    """Decides device and ranks by what this machine has. Raises ConfigError if they do not fit."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = config.parallel.device if config.parallel.device != "auto" else ("cuda" if num_gpus else "cpu")
    ranks = config.parallel.ranks if config.parallel.ranks != "auto" else (num_gpus if device == "cuda" else CPU_RANKS)
    problems, own_gpu = list[Problem](), "every rank needs a GPU of its own"
    if device == "cpu":  # GPUs are asked by the ranks that own them
        name = config.train.precision_on(device)
        found = precision.precision_problem(precision.precision_named(name), torch.device("cpu"))
        problems = [] if found is None else [replace(found, what=f"train.precision = {name}: {found.what}")]
    if device == "cuda" and num_gpus == 0:
        what, rule = "parallel.device = cuda, and torch reaches no GPU here", f"{own_gpu}; virtual ranks share one"
        fix = "set parallel.device = cpu; paceline doctor tells what is missing"
        problems.append(Problem(what=what, rule=rule, fix=fix))
    elif device == "cuda" and ranks > num_gpus and config.comm.backend != "virtual":
        fix = f"set parallel.ranks = {num_gpus}, or parallel.device = cpu"
        problems.append(Problem(what=f"parallel.ranks = {ranks} on {num_gpus} GPUs", rule=own_gpu, fix=fix))
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
    """Decides ``strategy: auto`` and ``memory: auto`` by the memory there is. Raises ConfigError where nothing fits."""
    if not config.is_open:
        return config, None
    ranks = config.parallel.decided_ranks
    where = free_memory.measure_machine(config.parallel.device, ranks, config.parallel.node_ranks or ranks)
    return resolve_strategy(config, where)


def decide_sharing(config: Config) -> Config:
    """Decides ``parallel.context_method: auto`` for ranks of this machine; where it is not known, it stays a ring."""
    if config.parallel.context == 1 or config.parallel.context_method != "auto":
        return config
    machine, ranks = detect.detect_machine(with_gpus=config.parallel.device == "cuda"), config.parallel.decided_ranks
    with contextlib.suppress(UsageError):
        cluster = expect.present_cluster(config, machine, ranks, None, machine_entry())[0]
        return with_context_method(config, cluster, ranks)
    return config


def check_attention(config: Config) -> None:
    """Raises ForeignAttentionError where ranks share each sequence and attention of the user's code asks no other.

    A step without values tells. One that fails in another way is left to the ranks, which have values.
    """
    if config.parallel.context > 1 and config.model.kind != "gpt":
        from paceline.rehearse.dryrun.record import record_stages

        try:
            record_stages(config, ranks=config.parallel.decided_ranks)
        except ForeignAttentionError:
            raise
        except PacelineError:
            return


def check_host(config: Config, ranks_of_host: int | None = None) -> None:
    """Raises ConfigError where this host cannot hold what its ranks would offload or keep; None: it has all of them."""
    ranks = ranks_of_host or config.parallel.decided_ranks
    free, every = free_memory.free_host_bytes(), config.checkpoint.memory.every_steps
    problems = expect.host_problems(config, node_ranks=ranks, free_bytes=free)
    if every is not None and (need := _snapshots(config, ranks)) is not None:
        shared = shutil.disk_usage(FOLDER).free if FOLDER.is_dir() else 0
        if need.host_bytes > min(free, shared):
            few = f"{format_bytes(shared)} of {FOLDER}" if shared < free else f"{format_bytes(free)} of its memory"
            what = f"checkpoint.memory.every_steps = {every}: snapshots take {format_bytes(need.host_bytes)} of a host"
            rule = "a host keeps two snapshots of its ranks' states, as many for each copy, and one that is being taken"
            more = f"give {FOLDER} more room (docker run --shm-size)" if shared < free else "end what else fills it"
            fix = f"{more}, spread the run over more hosts, or leave checkpoint.memory out: checkpoints on disk stay"
            problems.append(Problem(what=f"{what}, and {few} are free", rule=rule, fix=fix))
    _refuse(problems)


def _snapshots(config: Config, node_ranks: int) -> SnapshotCost | None:
    ranks, device = config.parallel.decided_ranks, config.parallel.device
    return snapshot_cost(config, ranks=ranks, node_ranks=node_ranks, device=device)


def check_memory(config: Config, *, is_told: bool = True) -> None:
    """Tells of a run that comes near this host's limit. Raises UsageError for one that is known not to fit."""
    verdict = _memory_verdict(config, expect.needed(config))
    if verdict is not None and verdict.kind == "near" and is_told:
        say(f"near the limit of memory: {verdict}")
    if verdict is not None and verdict.kind == "too large":
        machine = detect.detect_machine(with_gpus=config.parallel.device == "cuda")
        lines = [f"out of memory: {verdict}", *expect.ways_out(config, verdict, machine, machine_entry()), _ANYWAY]
        raise UsageError("\n  ".join(lines))


def check_virtual(config: Config) -> None:
    """Raises UsageError for virtual ranks whose states alone are more than there is; device and ranks are decided."""
    verdict = _memory_verdict(config, expect.needed(config, in_turns=True))
    if verdict is not None and verdict.kind == "too large":
        rule = "virtual ranks share the memory of one process, and each has its own states"
        fix = "take fewer ranks (--ranks) or a smaller model; paceline predict tells time and memory without a run"
        raise UsageError(f"out of memory: {verdict}\n  {rule}\n  {fix}\n  {_ANYWAY}")


def show_decisions(config: Config, choice: Choice | None, others: Sequence[str] = ()) -> None:
    notes = [None if choice is None else choice.reason(), *others]
    if config.memory.offload and config.parallel.device == "cpu":
        notes.append("memory.offload saves nothing here: on CPU ranks the host's memory is the device's")
    if config.train.precision in ("fp8", "fp8_row") and config.parallel.device == "cpu":
        notes.append(
            f"train.precision = {config.train.precision} is emulated on CPU ranks: the same numbers of 8 bits are "
            "multiplied in fp32; bf16_master is faster here"
        )
    if config.comm.nccl != type(config.comm.nccl)() and config.parallel.device == "cpu":
        notes.append("comm.nccl is not read here: CPU ranks do not use NCCL")
    for note in filter(None, [*notes, entry_problem()]):
        new_console().print(note, highlight=False, markup=False)


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems, source="config")


def _memory_verdict(config: Config, need: expect.MemoryNeed | None) -> expect.MemoryVerdict | None:
    """Compares what a run needs with what this machine has and has free; None: nobody knows what it needs."""
    if need is None:
        return None
    if config.parallel.device == "cuda":
        has = float(free_memory.measure_machine("cuda", 1, 1).device_bytes)
        return expect.MemoryVerdict(need=need, where="the smallest GPU", has_bytes=has, free_bytes=has)
    free = float(psutil.virtual_memory().available)
    return expect.MemoryVerdict(need=need, where="this host", has_bytes=detect.host_memory(), free_bytes=free)


def rank_variables(config: Config, *, uses_nccl: bool) -> dict[str, str]:
    """Returns the environment of ranks. Raises ConfigError for exported values that differ, and missing interfaces."""
    settings = {**exported_settings(os.environ), **config_settings(config.comm)}
    present = [name for _, name in socket.if_nameindex()]
    problems = check_exported(config, os.environ, uses_nccl=uses_nccl)
    problems += check_interfaces(settings, present, uses_nccl=uses_nccl)
    if problems:
        raise ConfigError(problems, source=f"config, on host {socket.gethostname()}")
    return variables_of(config.comm, uses_nccl=uses_nccl)


def entry_problem() -> str | None:
    """Returns the reason why the file that PACELINE_MACHINE names cannot be used; None if there is no such problem."""
    try:
        if entry := machine_entry():
            load_cluster(str(entry))
    except UsageError as error:
        return f"{MACHINE} is of no use, and the run is not predicted: {str(error).splitlines()[0]}"
    return None


def predict_run(
    config: Config, *, threads: int | None = None, node_ranks: int | None = None, cores: Sequence[int] = ()
) -> Expectation | None:
    """Predicts time and memory of a run whose device and ranks are decided; None for what is no transformer.

    ``threads`` and ``node_ranks`` are the launcher's; None: the ``cores``, else this process's, are shared out.
    """
    if config.model.kind != "gpt":
        return None
    machine = detect.detect_machine(with_gpus=config.parallel.device == "cuda")
    machine = replace(machine, cores=len(cores) or machine.cores)
    ranks = config.parallel.decided_ranks
    hosts = -(-ranks // (config.parallel.node_ranks or node_ranks or ranks))
    return expect.expect_run(config, machine, threads=threads, hosts=hosts, entry=machine_entry())


def is_worth_dry_run(config: Config) -> bool:
    """Says whether a dry run pays: for a run of processes that is not over at once."""
    return (config.train.steps or _FEWEST_STEPS) >= _FEWEST_STEPS and config.comm.backend != "virtual"


@dataclass(slots=True)
class BackgroundPrediction:
    """A dry run in another process while the run goes on; a run that succeeds keeps it beside the earlier prediction.

    ``warm`` forks it, with torch loaded. A run that is done waits for it for ``patience_s``.
    """

    config: Config
    folder: Path
    formula: Expectation | None
    warm: WarmRanks | None = None
    threads: int | None = None
    cores: Sequence[int] = ()
    patience_s: float = 10.0
    _background: Background | None = None
    _since: float = field(default_factory=time.time)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _search: threading.Thread | None = None  # for what the ranks find

    def __enter__(self) -> None:
        if self.config.train.microbatch != "auto" or self.config.comm.backend == "virtual":
            self._start()
            return
        self._search = threading.Thread(target=self._start_when_found, name="microbatch", daemon=True)
        start_thread(self._search)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over.set()
        if self._search is not None:
            self._search.join()
        if kind is None:
            self._write()
        elif self._background is not None:
            self._background.stop()

    def _start(self) -> None:
        if not is_worth_dry_run(self.config) or expect.unpriced(self.config, 1, machine_entry()):
            return
        from paceline.rehearse.dryrun.expected import Background, plain_start

        start = plain_start if self.warm is None else self.warm.arguments
        self._background = Background(
            dump_yaml(self.config), threads=self.threads, cores=self.cores, entry=machine_entry(), start=start
        )

    def _start_when_found(self) -> None:
        """Follows the first rank's records until they tell the microbatch, which takes the place of ``auto``."""
        with contextlib.suppress(ValueError, OSError):  # records that cannot be read are told of elsewhere
            for record in follow_records(self.folder / "records" / "rank-0.jsonl", self._is_over.is_set):
                if isinstance(record, RunRecord) and record.time >= self._since and record.microbatch:
                    found = {"microbatch": record.microbatch, "global_batch": record.global_batch, "accumulate": None}
                    self.config = self.config.with_values("train", **found)
                    self._start()
                    return

    def _write(self) -> None:
        """Adds the dry run's figures, or the formulas' and why there are no others, to those of before."""
        from paceline.rehearse.dryrun.expected import better_of

        formula = self.formula
        if self._search is not None:
            formula = predict_run(self.config, threads=self.threads, cores=self.cores)
        found = None if self._background is None else self._background.result(self.patience_s)
        best = better_of(formula, found)
        if (best is None or best.step_s is None) and is_worth_dry_run(self.config):
            ranks, known = self.config.parallel.decided_ranks, expect.unpriced(self.config, 1, machine_entry())
            reasons = dict.fromkeys(filter(None, ("" if best is None else best.reason, known)))
            best = replace(best or Expectation(), ranks=ranks, reason="; ".join(reasons))
        if best is not None and best.memory_bytes is None:
            best = replace(best, memory_bytes=expect.expected_memory(self.config))
        if best is not None and best != self.formula:
            kept = (self.formula or Expectation()).with_later(best)
            (self.folder / FILE).write_text(kept.to_text(), encoding="utf-8")
