"""Roots of Debian and Ubuntu with nothing in them but what debootstrap installs: fresh machines, to try what docs say.

A root is made once for each suite and kept in the folder for temporary files; each test gets a copy. Commands run in
namespaces of their own, so that no mount outlives them. pip and apt read what this machine reads: its settings are
copied, and ``ROOT_BINDS`` names folders that the roots see, for indexes in folders and certificates of one's own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEBIAN, UBUNTU = "http://deb.debian.org/debian", "http://archive.ubuntu.com/ubuntu"
# With Python 3.11, 3.13 and 3.12. Ubuntu's archive has amd64 alone.
MIRRORS = {"bookworm": DEBIAN, "trixie": DEBIAN, "noble": UBUNTU}
# What an installed system has: venv is not in Ubuntu's main.
COMPONENTS = {DEBIAN: "main", UBUNTU: "main,universe"}
# By which debootstrap makes all of Ubuntu's releases; Debian's does not know the names of newer ones.
SCRIPTS = {DEBIAN: "sid", UBUNTU: "gutsy"}
COPIED = ("/etc/resolv.conf", "/etc/pip.conf", "/root/.config/pip/pip.conf")
PATIENCE_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRoot:
    """A machine: its files are below ``folder``. ``space``: the network namespace in which its commands run.

    ``binds``: folders of this machine, and where the root sees them. ``beside``: a process of the machine, whose mounts
    and network all further commands share, as they do on a real one: what one mounts, a session over ssh sees.
    """

    folder: Path
    space: str | None = None
    beside: int | None = None
    binds: Mapping[str, str] = field(default_factory=dict)

    def start(self, command: str, **variables: str) -> subprocess.Popen[str]:
        """Starts a line of shell as root of the machine."""
        folder, inside = shlex.quote(str(self.folder)), [f"{name}={value}" for name, value in variables.items()]
        binds = {each: each for each in ("/proc", "/sys", "/dev", *os.environ.get("ROOT_BINDS", "").split())}
        mounts = "".join(
            f"mkdir -p {folder}{there} && mount --rbind {here} {folder}{there} && "
            for here, there in (binds | dict(self.binds)).items()
        )
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        chroot = ["chroot", str(self.folder), "env", "-i", f"PATH={path}", "HOME=/root", "LANG=C.UTF-8"]
        chroot += ["DEBIAN_FRONTEND=noninteractive", *inside, "bash", "-c", f"cd /root && {command}"]
        if self.beside is not None:
            words = ["nsenter", "--target", str(self.beside), "--mount", "--net", *chroot]
        else:
            apart = ["unshare", "--mount", "--propagation", "private", "sh", "-ec"]
            words = ["ip", "netns", "exec", self.space] if self.space else []
            words += [*apart, f"{mounts}exec {shlex.join(chroot)}"]
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str, *, code: int = 0, **variables: str) -> str:
        """Runs a line of shell as root of the machine, and returns what it printed."""
        with self.start(command, **variables) as process:
            try:
                output, _ = process.communicate(timeout=PATIENCE_S)
            finally:
                end(process)
        assert process.returncode == code, f"{command}\n{output}"
        return output


def end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    """Sends a signal to a command of a root and to all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def make_root(suite: str, folder: Path) -> CleanRoot:
    """Makes a clean root in a folder that is not there. Skips the test where that cannot be."""
    if os.geteuid() or shutil.which("debootstrap") is None:
        pytest.skip("clean roots need root, and debootstrap: apt install debootstrap")
    kept = Path(tempfile.gettempdir()) / f"paceline-root-{suite}"
    if not kept.is_dir():
        made = Path(tempfile.mkdtemp(prefix=f"{kept.name}-"))
        mirror, options = MIRRORS[suite], ["--variant=minbase", "--include=ca-certificates"]
        command = ["debootstrap", *options, f"--components={COMPONENTS[mirror]}", suite, str(made), mirror]
        command.append(f"/usr/share/debootstrap/scripts/{SCRIPTS[mirror]}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(made)
            pytest.skip(f"no root of {suite} can be made here: {(done.stdout + done.stderr).splitlines()[-1]}")
        made.chmod(0o755)
        made.rename(kept)
    subprocess.run(["cp", "-a", str(kept), str(folder)], check=True)
    for path in filter(os.path.isfile, COPIED):
        (folder / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path[1:])
    # As installers write it: without its own name torchrun's ranks do not find it.
    (folder / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    return CleanRoot(folder=folder)


def make_repository(folder: Path) -> None:
    """Makes a repository of all files of this one that git knows, as they are now, with a branch main."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    folder.mkdir(parents=True)
    subprocess.run(["xargs", "-0", "cp", "-P", "--parents", "-t", str(folder)], cwd=ROOT, input=listed, check=True)
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "all files"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *words], cwd=folder, check=True)
