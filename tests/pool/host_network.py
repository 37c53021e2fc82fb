"""Hosts in network namespaces, each with a name and an sshd of its own, on links that can be shaped and cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from launched_runs import PATIENCE_S, environment

from slow_links.network import INTERFACE, Network, NoNetworkError, check_able, hosts

SSHD = "/usr/sbin/sshd"
HOSTS = 4
# Python imports it first in every process of a host. (libfaketime makes time.sleep fail on Python 3.11.)
CLOCKS = """
import os, socket, time

name = socket.gethostname()
os.environ["TMPDIR"] = os.path.join({folder!r}, name)  # each host has its own
os.makedirs(os.environ["TMPDIR"], exist_ok=True)
ahead_s = {clocks}.get(int(name[1:]) if name[1:].isdecimal() else -1, 0)
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + ahead_s
time.time_ns = lambda: real_ns() + ahead_s * 10**9
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNetwork:
    """The hosts ``h0``, ``h1`` and so on; commands are called on one of them, as a user would."""

    network: Network
    folder: Path

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder / 'ssh_config'}"

    def paceline(self, where: Path, *words: str, host: int = 0) -> subprocess.CompletedProcess[str]:
        """Calls the command line on a host, and waits for it."""
        command = [*self.on(host), sys.executable, "-m", "paceline", *words]
        return subprocess.run(
            command, cwd=where, env=environment(), capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )

    def launch(self, where: Path, *words: str, hosts: str = "h0,h1", host: int = 0) -> subprocess.CompletedProcess[str]:
        """Launches a run from a host, the first one by default."""
        options = ["--on", "ssh", "--hosts", hosts, "--set", f"ssh={self.ssh}"]
        paths = [str(self.folder)] if (self.folder / "sitecustomize.py").exists() else []
        paths += [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        options += ["--set", f"pythonpath={os.pathsep.join(paths)}"]
        return self.paceline(where, "launch", "tiny.yaml", *words, *options, host=host)

    def on(self, host: int) -> list[str]:
        return [
            "ip",
            "netns",
            "exec",
            self.network.host(host),
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname h{host}; exec "$@"',
            "sh",
        ]

    def cut(self, host: int) -> None:
        subprocess.run(["ip", "-n", self.network.host(host), "link", "set", INTERFACE, "down"], check=True)

    def mend(self, host: int) -> None:
        name = self.network.host(host)
        subprocess.run(["ip", "-n", name, "link", "set", INTERFACE, "up"], check=True)
        subprocess.run(["ip", "-n", name, "route", "add", "10.77.0.0/16", "via", f"10.77.{host}.1"], check=False)


@pytest.fixture
def four_hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HostNetwork]:
    """Starts the hosts; skips where that cannot be. A parameter is what the last host does first, such as a mount."""
    before = getattr(request, "param", "true").format(folder=tmp_path)
    try:
        with network_of(HOSTS, tmp_path / "ssh", before=before) as made:
            yield made
    except NoNetworkError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def network_of(
    num_hosts: int, folder: Path, *, before: str = "true", clocks_s: Sequence[int] = ()
) -> Iterator[HostNetwork]:
    """Starts so many hosts, with clocks that go ahead by so many seconds. Raises NoNetworkError where that cannot be.

    The last host runs the command ``before`` first. Of clocks, those of Python programs differ: files keep the time of
    the disk, which all hosts share.
    """
    check_able()
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        raise NoNetworkError("no sshd\n  the hosts are reached by ssh\n  apt-get install openssh-server")
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(hosts(num_hosts))
        made = HostNetwork(network=network, folder=folder)
        _write_settings(made)
        if clocks_s:
            (folder / "sitecustomize.py").write_text(
                CLOCKS.format(clocks=dict(enumerate(clocks_s)), folder=str(folder))
            )
        for host in range(num_hosts):
            process = start_sshd(made, host, before if host == num_hosts - 1 else "true")
            stack.callback(_stop, process)
        yield made


def start_sshd(made: HostNetwork, host: int, before: str = "true") -> subprocess.Popen[bytes]:
    """Starts the sshd of a host, and waits until it listens; ``before`` is run in its place first, such as a mount."""
    Path("/run/sshd").mkdir(exist_ok=True)
    command = [*made.on(host), "sh", "-c", f"{before}; exec {SSHD} -D -f {made.folder}/sshd_config"]
    log = (made.folder / f"sshd-{host}.log").open("ab")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    log.close()
    last = made.network.host(made.network.num_hosts - 1)
    asked = ["ip", "netns", "exec", last, *made.ssh.split(), f"h{host}", "true"]
    for _ in range(100):
        if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return process
        time.sleep(0.1)
    _stop(process)
    raise NoNetworkError(f"sshd does not start: {(made.folder / f'sshd-{host}.log').read_text()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _write_settings(made: HostNetwork) -> None:
    folder = made.folder
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPermitRootLogin yes\nStrictModes no\n"
        "UsePAM no\nPidFile none\nPasswordAuthentication no\nMaxStartups 100\n"
    )
    (folder / "ssh_config").write_text(
        "".join(f"Host h{host}\n  HostName {made.network.address(host)}\n" for host in range(made.network.num_hosts))
        + f"Host *\n  User root\n  IdentityFile {folder}/user_key\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
