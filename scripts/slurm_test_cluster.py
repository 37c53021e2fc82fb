"""A Slurm of four nodes on this one machine, for tests: installed if it is missing, started, and stopped again.

    python scripts/slurm_test_cluster.py -- COMMAND ...     runs COMMAND with the cluster, and stops it
    python scripts/slurm_test_cluster.py --nodes 4 --cpus 2 -- sinfo

munge, slurmctld and one slurmd for each node keep all of their files in a new folder, and take free ports of this
machine; nothing of an installed Slurm is touched. COMMAND finds the cluster by SLURM_CONF. It needs root: slurmd
starts processes as the users of jobs, and apt installs what is missing (slurmctld, slurmd, slurm-client, munge).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
PATIENCE_S = 60.0
CONFIG = """
ClusterName=paceline-test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=90
MinJobAge=600
SlurmctldTimeout=30
SlurmdTimeout=30
InactiveLimit=0
OverTimeLimit=0
JobRequeue=1
SchedulerParameters=sched_interval=2,batch_sched_delay=0,defer_batch=0
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def main() -> int:
    """Runs a command with the cluster, and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=int, default=2, help="what each node says that it has")
    parser.add_argument("command", nargs="+", help="after --")
    asked = parser.parse_args()
    if os.geteuid():
        sys.exit("slurm_test_cluster: slurmd needs root")
    install()
    with cluster(asked.nodes, asked.cpus) as environment:
        return subprocess.run(asked.command, env=environment, check=False).returncode


def install() -> None:
    """Installs what is missing by apt."""
    if all(map(find, PROGRAMS)):
        return
    if shutil.which("apt-get") is None:
        sys.exit(f"slurm_test_cluster: install {', '.join(PACKAGES)}: this system has no apt-get")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
    if subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=False).returncode:
        subprocess.run(["apt-get", "update", "-q"], env=quiet, stdout=subprocess.DEVNULL, check=True)
        subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=True)


def find(program: str) -> str | None:
    """Returns the path of a program, also of one for administrators."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def cluster(nodes: int, cpus: int) -> Iterator[dict[str, str]]:
    """Starts the daemons in a new folder; yields the environment of commands that use them."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name, contextlib.ExitStack() as stack:  # nosec B108
        folder = Path(name)
        folder.chmod(0o755)
        write_config(folder, nodes, cpus)
        start_munge(folder, stack)
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for variable in [each for each in environment if each.startswith(("SLURM_JOB", "SLURM_STEP"))]:
            del environment[variable]
        start(stack, environment, "slurmctld", "-D")
        for number in range(1, nodes + 1):
            start(stack, environment, "slurmd", "-D", "-N", f"n{number}")
        wait_until_idle(environment, nodes)
        yield environment


def write_config(folder: Path, nodes: int, cpus: int) -> None:
    """Writes slurm.conf with free ports of this machine."""
    (folder / "state").mkdir()
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(nodes + 1):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    lines = [
        f"NodeName=n{number} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[number]} CPUs={cpus} "
        f"RealMemory={memory} State=UNKNOWN"
        for number in range(1, nodes + 1)
    ]
    text = CONFIG.format(folder=folder, controller=ports[0], nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text, encoding="utf-8")


def start_munge(folder: Path, stack: contextlib.ExitStack) -> None:
    """Starts a munge of the cluster's own, whose socket and key lie in its folder."""
    place = folder / "munge"
    place.mkdir()
    place.chmod(0o755)
    key = place / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    options = [f"--key-file={key}", f"--socket={place}/munge.socket", f"--pid-file={place}/munged.pid"]
    options += [f"--log-file={place}/munged.log", f"--seed-file={place}/munged.seed", "--force"]
    start(stack, dict(os.environ), "munged", "--foreground", *options)
    wait_for(lambda: (place / "munge.socket").exists(), "munged")


def start(stack: contextlib.ExitStack, environment: dict[str, str], program: str, *options: str) -> None:
    """Starts a daemon in the foreground, as a child that ends with the cluster."""
    path = find(program)
    assert path is not None
    process = subprocess.Popen(
        [path, *options],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    stack.callback(stop, process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks a daemon to end, and insists."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_idle(environment: dict[str, str], nodes: int) -> None:
    """Waits until the controller answers, and every node is ready for a job."""

    def is_ready() -> bool:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return asked.stdout.split() == ["idle"] * nodes

    wait_for(is_ready, "slurmctld and its nodes")


def wait_for(is_met: object, who: str) -> None:
    """Waits for something that daemons do."""
    assert callable(is_met)
    deadline = time.monotonic() + PATIENCE_S
    while not is_met():
        if time.monotonic() > deadline:
            sys.exit(f"slurm_test_cluster: {who} did not start within {PATIENCE_S:g} s")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
