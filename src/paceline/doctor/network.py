"""How ranks would find one another: interfaces, this host's name, ports, and the settings of NCCL and Gloo.

The classic cause of a Gloo group that hangs across hosts: without ``GLOO_SOCKET_IFNAME``, Gloo listens on the address
that this host's own name resolves to. Where that is a loopback address, the other hosts call themselves.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.cluster.detect import usable_cores
from paceline.comm.control.wire import SECRET, SECRET_FILE, Address, listen
from paceline.config import check_exported, check_interfaces, config_settings, exported_settings
from paceline.config import settings as rules
from paceline.config.settings import GLOO_INTERFACE, NCCL_INTERFACE, BackendSetting
from paceline.doctor.findings import DoctorInputs, MachineFinding, finding
from paceline.errors import ConfigError, Problem
from paceline.run.whereami import is_loopback, recognise
from paceline.units import format_seconds

_PATIENCE_S = 5.0
_SLOW_S = 1.0
_TORCHRUN_PORT = 29500
_SYSTEM_FILE = Path("/etc/nccl.conf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface that is up, with its addresses."""

    name: str
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        return any(map(is_loopback, self.addresses))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What this host's name resolves to: ``usable`` is the first address that a process can listen on."""

    host: str
    addresses: tuple[str, ...]
    usable: str | None
    seconds: float
    error: str = ""


def find_interfaces() -> list[Interface]:
    """Returns the interfaces that are up and have an address, in the system's order."""
    states, found = psutil.net_if_stats(), []
    for name, known in psutil.net_if_addrs().items():
        addresses = tuple(each.address for each in known if each.family in (socket.AF_INET, socket.AF_INET6))
        if addresses and name in states and states[name].isup:
            found.append(Interface(name=name, addresses=addresses))
    return found


def resolve_host(host: str, patience_s: float = _PATIENCE_S) -> Resolution:
    """Looks a name up, and tries which of its addresses are this host's. Gives up after ``patience_s``."""
    answers: list[tuple[str, ...]] = []
    errors: list[str] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
            answers.append(tuple(dict.fromkeys(str(each[4][0]) for each in found)))
        except OSError as error:
            errors.append(error.strerror or str(error))

    start = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)  # a resolver that hangs cannot be stopped
    thread.start()
    thread.join(patience_s)
    seconds = time.monotonic() - start
    addresses = answers[0] if answers else ()
    error = "" if answers else errors[0] if errors else f"no answer within {patience_s:g} s"
    usable = next((address for address in addresses if _can_listen(address)), None)
    return Resolution(host=host, addresses=addresses, usable=usable, seconds=seconds, error=error)


def _can_listen(address: str) -> bool:
    with contextlib.suppress(OSError), listen(Address(address)):
        return True
    return False


def interfaces(_: DoctorInputs) -> Iterator[MachineFinding]:
    found = find_interfaces()
    shown = [f"{each.name} ({', '.join(a for a in each.addresses if '%' not in a)})" for each in found]
    meaning = "ranks of one host talk over the loopback, ranks of several over one of the others"
    fix = "" if any(each.is_loopback for each in found) else "bring the loopback up: ip link set lo up"
    yield finding("interfaces", ", ".join(shown) or "none is up", meaning, problem=fix)


def launcher(inputs: DoctorInputs) -> Iterator[MachineFinding]:
    """Reports by which launcher this process was started, and which host or rank it is."""
    meaning = "paceline train and paceline.connect() join the ranks of the launcher that they find"
    try:
        yield finding("launcher", str(recognise(inputs.environment)), meaning)
    except ConfigError as error:
        what = "; ".join(problem.what for problem in error.problems)
        yield finding("launcher", what, error.problems[0].rule, problem=error.problems[0].fix)


def host_name(_: DoctorInputs) -> Iterator[MachineFinding]:
    """Checks that this host's name resolves quickly, to an address that other hosts can reach."""
    yield name_finding(resolve_host(socket.gethostname()))


