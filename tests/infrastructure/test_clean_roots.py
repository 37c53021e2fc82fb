"""docs/deployment.md and the nodes of a cluster on fresh machines: clean roots of two distributions, real commands.

`make roots` runs it: as root, with debootstrap and a mirror; minutes.
"""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from clean_roots import MIRRORS, PATIENCE_S, ROOT, CleanRoot, end, make_repository, make_root
from cloud_nodes import a_node, files_of

from paceline.health.exit_codes import DONE, PREEMPTED, REFUSED
from slow_links.network import NoNetworkError, check_able, hosts

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(3 * PATIENCE_S)]

PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
HERE = "cd paceline && source .venv/bin/activate && "  # where the commands of the page are called
SOURCE = "/srv/source"


def commands(title: str) -> list[str]:
    """Returns the lines of the first block of a section of the page."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    block = re.search(r"(?m)(?:^    .+\n)+", section)
    assert block is not None, title
    return [line.strip() for line in block[0].splitlines()]


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def train_to_the_first_step(machine: CleanRoot, command: str, run: str) -> None:
    """Starts a command of the page, and asks it to end after a step: it saves, and says so by its exit code."""
    records = machine.folder / "root/paceline/runs" / run / "records" / "rank-0.jsonl"
    with machine.start(f"{HERE}exec {command}") as process:
        try:
            wait_until(lambda: records.is_file() and records.read_text().count("\n") > 1, process)
            end(process, signal.SIGTERM)
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            end(process)
    assert process.returncode in (DONE, PREEMPTED), output


@pytest.fixture(scope="module", params=["bookworm", "trixie", "noble"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CleanRoot]:
    """A fresh machine on which the page's commands were called, from the first to the last."""
    assert request.param in MIRRORS
    folder = tmp_path_factory.mktemp("clean") / "root"
    with removed(folder):
        made = make_root(request.param, folder)
        make_repository(folder / SOURCE[1:])
        made.run(" && ".join(commands("A fresh machine")), REPOSITORY=SOURCE)
        yield made


@contextlib.contextmanager
def removed(*folders: Path) -> Iterator[None]:
    """Removes roots in the end: with CUDA's packages each has gigabytes, and pytest keeps the folders of three runs."""
    try:
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def copy_root(source: CleanRoot, target: CleanRoot, *left_out: str) -> None:
    """Copies a root, without some of its folders."""
    target.folder.mkdir()
    excluded = [f"--exclude=./{each}" for each in left_out]
    words = ["tar", "--numeric-owner", "-C", str(source.folder), *excluded, "-c", "."]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        subprocess.run(["tar", "-C", str(target.folder), "-xp"], stdin=process.stdout, check=True)
    assert process.returncode == 0


def test_one_machine_trains_by_the_commands_of_the_page(machine: CleanRoot) -> None:
    first, second = commands("One machine")
    assert first == "paceline train configs/gpt_pydoc.yaml"
    train_to_the_first_step(machine, first, "gpt-pydoc")
    assert second.startswith("paceline train configs/digits.yaml")
    machine.run(f"{HERE}{second}")
    (by_torch,) = re.findall(r"(?m)^    (torchrun .*)$", (ROOT / "docs" / "train.md").read_text(encoding="utf-8"))
    machine.run(f"{HERE}{by_torch}")
    assert '"world_size":2' in (machine.folder / "root/paceline/runs/mine/records/rank-1.jsonl").read_text()


@contextlib.contextmanager
def two_hosts(first: CleanRoot, second: CleanRoot) -> Iterator[tuple[CleanRoot, CleanRoot]]:
    """Gives two roots, or one of them twice, networks of their own, names, and sshds that know one key of root."""
    try:
        check_able()
    except NoNetworkError as error:
        pytest.skip(str(error))
    names = "127.0.0.1 localhost\n10.77.0.2 host1\n10.77.1.2 host2\n"
    with hosts(2) as network, contextlib.ExitStack() as stack:
        made = []
        for number, each in enumerate((first, second)):
            (each.folder / "etc/hosts").write_text(names)
            host = replace(each, space=network.host(number))
            host.run("mkdir -p /run/sshd && ssh-keygen -A >/dev/null")
            # Low for the sshd itself: what a session has above it comes from PAM.
            server = host.start(
                f"ulimit -Sl 64 && exec /usr/sbin/sshd -D -o PidFile=none -o ListenAddress=host{number + 1}"
            )
            stack.enter_context(server)
            stack.callback(end, server)
            wait_until(lambda pid=server.pid: name_of(pid) == "sshd", server)  # all is mounted
            made.append(replace(host, beside=server.pid))
        yield made[0], made[1]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_two_machines_train_by_the_commands_of_the_page(machine: CleanRoot) -> None:
    each, elastic = commands("Several machines")
    with two_hosts(machine, machine) as (first, second):
        with second.start(f"{HERE}{each} name=both") as process:
            try:
                first.run(f"{HERE}{each} name=both")
                assert process.wait(PATIENCE_S) == DONE, process.communicate()[0]
            finally:
                end(process)
        assert "--nnodes 2:4" in elastic
        first.run(
            "ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519 && cp .ssh/id_ed25519.pub .ssh/authorized_keys && "
            "until ssh-keyscan host1 host2 2>/dev/null > .ssh/known_hosts; test -s .ssh/known_hosts; do sleep 0.2; done"
        )
        (launch,) = re.findall(
            r"(?m)^    (paceline launch .* --on ssh .*)$", PAGE.partition("\n## Several machines\n")[2]
        )
        output = first.run(f"{HERE}{launch.replace(' --gpus-per-node 8', '')} name=launched")
        assert "run launched on ssh" in output
    runs = machine.folder / "root/paceline/runs"
    for name in ("both", "launched"):
        assert (runs / name / "checkpoints").is_dir()
        assert '"world_size":4' in (runs / name / "records" / "rank-0.jsonl").read_text().splitlines()[0]


