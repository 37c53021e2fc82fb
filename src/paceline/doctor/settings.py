"""The settings of NCCL and Gloo, whether they fit together, and whether this machine can run what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.cluster.detect import usable_cores
from paceline.config import check_exported, check_interfaces, exported_settings
from paceline.config.settings import contradictions, unknown_variables
from paceline.doctor.findings import DoctorInputs, MachineFinding, finding
from paceline.doctor.network import find_interfaces, settings_of
from paceline.errors import Problem

_SYSTEM_FILE = Path("/etc/nccl.conf")


def variables(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Reports all variables of NCCL and Gloo in effect, and what contradicts among them."""
    settings = settings_of(surroundings)
    shown = [f"{each.variable}={each.value} ({each.key or 'exported'})" for each in settings.values()]
    yield finding(
        "variables",
        ", ".join(shown) or "none of NCCL_* or GLOO_*",
        "NCCL and Gloo obey them" if shown else "NCCL and Gloo choose for themselves, which is mostly right",
    )
    problems = contradictions(settings)
    if surroundings.config is not None:
        known = {str(problem) for problem in problems}
        for uses_nccl in (False, True):
            found = check_exported(surroundings.config, surroundings.environment, uses_nccl=uses_nccl)
            problems += [problem for problem in found if str(problem) not in known]
    yield from (problem_finding("variables", problem) for problem in problems)
    for problem in unknown_variables(exported_settings(surroundings.environment)):
        yield MachineFinding(name="variables", status="note", found=problem.what, meaning=problem.rule, fix=problem.fix)


def nccl_files(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Reports variables that files set, which NCCL reads besides: the administrator's, and the user's."""
    given = surroundings.environment.get("NCCL_CONF_FILE")
    user = Path(given) if given else Path(surroundings.environment.get("HOME", "/")) / ".nccl.conf"
    if given and not user.is_file():
        fix = "correct the path, without ~, or unset NCCL_CONF_FILE"
        meaning = "NCCL reads its variables from that file"
        yield finding("nccl files", f"NCCL_CONF_FILE={given} is no file", meaning, problem=fix)
    for path in (_SYSTEM_FILE, user):
        if path.is_file() and (lines := variables_in(path.read_text(errors="replace"))):
            shown = ", ".join(f"{name}={value}" for name, value in lines.items())
            meaning = "NCCL obeys them, except for what the environment or the config says otherwise"
            yield MachineFinding(name="nccl files", status="note", found=f"{path}: {shown}", meaning=meaning)


def variables_in(text: str) -> dict[str, str]:
    """Reads lines of the form NAME=VALUE; others, such as comments, are left out."""
    pairs = (line.strip().partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals and name.strip()}


def run(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Checks that the machine has the devices, cores and interfaces that the given config asks for."""
    config = surroundings.config
    if config is None:
        return
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks, device, threads = config.parallel.ranks, config.parallel.device, config.parallel.threads or 1
    on_gpus = device == "cuda" or (device == "auto" and gpus > 0)
    usable = len(usable_cores())
    where = f"{gpus} GPUs" if on_gpus else f"{usable} cores"
    shown = f"{'one rank per GPU' if ranks == 'auto' and on_gpus else f'ranks: {ranks}'}, {where}"
    if on_gpus and (gpus == 0 or (ranks != "auto" and ranks > gpus)):
        found = f"parallel.ranks = {ranks}, parallel.device = {device} on {gpus} GPUs"
        fix = f"set parallel.ranks = {gpus}, or parallel.device = cpu" if gpus else "set parallel.device = cpu"
        yield finding("run", found, "every rank needs a GPU of its own", problem=fix)
    elif not on_gpus and ranks != "auto" and ranks * threads > usable:
        meaning = "ranks that share cores take turns: right results, and no gain in time"
        fix = f"set parallel.ranks = {max(1, usable // threads)} for speed"
        found = f"{shown}, {threads} threads each" if threads > 1 else shown
        yield finding("run", found, meaning, note=fix)
    else:
        yield finding("run", shown, "this machine has what the config asks for")
    if config.comm.backend == "nccl" and not gpus:
        meaning = "nccl moves bytes between GPUs only"
        yield finding("run", "comm.backend = nccl without a GPU", meaning, problem="set comm.backend = auto")
    names = [each.name for each in find_interfaces()]
    uses_nccl = on_gpus and config.comm.backend in ("auto", "nccl")
    for problem in check_interfaces(settings_of(surroundings), names, uses_nccl=uses_nccl):
        yield problem_finding("run", problem)


def problem_finding(name: str, problem: Problem) -> MachineFinding:
    return MachineFinding(name=name, status="problem", found=problem.what, meaning=problem.rule, fix=problem.fix)
