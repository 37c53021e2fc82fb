"""``--on ssh --hosts A,B``: one launcher on each of the listed hosts, through the user's own ssh.

Every host is asked first, all at once: whether it answers, its versions, GPUs and memory, whether its config is the
same and it sees the folder of the runs. The first host of the list has the server at which the others meet.

    python -m paceline.launch.ssh FOLDER

This process in the background holds the connections until the run has ended. It has one launcher started on each host,
prints what they print, and leaves with the code of the host where the others meet. With hosts to spare (``--nodes
2:4``), one that is lost is tried again, and the others meet elsewhere if need be. A launcher that hears nothing from
here for ``_LEASE_S`` ends: so the one on a host that was cut off is gone before the others go on without it.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import ConfigError, LaunchError, Problem, UsageError
from paceline.health.exit_codes import FAILED
from paceline.launch.background import cancel as cancel
from paceline.launch.background import hold
from paceline.launch.background import state as state
from paceline.launch.job import LAUNCHED, LaunchJob, TargetMachines, refuse_options, refuse_settings
from paceline.launch.remote import ALIVE, forget_mark, give_order, look_order, run_order, start_command
from paceline.run.signals import BY_SIGNAL
from paceline.terminal import echo
from paceline.untrusted import parse_json_object

ANSWER_S = 10
SETTINGS = ("ssh", "pythonpath")
_NOT_HERE = {"--time": "ssh has no time limits", "--queue": "ssh has no queues"}
_NOT_HERE["--max-requeues"] = "nothing queues the run again: it leaves with code 75"
_LOOK_S = 90.0
_HOST, _SHOWN = r"[^- ][^ ]{0,319}|", 40  # a user, and a name of the network; no option of ssh
_OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={ANSWER_S}", "-o", "ServerAliveInterval=5")
_AGAIN_S = 5.0
_LATE_S = 30.0  # for the other hosts, when the first has ended; and again, when they were asked to end
_LOST = 255  # ssh's own
_CANNOT_START = "answers, and Paceline does not start there:"
_ALIVE_S, _SILENT_S, _LEASE_S = 2.0, 8.0, 12.0  # shorter than ssh takes to give up a connection: 15 to 20 s


def ssh_command(job: LaunchJob, host: str) -> list[str]:
    """Returns the command that takes orders on a host; ``--set ssh="ssh -F FILE"`` is another ssh."""
    remote = f"cd {shlex.quote(job.workdir)} && {start_command(job)}"
    return [*shlex.split(job.settings.get("ssh", "ssh")), *_OPTIONS, host, remote]


def train_command(job: LaunchJob, address: str, port: int) -> list[str]:
    hosts = str(job.nodes) if job.least == job.nodes else f"{job.least}:{job.nodes}"
    return job.command("--nnodes", hosts, "--rdzv", f"{address}:{port}", "--node-ranks", str(job.ranks))


def machines(job: LaunchJob) -> TargetMachines:
    """Asks all hosts at once. Raises UsageError without hosts, and ConfigError with all that is wrong with them."""
    refuse_options(job, _NOT_HERE)
    refuse_settings(job, SETTINGS)
    wrong = [repr(host[:_SHOWN]) for host in job.hosts if re.fullmatch(_HOST, host) is None or not host.isprintable()]
    if not job.hosts or wrong:
        rule, fix = "it starts ranks on the machines of a list", "give --hosts host1,host2 or --hostfile FILE"
        raise UsageError(f"--on ssh with {'hosts ' + ', '.join(wrong[:3]) if wrong else 'no hosts'}\n  {rule}\n  {fix}")
    address, found = ask_hosts(job)
    if problems := list(compare(job, found, Path(job.config).read_text(encoding="utf-8"))):
        raise ConfigError(problems, source="the hosts")
    answers = [each for each in found.values() if isinstance(each, dict)]
    silent = [f"{host} {why}: it is tried again, and may join" for host, why in found.items() if isinstance(why, str)]
    if not job.gpus and (idle := answers[0]["gpus"]):
        silent.append(f"the hosts have GPUs, which stay idle: --gpus-per-node {idle} uses them")
    gpus = [float(each["gpu_bytes"]) for each in answers if each["gpus"]]
    least, memory = min(gpus, default=None), min(float(each["memory_bytes"]) for each in answers)
    port = int(answers[0]["port"])
    where = "the smallest host"
    notes = (f"the hosts meet at {address}:{port}", *silent)
    return TargetMachines(where=where, device_bytes=least, host_bytes=memory, port=port, notes=notes)


def ask_hosts(job: LaunchJob) -> tuple[str, dict[str, dict[str, Any] | str]]:
    """Returns the first host's address, and what each host answers; a text: why there is no answer."""
    address, mark = _address(job, job.hosts[0]), secrets.token_hex(8)
    try:
        first = _ask(job, job.hosts[0], look_order(job, mark, address))
        with ThreadPoolExecutor(16) as pool:
            others = list(pool.map(lambda host: _ask(job, host, look_order(job, mark)), job.hosts[1:]))
    finally:
        forget_mark(job.runs)
    return address, dict(zip(job.hosts, [first, *others], strict=True))