# Nodes of a cluster.


def memlock() -> str:
    """Returns what sessions get: without a limit, or as much as this root may give where it may raise none itself."""
    found = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
    assert found is not None
    may_raise = int(found[1], 16) >> 24 & 1  # CAP_SYS_RESOURCE
    return "unlimited" if may_raise else str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] // 1024)


def node(machine: CleanRoot, index: int, size: int, **others: str) -> tuple[str, dict[str, str]]:
    """Writes what cloud-init writes to a node; returns the command of its service, and its variables."""
    files = files_of(a_node(index, size))
    for path in ("/usr/local/sbin/paceline-node", "/etc/security/limits.d/90-paceline.conf"):
        (machine.folder / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (machine.folder / path[1:]).write_text(files[path].replace("memlock unlimited", f"memlock {memlock()}"))
    variables = dict(line.split("=", 1) for line in files["/etc/paceline/node.env"].splitlines())
    variables |= {"SOURCE_URL": SOURCE, "MOUNT_SOURCE": "/srv/shared", "GPUS_PER_NODE": "0", "LOOK_S": "1", **others}
    return "sh /usr/local/sbin/paceline-node", variables


@pytest.fixture
def nodes(machine: CleanRoot, tmp_path: Path) -> Iterator[tuple[CleanRoot, CleanRoot]]:
    """Two machines that share a folder: a copy of the fresh one without what the page's commands made; nothing yet."""
    shared = {str(tmp_path): "/srv/shared"}
    tmp_path.chmod(0o755)  # the nodes train as a user of their own
    one, two = (
        replace(machine, folder=tmp_path.with_name(f"{tmp_path.name}-{name}"), binds=shared) for name in ("one", "two")
    )
    with removed(one.folder, two.folder):
        copy_root(machine, one, "root/paceline")
        yield one, two


def test_the_nodes_of_a_cluster_install_train_and_start_again(
    nodes: tuple[CleanRoot, CleanRoot], tmp_path: Path
) -> None:
    one, two = nodes
    one.run("useradd --create-home --shell /bin/bash paceline && mkdir -p /etc/paceline /opt/paceline/source")
    (one.folder / "opt/paceline/source/half").write_text("an installation that was interrupted")
    command, variables = node(one, 0, 1, NETWORK="efa")
    assert "the image has no aws-ofi-nccl" in one.run(command, code=REFUSED, **variables)
    plugin = one.folder / "opt/amazon/ofi-nccl/lib/libnccl-net.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    output = one.run(command, **variables | {"TRAINING_EPOCHS": "1"})
    assert "installing /srv/source at main" in output
    assert (one.folder / "etc/nccl.conf").read_text() == "NCCL_NET=AWS Libfabric\n"
    assert "/opt/amazon/ofi-nccl/lib\n" in (one.folder / "etc/ld.so.conf.d/paceline-nccl.conf").read_text()
    again = one.run(command, **variables | {"TRAINING_EPOCHS": "2"})
    assert "installing" not in again
    assert (tmp_path / "runs" / "digits" / "checkpoints").is_dir()
    assert not (tmp_path / "runs" / "digits-2").exists()
    scripts = one.folder / "usr/local/gib/scripts"
    scripts.mkdir(parents=True)
    (scripts / "set_nccl_env.sh").write_text("export NCCL_NET=gIB NCCL_IB_TC=52\n")
    (one.folder / "usr/local/gib/lib64").mkdir()
    (one.folder / "usr/local/gib/lib64/libnccl-net.so").touch()
    one.run(command, **variables | {"NETWORK": "gib", "TRAINING_EPOCHS": "3"})
    assert set((one.folder / "etc/nccl.conf").read_text().split()) == {"NCCL_NET=gIB", "NCCL_IB_TC=52"}
    (one.folder / "etc/nccl.conf").unlink()

    copy_root(one, two, "root/.cache")
    for path in (two.folder / "etc/ssh").glob("ssh_host_*"):
        path.unlink()
    with two_hosts(one, two) as (first, second):
        (tmp_path / "runs").rename(tmp_path / "before")
        command, variables = node(second, 1, 2)
        with second.start(command, **variables) as process:
            try:
                command, variables = node(first, 0, 2)
                output = first.run(command, **variables | {"TRAINING_EPOCHS": "2"})
                limit = first.run("su paceline -c 'ssh 10.77.1.2 ulimit -l'")
                assert process.poll() is None
            finally:
                end(process)
    assert "all nodes are there: 10.77.0.2 10.77.1.2" in output
    assert limit.strip() == memlock()
    records = (tmp_path / "runs" / "digits" / "records" / "rank-0.jsonl").read_text()
    assert '"world_size":4' in records.splitlines()[0]