def name_finding(found: Resolution) -> MachineFinding:
    fix = "set comm.interface (GLOO_SOCKET_IFNAME) to the interface between the hosts, or correct /etc/hosts"
    shown = f"{found.host} is {', '.join(found.addresses)}" if found.addresses else f"{found.host}: {found.error}"
    took = f" (after {format_seconds(found.seconds)})" if found.seconds > _SLOW_S else ""
    if found.error.startswith("no answer"):
        meaning = "everything that looks the name up stands still: ranks seem to hang while they connect"
        return finding("host name", shown, meaning, problem="correct /etc/hosts or DNS")
    if found.usable is None:
        meaning = "it is no address of this host, so that Gloo takes the loopback: ranks of other hosts would hang"
        return finding("host name", shown + took, meaning, note=fix)
    if is_loopback(found.usable):
        meaning = "ranks of other hosts would be told to call themselves, and hang; on one host that does no harm"
        return finding("host name", shown + took, meaning, note=fix)
    meaning = "other hosts reach this one by it" + (", but the look-up slows every start down" if took else "")
    return finding("host name", shown + took, meaning, note="put the name into /etc/hosts" if took else "")


def gloo_interface(settings: Mapping[str, BackendSetting], present: list[Interface], usable: str | None) -> str | None:
    """Returns the interface that Gloo takes in a group over several hosts; None: one that is not there."""
    asked = settings.get(GLOO_INTERFACE)
    if asked is not None:
        first = asked.value.split(",")[0]
        return first if any(each.name == first for each in present) else None
    loopback = next((each.name for each in present if each.is_loopback), None)
    if usable is None:
        return loopback
    plain = usable.partition("%")[0]
    named = (each.name for each in present if plain in (address.partition("%")[0] for address in each.addresses))
    return next(named, loopback if is_loopback(usable) else None)


def nccl_interfaces(settings: Mapping[str, BackendSetting], present: list[Interface]) -> list[str]:
    """Returns the interfaces that NCCL takes: as it is set, or ib*, then all but docker* and lo, then these."""
    names = [each.name for each in present]
    asked = settings.get(NCCL_INTERFACE)
    if asked is not None:
        return rules.matching(asked.value, names)
    choices = (rules.matching(wanted, names) for wanted in ("ib", "^docker,lo", "docker", "lo"))
    return next((found for found in choices if found), [])


