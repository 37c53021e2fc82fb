"""The Terraform of three clouds: it parses, every name refers to something, and cloud-init starts the nodes.

Nothing here talks to a cloud. `start_node.sh` runs for real, each node in namespaces of its own, up to the launch.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloud_nodes import SCRIPT, TEMPLATE, a_node, files_of, node_values

from paceline.health.exit_codes import NO_PROGRESS, PREEMPTED, REFUSED

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "infrastructure"
CLOUDS = ("nebius", "aws", "gcp")
HAS_TERRAFORM = pytest.mark.skipif(shutil.which("terraform") is None, reason="needs terraform")


@cache
def parsed(cloud: str) -> dict[str, Any]:
    """Returns all blocks of a cloud's files by their kind, each as {type: {name: body}} or {name: body}."""
    hcl2 = pytest.importorskip("hcl2", reason="python-hcl2 is part of the extra dev")
    blocks: dict[str, Any] = {}
    for path in sorted((FOLDER / cloud).glob("*.tf")):
        with path.open(encoding="utf-8") as file:
            for kind, found in hcl2.load(file).items():
                if isinstance(found, list):
                    blocks.setdefault(kind, []).extend(found)
    return blocks


def text_of(cloud: str) -> str:
    """Returns the text of a cloud's files without comments and descriptions."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((FOLDER / cloud).glob("*.tf")))
    return re.sub(r"(?m)^\s*(#|description\s*=).*$", "", text)


def unquoted(name: str) -> str:
    return name.strip('"')


def named(cloud: str, kind: str) -> dict[str, Any]:
    """Returns blocks with one name, such as variables and outputs."""
    return {unquoted(name): body for block in parsed(cloud).get(kind, []) for name, body in block.items()}


def typed(cloud: str, kind: str) -> set[str]:
    """Returns the addresses of blocks with a type and a name, such as resources."""
    return {
        f"{unquoted(sort)}.{unquoted(name)}"
        for block in parsed(cloud).get(kind, [])
        for sort, bodies in block.items()
        for name in bodies
        if not name.startswith("__")
    }


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_variable_is_declared_and_used(cloud: str) -> None:
    used = set(re.findall(r"\bvar\.(\w+)", text_of(cloud)))
    assert used == set(named(cloud, "variable"))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_reference_has_its_resource(cloud: str) -> None:
    text = text_of(cloud)
    resources = typed(cloud, "resource")
    provider = {"nebius": "nebius", "aws": "aws", "gcp": "google"}[cloud]
    assert len(resources) >= 4
    # Behind a block's head, every address of a resource is a reference.
    body = re.sub(r'(?m)^(resource|data) "\w+" "\w+" \{$', "", text)
    data = {f"{each}" for each in typed(cloud, "data")}
    assert set(re.findall(rf"(?<!data\.)\b({provider}_\w+\.\w+)", body)) <= resources
    assert set(re.findall(r"\bdata\.(\w+\.\w+)", body)) == data
    local = {unquoted(name) for block in parsed(cloud).get("locals", []) for name in block if not name.startswith("__")}
    assert set(re.findall(r"\blocal\.(\w+)", body)) == local


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize(("name", "default"), [("cluster_size", 1), ("training_epochs", 10), ("save_frequency", 5)])
def test_the_sizes_have_their_defaults(cloud: str, name: str, default: int) -> None:
    assert int(named(cloud, "variable")[name]["default"]) == default


def test_what_all_clouds_have_is_the_same() -> None:
    common = set.intersection(*(set(named(cloud, "variable")) for cloud in CLOUDS))
    assert common >= {"name", "source_url", "config", "ssh_public_key", "node_price_per_hour"}
    heads = [
        (FOLDER / cloud / "variables.tf").read_text(encoding="utf-8").partition("\n# Variables of ")[0]
        for cloud in CLOUDS
    ]
    assert heads[0] == heads[1] == heads[2]
    for cloud in CLOUDS:
        assert set(named(cloud, "output")) == {"nodes", "runs", "log", "cost_per_hour"}


def bodies(cloud: str, kind: str, address: str) -> dict[str, Any]:
    """Returns the body of a block with a type and a name."""
    sort, name = address.split(".")
    found = [each[f'"{sort}"'][f'"{name}"'] for each in parsed(cloud)[kind] if f'"{sort}"' in each]
    assert found, f"{cloud} has no {kind} {address}"
    whole: dict[str, Any] = found[0]
    return whole


@pytest.mark.parametrize(
    ("cloud", "image"),
    [
        ("aws", "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *"),
        ("gcp", "ubuntu-accelerator-2404-amd64-with-nvidia-580"),
        ("nebius", "ubuntu24.04-cuda12"),
    ],
)
def test_images_have_a_python_that_can_install_paceline(cloud: str, image: str) -> None:
    assert image in text_of(cloud)
    assert not re.search(r"22\.?04", text_of(cloud))  # Python 3.10


@pytest.mark.parametrize(
    ("cloud", "address", "kept"),
    [
        ("aws", "aws_launch_template.node", "image_id"),
        ("aws", "aws_instance.node", "user_data"),
        ("gcp", "google_compute_instance.node", "boot_disk[0].initialize_params[0].image"),
        ("gcp", "google_compute_instance.node", 'metadata["user-data"]'),
        ("nebius", "nebius_compute_v1_disk.boot", "source_image_family"),
        ("nebius", "nebius_compute_v1_instance.node", "cloud_init_user_data"),
    ],
)
def test_a_newer_image_or_text_replaces_no_running_node(cloud: str, address: str, kept: str) -> None:
    (lifecycle,) = bodies(cloud, "resource", address)["lifecycle"]
    ignored = lifecycle["ignore_changes"]
    assert kept in [re.sub(r"^\$\{(.*)\}$", r"\1", each) for each in ignored], ignored


def test_a_capacity_block_names_its_market() -> None:
    template = bodies("aws", "resource", "aws_launch_template.node")
    (market,) = [each for each in template["dynamic"] if '"instance_market_options"' in each]
    assert "var.is_capacity_block" in market['"instance_market_options"']["for_each"]
    assert "capacity-block" in market['"instance_market_options"']["for_each"]
    (lifecycle,) = template["lifecycle"]
    assert "var.capacity_reservation_id != null" in lifecycle["precondition"][0]["condition"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_no_file_has_credentials(cloud: str) -> None:
    assert not re.search(r"(?i)\b(secret|password|token|private_key|access_key)\s*=\s*\"", text_of(cloud))


# cloud-init.


def names_in_template() -> set[str]:
    return set(re.findall(r"\$\{(?:jsonencode\()?(\w+)\)?\}", TEMPLATE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_name_of_the_template_is_given(cloud: str) -> None:
    call = re.search(
        r"templatefile\(\"\$\{path\.module\}/\.\./cloud-init\.yaml\.tftpl\", \{(.*?)\n\s*\}\)",
        text_of(cloud),
        re.DOTALL,
    )
    assert call is not None
    assert set(re.findall(r"(?m)^\s*(\w+)\s+=", call[1])) == names_in_template()


def terraform(*words: str, cwd: Path, **others: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1", "NO_COLOR": "1"}
    return subprocess.run(["terraform", *words], cwd=cwd, env=environment, capture_output=True, text=True, **others)


@HAS_TERRAFORM
def test_terraform_reads_all_files_as_they_are_written() -> None:
    done = terraform("fmt", "-check", "-diff", "-recursive", ".", cwd=FOLDER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@HAS_TERRAFORM
def test_terraform_fills_the_template_as_these_tests_do(tmp_path: Path) -> None:
    values = json.dumps(node_values(1, 2))
    done = terraform(
        "console", cwd=tmp_path, input=f"base64encode(templatefile({json.dumps(str(TEMPLATE))}, {values}))\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(base64.b64decode(done.stdout)) == a_node(1, 2)


def test_the_service_runs_the_script_and_knows_the_exit_codes() -> None:
    files = files_of(a_node(0, 2))
    service = files["/etc/systemd/system/paceline-node.service"]
    lines = dict(line.partition("=")[::2] for line in service.splitlines() if "=" in line)
    assert files[lines["ExecStart"]] == SCRIPT.read_text(encoding="utf-8")
    assert lines["EnvironmentFile"] in files
    assert lines["RestartForceExitStatus"] == str(PREEMPTED)
    assert lines["RestartPreventExitStatus"] == f"{REFUSED} {NO_PROGRESS}"


def test_memory_may_be_pinned_however_a_rank_is_started() -> None:
    node = a_node(0, 2)
    files = files_of(node)
    assert "* - memlock unlimited" in files["/etc/security/limits.d/90-paceline.conf"].splitlines()
    for unit in ("paceline-node.service", "ssh.service.d/paceline.conf"):
        assert "LimitMEMLOCK=infinity" in files[f"/etc/systemd/system/{unit}"].splitlines()
    assert node["runcmd"].index(["systemctl", "try-restart", "ssh.service"]) == 2


# Nodes, for real.


class Nodes:
    """Nodes that run `start_node.sh`, each with file systems, a host name and a network of its own."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        (folder / "shared").mkdir()
        venv = folder / "venv" / "bin"
        venv.mkdir(parents=True)
        (venv / "paceline").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (venv / "paceline").chmod(0o755)
        (folder / "venv" / "installed").write_text("https://example.com/paceline.git main\n")

    def start(self, index: int, **others: str) -> subprocess.Popen[str]:
        own = self.folder / f"node-{index}"
        for name in ("root", "etc", "mount"):
            (own / name).mkdir(parents=True, exist_ok=True)
        if not (own / "key").exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(own / "key")], check=True)
        variables = dict(
            line.split("=", 1) for line in files_of(a_node(index, self.size))["/etc/paceline/node.env"].splitlines()
        )
        variables |= {
            "MOUNT_SOURCE": str(self.folder / "shared"),
            "SHARED": str(own / "mount"),
            "STATE": str(own / "etc"),
            "HOST_KEY": str(own / "key.pub"),
            "TRAIN_USER": "root",
            "VENV": str(self.folder / "venv"),
            "WORKDIR": str(self.folder),
            "LOOK_S": "1",
            "WAIT_S": "60",
            **others,
        }
        steps = (
            f"mount --bind {own}/root /root && hostname node-{index} && ip link set lo up "
            "&& ip link add eth0 type veth peer name eth1 && ip link set eth0 up "
            f"&& ip address add 10.77.0.{index + 1}/24 dev eth0 "
            f"&& exec sh {SCRIPT}"
        )
        return subprocess.Popen(
            ["unshare", "--mount", "--uts", "--net", "sh", "-c", steps],
            env={"PATH": os.environ["PATH"]} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def can_unshare() -> bool:
    command = [
        "unshare",
        "--mount",
        "--uts",
        "--net",
        "ip",
        "link",
        "add",
        "eth0",
        "type",
        "veth",
        "peer",
        "name",
        "eth1",
    ]
    tools = all(map(shutil.which, ("unshare", "ip", "ssh-keygen", "mountpoint", "getent")))
    return os.geteuid() == 0 and tools and not subprocess.run(command, capture_output=True, check=False).returncode


needs_root = pytest.mark.skipif(not can_unshare(), reason="namespaces need root, unshare, ip and ssh-keygen")


@needs_root
def test_nodes_find_one_another_and_the_first_one_launches(tmp_path: Path, stack: ExitStack) -> None:
    nodes = Nodes(tmp_path, 3)
    started = []
    for index in (2, 0, 1):  # in whatever order the cloud starts them
        process = stack.enter_context(nodes.start(index))
        stack.callback(process.kill)
        started.append((index, process))
    first_node = dict(started)[0]
    output, errors = first_node.communicate(timeout=100)
    assert first_node.returncode == 0, errors
    words = output.splitlines()
    state = tmp_path / "node-0" / "etc"
    assert words == [
        *("launch", "configs/digits.yaml", "train.epochs=10", "checkpoint.every_epochs=5"),
        *(f"monitor.folder={tmp_path}/node-0/mount/runs", "--gpus-per-node", "8"),
        *("--on", "ssh", "--hostfile", f"{state}/hosts", "--python", f"{tmp_path}/venv/bin/python"),
    ]
    assert (state / "hosts").read_text().split() == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    first = (tmp_path / "node-0/root/.ssh/id_ed25519.pub").read_text()
    for index in (1, 2):
        ssh = tmp_path / f"node-{index}" / "root" / ".ssh"
        assert (ssh / "authorized_keys").read_text() == first
        assert not (ssh / "id_ed25519").exists()
        key = " ".join((tmp_path / f"node-{index}" / "key.pub").read_text().split()[:2])
        assert f"10.77.0.{index + 1} {key}" in (tmp_path / "node-0/root/.ssh/known_hosts").read_text()
    shared = [path.read_text() for path in (tmp_path / "shared" / ".nodes").iterdir()]
    assert not any("PRIVATE" in text for text in shared)


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not path.is_file() or path.read_text() != text:
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.05)