def compare(job: LaunchJob, found: dict[str, dict[str, Any] | str], config: str) -> Iterator[Problem]:
    """Yields why these hosts cannot train together, with the name of each."""
    first, silent = job.hosts[0], [host for host, each in found.items() if isinstance(each, str)]
    if first in silent or job.nodes - len(silent) < job.least:
        for host in silent:
            rule = "the first host of the list has the server" if host == first else f"{job.least} hosts are needed"
            yield Problem(what=f"host {host} {found[host]}", rule=rule, fix=_how_to_reach(job, host, str(found[host])))
    for host, each in found.items():
        if isinstance(each, str):
            continue
        versions, reference = [("Paceline", "this machine", __version__)], found[first]
        if isinstance(reference, dict):
            versions.append(("torch", f"host {first}", reference["torch"]))
        for name, other, wanted in versions:
            if (own := each[name.lower()]) != wanted:
                what = f"host {host} has {name} {own}, and {other} has {wanted}"
                rule = "all hosts of a run have the same versions"
                yield Problem(what=what, rule=rule, fix=f"install {name} {wanted} on {host}")
        if each["gpus"] < job.gpus:
            what = f"host {host} has {each['gpus']} GPUs, and --gpus-per-node is {job.gpus}"
            fix = "leave the host out, or ask for fewer"
            yield Problem(what=what, rule="every rank needs a GPU of its own", fix=fix)
        if each["config"] != config:
            state = "does not have" if not each["config"] else "has another"
            fix = "keep the config and the runs in a folder that all hosts share"
            yield Problem(what=f"host {host} {state} {job.config}", rule="all hosts start the same run", fix=fix)
        if not each["sees"]:
            rule = "all hosts write to one folder: each would save a part of every checkpoint"
            fix = "mount the same file system there, or set monitor.folder to one that all hosts have"
            yield Problem(what=f"host {host} does not see {job.runs} of host {first}", rule=rule, fix=fix)
        if host == first and isinstance(each["port"], str):
            fix = "name a free port with --port, and an address of that host"
            yield Problem(what=f"host {host} cannot listen on {each['port']}", rule="the hosts meet there", fix=fix)