def chosen_interfaces(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    present, settings = find_interfaces(), settings_of(surroundings)
    gloo = gloo_interface(settings, present, resolve_host(socket.gethostname()).usable)
    asked = settings.get(GLOO_INTERFACE)
    found = (gloo or "one that is not up here") + (f", by {asked}" if asked else ", by this host's name")
    by_name = "paceline train takes the loopback where nothing is set; a group over several hosts takes this one"
    fix = "" if gloo is not None else "name one that is up, or unset it"
    yield finding("gloo interface", found, "every group takes it" if asked else by_name, problem=fix)
    nccl = nccl_interfaces(settings, present)
    found = f"{', '.join(nccl) or 'none'}, by {settings.get(NCCL_INTERFACE) or 'its own order'}"
    fix = "" if nccl else "name one that is up (comm.interface), or unset it"
    meaning = "GPU ranks meet over it, and talk over it where there is no InfiniBand"
    yield finding("nccl interface", found, meaning, problem=fix)


def ports(_: DoctorInputs) -> Iterator[MachineFinding]:
    """Checks that a process can listen, and that torchrun's port is free."""
    try:
        with listen(Address("127.0.0.1")) as probe:
            free = probe.getsockname()[1]
    except OSError as error:
        found, meaning = f"no port can be opened: {error.strerror}", "ranks of Gloo listen at one each"
        fix = "allow local connections, or look for a process that holds all ports: ss -s"
        yield finding("ports", found, meaning, problem=fix)
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        is_taken = probe.connect_ex(("127.0.0.1", _TORCHRUN_PORT)) == 0
    found = f"{free} was free" + (f"; {_TORCHRUN_PORT} is in use" if is_taken else f", and {_TORCHRUN_PORT} too")
    meaning = f"Gloo takes free ones; torchrun without --standalone takes {_TORCHRUN_PORT}"
    fix = "give torchrun another --master-port, or end what listens there" if is_taken else ""
    yield finding("ports", found, meaning, note=fix)


def listening(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Says what a run listens on, and who is asked for proof: see ``docs/security.md``."""
    present, settings = find_interfaces(), settings_of(surroundings)
    asked = settings.get(GLOO_INTERFACE)
    given = [*(name for name in (SECRET, SECRET_FILE) if name in surroundings.environment), "the run's folder"]
    loopbacks = [each.name for each in present if each.is_loopback]
    leaves_host = asked is not None and any(name not in loopbacks for name in asked.value.split(","))
    found = "the launcher: a unix socket in a folder of mode 0700; Gloo and NCCL: the loopback"
    rule = "no other host reaches what paceline train listens on, unless comm.interface or GLOO_SOCKET_IFNAME says so"
    fix = f"unset {GLOO_INTERFACE} for runs on one host" if leaves_host else ""
    yield finding("listening, one host", found, rule, note=fix)
    found = f"the first launcher: at the address of --rdzv; Gloo: {asked.value if asked else 'on the way there'}; "
    found += f"the job's secret is in {given[0]}"
    rule = "control connections prove the secret; those of Gloo and NCCL, and torchrun's store, are open to whoever "
    rule += "reaches them: keep the network between the hosts to yourself"
    yield finding("listening, several hosts", found, rule)


def settings_of(surroundings: DoctorInputs) -> dict[str, BackendSetting]:
    """Returns the settings of Gloo and NCCL: by the config if there is one, and else by the environment."""
    given = {} if surroundings.config is None else config_settings(surroundings.config.comm)
    return {**exported_settings(surroundings.environment), **given}


def variables(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Reports all variables of NCCL and Gloo in effect, and what contradicts among them."""
    settings = settings_of(surroundings)
    shown = [f"{each.variable}={each.value} ({each.key or 'exported'})" for each in settings.values()]
    meaning = "NCCL and Gloo obey them" if shown else "NCCL and Gloo choose for themselves, which is mostly right"
    yield finding("variables", ", ".join(shown) or "none of NCCL_* or GLOO_*", meaning)
    problems = rules.contradictions(settings)
    if surroundings.config is not None:
        known = {str(problem) for problem in problems}
        for uses_nccl in (False, True):
            found = check_exported(surroundings.config, surroundings.environment, uses_nccl=uses_nccl)
            problems += [problem for problem in found if str(problem) not in known]
    yield from (problem_finding("variables", problem) for problem in problems)
    for problem in rules.unknown_variables(exported_settings(surroundings.environment)):
        yield MachineFinding(name="variables", status="note", found=problem.what, meaning=problem.rule, fix=problem.fix)


def nccl_files(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Reports variables that files set, which NCCL reads besides: the administrator's, and the user's."""
    given = surroundings.environment.get("NCCL_CONF_FILE")
    user = Path(given) if given else Path(surroundings.environment.get("HOME", "/")) / ".nccl.conf"
    if given and not user.is_file():
        found, fix = f"NCCL_CONF_FILE={given} is no file", "correct the path, without ~, or unset NCCL_CONF_FILE"
        yield finding("nccl files", found, "NCCL reads its variables from that file", problem=fix)
    for path in (_SYSTEM_FILE, user):
        text = path.read_text(errors="replace") if path.is_file() else ""
        pairs = (line.strip().partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
        lines = {name.strip(): value.strip() for name, equals, value in pairs if equals and name.strip()}
        if lines:
            shown = ", ".join(f"{name}={value}" for name, value in lines.items())
            meaning = "NCCL obeys them, except for what the environment or the config says otherwise"
            yield MachineFinding(name="nccl files", status="note", found=f"{path}: {shown}", meaning=meaning)


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
        found, fix = "comm.backend = nccl without a GPU", "set comm.backend = auto"
        yield finding("run", found, "nccl moves bytes between GPUs only", problem=fix)
    names = [each.name for each in find_interfaces()]
    uses_nccl = on_gpus and config.comm.backend in ("auto", "nccl")
    for problem in check_interfaces(settings_of(surroundings), names, uses_nccl=uses_nccl):
        yield problem_finding("run", problem)


def problem_finding(name: str, problem: Problem) -> MachineFinding:
    return MachineFinding(name=name, status="problem", found=problem.what, meaning=problem.rule, fix=problem.fix)
