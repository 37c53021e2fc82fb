"""Four hosts in network namespaces, each with a name and an sshd of its own, on links that can be shaped and cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launched_runs import PATIENCE_S, environment

from slow_links.network import INTERFACE, Network, NoNetworkError, check_able, hosts

SSHD = "/usr/sbin/sshd"
HOSTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNetwork:
    """The hosts ``h0`` to ``h3``; commands are called on one of them, as a user would."""

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

    def launch(self, where: Path, *words: str, hosts: str = "h0,h1") -> subprocess.CompletedProcess[str]:
        """Launches a run from the first host."""
        options = ["--on", "ssh", "--hosts", hosts, "--set", f"ssh={self.ssh}"]
        options += ["--set", f"pythonpath={os.environ.get('PYTHONPATH', '')}"]
        return self.paceline(where, "launch", "tiny.yaml", *words, *options)

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
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("no sshd: apt-get install openssh-server")
    folder = tmp_path / "ssh"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            check_able()
            network = stack.enter_context(hosts(HOSTS))
        except NoNetworkError as error:
            pytest.skip(str(error))
        made = HostNetwork(network=network, folder=folder)
        _write_settings(made)
        for host in range(HOSTS):
            before = getattr(request, "param", "true") if host == HOSTS - 1 else "true"
            stack.callback(_stop, start_sshd(made, host, before.format(folder=tmp_path)))
        yield made


def start_sshd(made: HostNetwork, host: int, before: str = "true") -> subprocess.Popen[bytes]:
    """Starts the sshd of a host, and waits until it listens; ``before`` is run in its place first, such as a mount."""
    Path("/run/sshd").mkdir(exist_ok=True)
    command = [*made.on(host), "sh", "-c", f"{before}; exec {SSHD} -D -f {made.folder}/sshd_config"]
    log = (made.folder / f"sshd-{host}.log").open("ab")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    log.close()
    asked = ["ip", "netns", "exec", made.network.host(0), *made.ssh.split(), f"h{host}", "true"]
    for _ in range(100):
        if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return process
        time.sleep(0.1)
    _stop(process)
    pytest.skip(f"sshd does not start: {(made.folder / f'sshd-{host}.log').read_text()}")


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
        "".join(f"Host h{host}\n  HostName {made.network.address(host)}\n" for host in range(HOSTS))
        + f"Host *\n  User root\n  IdentityFile {folder}/user_key\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
