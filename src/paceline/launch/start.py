"""From a config and options to a job: the target's machines, the plan for them, and a name that nobody else takes.

A run that cannot be there is refused before it is queued:

    ranks    nodes x GPUs of a node; without GPUs, those of the config shared out, or two a node
    memory   what a rank needs on its GPU, or all ranks of a host, by estimate, beside what the target says there is
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cluster.detect import Machine
from paceline.config import Config, check_hosts, load_config, with_precision
from paceline.config.shipped import find_config
from paceline.errors import ConfigError, LaunchError, Problem, UsageError
from paceline.launch.job import LaunchJob, Target, TargetMachines, find_target, launches_folder
from paceline.plan.plan import RunMachine
from paceline.predict.memory.activations import describe_model
from paceline.run.folder import check_folder, is_taken
from paceline.run.location import numbered, run_folder, runs_of
from paceline.run.warm import CPU_RANKS
from paceline.search.automatic import apply_choice, choose
from paceline.search.expect import MemoryVerdict, needed
from paceline.search.request import make_plan
from paceline.units import format_bytes


def prepare(
    path: Path,
    overrides: Sequence[str],
    asked: LaunchJob,
    *,
    resumes: bool = False,
    checks_memory: bool = True,
    is_dry: bool = False,
) -> tuple[Target, LaunchJob, tuple[str, ...]]:
    """Makes the job of ``asked``, and lines on what was decided. Raises for one that cannot run, and writes nothing."""
    target = find_target(asked.target)
    array = [word for word in overrides if "{task}" in word]
    if array and asked.tasks is None:
        raise UsageError(f"{array[0]} without --array\n  {{task}} is the number of an array's task\n  add --array 0-3")
    path = find_config(path)
    config = load_config(path, [word.replace("{task}", "0") for word in overrides])
    check_folder(run_folder(config), resume=True)
    run = _free_run(config, resumes=resumes)
    job = replace(
        asked,
        name=run,
        run=run,
        config=str(path.absolute()),
        overrides=tuple(overrides),
        workdir=str(Path.cwd()),
        folder=str(launches_folder(Path(config.monitor.folder).absolute()) / run),
        ranks=ranks_of_node(config, asked.nodes, asked.gpus, asked.slots),
    )
    try:
        machines = target.machines(job)
    except LaunchError as error:  # the target does not answer: what would be submitted can be shown all the same
        if not is_dry:
            raise UsageError(str(error)) from error  # nothing was started
        given = getattr(target, "given", None)  # what is known without asking: the memory that a pod asks for
        known = TargetMachines(where=f"--on {asked.target}") if given is None else given(job)
        machines = replace(known, notes=(f"not asked for its machines: {error.headline}",))
    if not checks_memory:
        machines = replace(machines, device_bytes=None, host_bytes=None)
    decided, lines = plan_job(config, machines, job)
    return target, replace(job, overrides=(*overrides, *decided), port=job.port or machines.port), lines


def start(target: Target, job: LaunchJob) -> LaunchJob:
    """Reserves a name for the launch, submits the job, and writes down where it is."""
    home = launches_folder(job.runs)
    home.mkdir(parents=True, exist_ok=True)
    for folder in itertools.chain([home / job.run], (home / f"{job.run}-start-{each}" for each in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    job = replace(job, name=folder.name, folder=str(folder))
    try:
        job = replace(job, id=target.submit(job))
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        with contextlib.suppress(OSError):  # until one that has something in it
            for path in (folder, home, home.parent):
                path.rmdir()
        raise
    job.write()
    return job


def _free_run(config: Config, *, resumes: bool) -> str:
    """Returns a name that no run has and no job will have; with ``resumes`` that of the newest run of this name."""
    first = run_folder(config)
    if resumes:
        if not (runs := runs_of(config)):
            raise UsageError(f"--resume, and there is no run in {first}\n  leave it out for a new run")
        return runs[0].name
    launches = launches_folder(first.parent)

    def is_used(name: str) -> bool:
        is_there = is_taken(first.with_name(name)) or (launches / name).exists()
        return is_there or bool(runs_of(config.model_copy(update={"name": name})))

    return next(itertools.filterfalse(is_used, numbered(first.name)))


def ranks_of_node(config: Config, nodes: int, gpus: int, slots: int | None = None) -> int:
    """Returns the ranks of each node. Raises ConfigError where the config asks for other ranks than there would be."""
    asked, each = config.parallel.ranks, gpus or config.parallel.node_ranks or slots
    if slots is not None and slots != each:
        given = f"--gpus-per-node is {gpus}" if gpus else f"parallel.node_ranks = {each}"
        what = f"the hosts have {slots} slots each, and {given}"
        fix = "give the same number, or leave the slots out"
        raise ConfigError([Problem(what=what, rule="they are ranks of a host", fix=fix)], source="launch")
    if isinstance(asked, int):
        each = each or asked // nodes
        if each * nodes != asked:
            of_each = f" with {gpus} GPUs each" if gpus else f" with {slots} slots each" if slots else ""
            given = f"{nodes} node{'s' if nodes > 1 else ''}{of_each}"
            rule = "every node has as many ranks as the others, and a rank a GPU of its own"
            fix = f"set parallel.ranks = auto, or {max(1, each) * nodes}"
            problem = Problem(what=f"parallel.ranks = {asked} on {given}", rule=rule, fix=fix)
            raise ConfigError([problem], source="launch")
    return each or CPU_RANKS


def plan_job(config: Config, machines: TargetMachines, job: LaunchJob) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Makes the plan for the target's machines: overrides of the config, and lines. Raises ConfigError, UsageError."""
    each, nodes, device = job.ranks, job.nodes, "cuda" if job.gpus else "cpu"
    if config.parallel.device not in ("auto", device):
        what = f"parallel.device = {config.parallel.device}, and --gpus-per-node is {job.gpus}"
        rule = "ranks on GPUs need as many of them on each node; ranks on CPUs need none"
        fix = "give --gpus-per-node" if device == "cpu" else "leave --gpus-per-node out"
        raise ConfigError([Problem(what=what, rule=rule, fix=fix)], source="launch")
    if config.comm.backend == "virtual":
        raise UsageError("comm.backend = virtual\n  virtual ranks take turns in one process\n  use paceline train")
    ranks = each * nodes
    spread = with_precision(config.with_values("parallel", device=device, ranks=ranks), device)
    if found := check_hosts(spread, each, range(job.least, nodes + 1)):
        raise ConfigError(found, source="launch")
    chosen, memory = _with_memory(spread, machines, each)
    spans = f", {each} on each of {nodes} nodes" if nodes > 1 else ""
    kind = "GPUs" if job.gpus else "CPUs"
    what = f"{ranks} rank{'s' if ranks > 1 else ''} on {kind}{spans}: {chosen.parallel.strategy}"
    if "auto" not in (chosen.parallel.strategy, chosen.train.microbatch):
        plan = make_plan(chosen, RunMachine(device=device, ranks=ranks, node_ranks=each))
        what += f", microbatch {plan.layout.microbatch}"
    return (f"parallel.device={device}", f"parallel.ranks={ranks}"), (what, f"memory: {memory}", *machines.notes)


