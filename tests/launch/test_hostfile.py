"""Lists of hosts: names, slots as Open MPI and DeepSpeed write them, and everything that is wrong with them."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launched_runs import make_project

from paceline.errors import ConfigError
from paceline.launch.hostfile import read_hosts
from paceline.launch.job import LaunchJob
from paceline.launch.start import prepare


@pytest.mark.parametrize(
    ("named", "text", "hosts", "slots"),
    [
        ("a,b", "", ("a", "b"), None),
        ("a:2, me@b:2", "", ("a", "me@b"), 2),
        ("", "# GPUs\nnode1 slots=8\n\nnode2 slots=8 # the second\n", ("node1", "node2"), 8),
        ("", "node1:4\nnode2 slots=4\n", ("node1", "node2"), 4),
        ("fe80::1", "::2\n", ("fe80::1", "::2"), None),
        ("", "", (), None),
    ],
)
def test_hosts_and_their_slots_are_read(named: str, text: str, hosts: tuple[str, ...], slots: int | None) -> None:
    assert read_hosts(named, text.splitlines()) == (hosts, slots)


def test_all_that_is_wrong_with_a_list_is_told_at_once() -> None:
    wrong = ["b:2222", "c slots=0", "d slots=2 max_slots=4", "e:2 slots=2", "f port=22", "g:two", "h " + "x" * 10_000]
    with pytest.raises(ConfigError) as refused:
        read_hosts("a,a", [*wrong, "a"])
    told = str(refused.value)
    for number, line in enumerate(wrong, 1):
        assert f"line {number}: {line[:80]!r}" in told
    assert "it is HOST, HOST slots=N or HOST:N" in told
    assert "ssh's port goes into ~/.ssh/config" in told
    assert "a is listed 3 times" in told
    assert "write a:3 once" in told
    assert len(told) < 2500


@pytest.mark.parametrize("named", ["a:2,b:4", "a:2,b"])
def test_slots_that_differ_are_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="slots of hosts differ: a 2, b"):
        read_hosts(named)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchJob:
    """A launch on two hosts that are this machine, through a command in the place of ssh; ``gone`` does not answer."""
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    stand_in = tmp_path / "ssh"
    stand_in.write_text(
        '#!/bin/sh\ncase "$*" in "-G "*) echo "hostname 127.0.0.1"; exit;; *" gone "*) exit 255;; esac\n'
        'for last; do :; done\nexec sh -c "$last"\n'
    )
    stand_in.chmod(0o755)
    settings = {"ssh": str(stand_in)}
    return LaunchJob(target="ssh", nodes=2, least=2, hosts=("a", "b"), settings=settings, python=sys.executable)


def test_slots_are_the_ranks_of_a_host_and_the_port_is_one_everywhere(asked: LaunchJob) -> None:
    free = ["parallel.node_ranks=null", "train.global_batch=12"]
    target, job, lines = prepare(Path("tiny.yaml"), free, replace(asked, slots=3), is_dry=True)
    assert "6 ranks on CPUs, 3 on each of 2 nodes" in "\n".join(lines)
    (port,) = re.findall(r"the hosts meet at 127\.0\.0\.1:(\d+)", "\n".join(lines))
    shown = target.render(job)
    assert shown.count(f"--rdzv 127.0.0.1:{port} --node-ranks 3") == 2
    assert job.port == int(port)  # the launcher takes the same
    with pytest.raises(ConfigError, match=r"the hosts have 3 slots each, and parallel\.node_ranks = 2"):
        prepare(Path("tiny.yaml"), ["parallel.node_ranks=2"], replace(asked, slots=3), is_dry=True)
    with pytest.raises(ConfigError, match="the hosts have 3 slots each, and --gpus-per-node is 8"):
        prepare(Path("tiny.yaml"), free, replace(asked, slots=3, gpus=8), is_dry=True)
    with pytest.raises(ConfigError, match=r"parallel\.ranks = 2 on 2 nodes with 3 slots each\n.*\n.*auto, or 6"):
        prepare(Path("tiny.yaml"), [*free, "parallel.ranks=2"], replace(asked, slots=3), is_dry=True)


def test_a_host_that_answers_and_lacks_the_package_is_told_so(asked: LaunchJob, tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$0: No module named paceline" >&2\nexit 1\n')
    (tmp_path / "python").chmod(0o755)
    for python, words in ((f"{tmp_path}/python", "No module named paceline"), ("/no/python", "/no/python")):
        with pytest.raises(ConfigError) as refused:
            prepare(Path("tiny.yaml"), [], replace(asked, python=python), is_dry=True)
        told = str(refused.value)
        assert "host b answers, and Paceline does not start there: " in told
        assert words in told
        assert f"install it there (ssh b {python} -m pip install paceline==" in told
        assert "or name the Python of the hosts that has it: --python PATH" in told
    with pytest.raises(ConfigError, match=r"host gone does not answer: exit code 255\n.*\n.*try: ssh gone true"):
        prepare(Path("tiny.yaml"), [], replace(asked, hosts=("a", "gone")), is_dry=True)