def _ask(job: LaunchJob, host: str, order: dict[str, Any]) -> dict[str, Any] | str:
    """Gives one order to a host; returns its answer, or why there is none."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": _LOOK_S}
    try:
        done = subprocess.run(ssh_command(job, host), input=json.dumps(order) + "\n", **options)
    except subprocess.TimeoutExpired:
        return f"did not answer within {_LOOK_S:g} s"
    except FileNotFoundError as error:
        raise LaunchError(f"{error.filename} is not installed here\n  --on ssh uses it") from error
    answer = done.stdout.strip().splitlines()[-1:]
    try:
        return parse_json_object(answer[0])
    except (IndexError, ValueError):
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"does not answer: {words}" if done.returncode == _LOST else f"{_CANNOT_START} {words}"


def _how_to_reach(job: LaunchJob, host: str, why: str) -> str:
    """Returns what to do about a host that gave no answer, or that answered and could not start Paceline."""
    if not why.startswith(_CANNOT_START):
        return f"try: ssh {host} true"
    if "cd: " in why or "can't cd" in why:
        return f"make or mount {job.workdir} there: the run starts in this folder on all hosts"
    install = f"ssh {host} {shlex.quote(job.python)} -m pip install paceline=={__version__}"
    return f"install it there ({install}), or name the Python of the hosts that has it: --python PATH"


def _address(job: LaunchJob, host: str) -> str:
    words = [*shlex.split(job.settings.get("ssh", "ssh")), "-G", host]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=ANSWER_S)
        names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        names = []
    return names[0] if names else host.rpartition("@")[2]


def render(job: LaunchJob) -> str:
    address, port = _address(job, job.hosts[0]), job.port or 29400
    command = shlex.join(train_command(job, address, port))
    return "".join(f"{host}: cd {shlex.quote(job.workdir)} && {LAUNCHED}={job.name} {command}\n" for host in job.hosts)


def submit(job: LaunchJob) -> str:
    return hold(job, "paceline.launch.ssh")


@dataclass(slots=True, kw_only=True)
class _Supervisor:
    job: LaunchJob
    command: list[str]
    meets: str  # the host at which the others meet
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)  # when each host last answered
    is_over: threading.Event = field(default_factory=threading.Event)
    is_cancelled: bool = False
    code: int = FAILED

    def run(self) -> int:
        hosts = sorted(self.job.hosts, key=lambda host: host != self.meets)
        threads = [threading.Thread(target=self._keep, args=(host,), daemon=True) for host in hosts]
        for thread in threads:
            thread.start()
        while not self.is_over.wait(_ALIVE_S):
            self._order({"do": "alive"})
            for host, last in list(self.heard.items()):  # before ssh gives it up: between rounds no host watches it
                if time.monotonic() - last > _SILENT_S and self.heard.pop(host, None) is not None:
                    echo(f"{host}: nothing was heard of it for {_SILENT_S:g} s", err=True)
        for _ in range(2):  # one that has just started would wait for the first for a minute
            deadline = time.monotonic() + _LATE_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            self._order({"do": "signal", "number": int(signal.SIGTERM)})
        return FAILED if self.code == _LOST else self.code

    def signal(self, number: int) -> None:
        self.is_cancelled = True
        self._order({"do": "signal", "number": int(number)})

    def _order(self, order: dict[str, object]) -> None:
        for process in list(self.processes.values()):
            give_order(process, order)

    def _keep(self, host: str) -> None:
        """Has a host take part; again and again, where the run goes on without it."""
        while not self.is_over.is_set():
            command = self.command
            code = self._follow(host, self._start(host))
            if command is not self.command:
                continue  # it met at a host that is lost
            has_room = self.job.least < self.job.nodes and not self.is_cancelled
            if host == self.meets and not (has_room and self._move(host, code)):
                self.code = code
                self.is_over.set()
                return
            why = "ssh does not reach it" if code == _LOST else f"left with exit code {code}"
            if code in (0, 2) or self.is_cancelled:
                return
            if not has_room:
                if not self.is_over.wait(_LATE_S):  # the others have not ended, and would wait for it
                    echo(f"{host}: {why}; all {self.job.nodes} hosts are needed: the others end", err=True)
                    self._order({"do": "signal", "number": int(signal.SIGTERM)})
                return
            if command is self.command:
                echo(f"{host}: {why}; it is tried again in {_AGAIN_S:g} s", err=True)
            if self.is_over.wait(_AGAIN_S):
                return

    def _move(self, lost: str, code: int) -> bool:
        """Finds another host for the others to meet at, where this one was lost; says whether there is one."""
        if code != _LOST and code <= BY_SIGNAL:
            return False
        for host in (*(each for each in self.job.hosts if each != lost), lost):
            address = _address(self.job, host)
            found = _ask(self.job, host, look_order(self.job, secrets.token_hex(8), address))
            forget_mark(self.job.runs)
            if isinstance(found, str) or isinstance(found["port"], str):
                continue
            echo(f"host {lost} is lost: from now on the hosts meet at {host} ({address}:{found['port']})", err=True)
            self.command, self.meets = train_command(self.job, address, int(found["port"])), host
            self._order({"do": "signal", "number": int(signal.SIGTERM)})  # they start again, and meet there
            return True
        return False

    def _start(self, host: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(ssh_command(self.job, host), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        self.processes[host] = process
        order = run_order(self.job, self.command, self.secret, host)
        give_order(process, {**order, "lease_s": _LEASE_S if self.job.least < self.job.nodes else None})
        return process

    def _follow(self, host: str, process: subprocess.Popen[bytes]) -> int:
        """Prints what a host prints, with its name before that of all but the first; returns its exit code."""
        assert process.stdout is not None
        prefix = "" if host == self.job.hosts[0] else f"{host}: "
        for line in process.stdout:
            if line.endswith(ALIVE):
                self.heard[host] = time.monotonic()
            if line != ALIVE:
                echo(f"{prefix}{line.removesuffix(ALIVE).decode('utf-8', 'replace').rstrip()}")
        self.heard.pop(host, None)
        return process.wait()


def main(folder: Path) -> int:
    job = LaunchJob.read(folder)
    address, found = ask_hosts(job)
    first = found[job.hosts[0]]
    if isinstance(first, str) or isinstance(first["port"], str):
        echo(f"host {job.hosts[0]}: {first if isinstance(first, str) else first['port']}", err=True)
        return FAILED
    command = train_command(job, address, int(first["port"]))
    supervisor = _Supervisor(job=job, command=command, meets=job.hosts[0])
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda number, _: supervisor.signal(number))
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