@needs_root
def test_a_first_node_that_is_replaced_is_trusted_and_the_old_one_no_more(tmp_path: Path, stack: ExitStack) -> None:
    nodes = Nodes(tmp_path, 2)
    keys = tmp_path / "node-1" / "root" / ".ssh" / "authorized_keys"
    keys.parent.mkdir(parents=True, mode=0o700)
    keys.write_text("ssh-ed25519 AAAA someone\n")
    other = stack.enter_context(nodes.start(1))
    stack.callback(other.kill)
    for _ in range(2):
        first = stack.enter_context(nodes.start(0))
        _, errors = first.communicate(timeout=100)
        assert first.returncode == 0, errors
        made = tmp_path / "node-0" / "root" / ".ssh"
        wait_for(keys, "ssh-ed25519 AAAA someone\n" + (made / "id_ed25519.pub").read_text())
        shutil.rmtree(made)
    assert other.poll() is None


@needs_root
def test_what_no_start_can_mend_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    old = tmp_path / "old" / "python3"
    old.parent.mkdir()
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.10.12\nexit 1\n')
    old.chmod(0o755)
    nodes = Nodes(tmp_path, 1)
    cases = {
        "Paceline needs 3.11 or newer": {"PATH": f"{old.parent}:{os.environ['PATH']}"},
        "the image has no aws-ofi-nccl in /opt": {"NETWORK": "efa"},
    }
    for words, variables in cases.items():
        process = stack.enter_context(nodes.start(0, **variables))
        _, errors = process.communicate(timeout=100)
        assert process.returncode == REFUSED
        assert words in errors


@needs_root
def test_one_node_trains_alone_and_goes_on_after_a_restart(tmp_path: Path, stack: ExitStack) -> None:
    nodes = Nodes(tmp_path, 1)
    for expected in ([], ["--resume"]):
        process = stack.enter_context(nodes.start(0))
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        assert output.splitlines()[7:] == ["--on", "local", *expected]
        (tmp_path / "shared/runs/digits").mkdir(exist_ok=True)
        (tmp_path / "shared/runs/digits/config.yaml").write_text("name: digits\n")
    assert (tmp_path / "node-0/root/.ssh/authorized_keys").read_text().count("\n") == 1