def _with_memory(config: Config, machines: TargetMachines, each: int) -> tuple[Config, str]:
    """Returns the config with a strategy that fits, and what is known of memory. Raises where nothing fits."""
    device, host, is_open = config.parallel.device, machines.host_bytes, config.is_open
    has = machines.device_bytes if device == "cuda" else host
    if has is not None and is_open:
        sizes = {"device_bytes": int(has if device == "cuda" else has / each), "host_bytes": int(host or 2**60)}
        there = RunMachine(device=device, ranks=config.parallel.decided_ranks, node_ranks=each, **sizes)
        model = describe_model(config, device)
        known = Machine(processor="", cores=each, memory_bytes=float(there.host_bytes))
        config = config if model is None else apply_choice(config, choose(config, model, there, known))
    need = needed(config, node_ranks=each)
    if need is None:
        return config, "not known before the run (a model of your own code, or a microbatch that ranks find)"
    if has is None:
        return config, f"{need.who} {format_bytes(need.total)} by estimate; what {machines.where} has is not known"
    where = f"a GPU of {machines.where}" if device == "cuda" else machines.where
    verdict = MemoryVerdict(need=need, where=where, has_bytes=has, free_bytes=has)
    if verdict.kind == "too large" and not is_open:
        raise UsageError(
            f"out of memory: {verdict}\n  a run that does not fit is not queued\n  paceline plan CONFIG --cluster NAME "
            "finds what fits; parallel.strategy=auto takes it; to start it all the same: --no-memory-check"
        )
    return config, str(verdict)
