"""Launched hosts whose network splits, whose clocks differ, or whose link is slow: ``make hosts`` runs them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from host_network import HostNetwork
from launched_runs import checkpoints, is_same_state, make_project, starts, steps, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
# Python imports it first in every process; that of one host goes ahead by seconds.
CLOCK = """
import socket, time

if socket.gethostname() == "h1":
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + 7.0
    time.time_ns = lambda: real_ns() + 7 * 10**9
"""
SLOW_BITS = 8_000_000


def test_a_network_that_splits_is_told_by_a_verdict(four_hosts: HostNetwork, tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=0.05)
    words = ["train.steps=100000", "checkpoint.every_steps=10", "monitor.hang_s=5", "recovery.on_hang=stop", "--detach"]
    done = four_hosts.launch(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: checkpoints(tmp_path), "a checkpoint")
    four_hosts.cut(1)
    verdict = tmp_path / "runs" / "tiny" / "verdict.json"
    wait_until(verdict.exists, "a verdict")
    told = json.loads(verdict.read_text())
    assert "cannot be reached" in told["sentence"], told
    four_hosts.mend(1)
    four_hosts.paceline(tmp_path, "launch", "cancel", "tiny")
    assert four_hosts.paceline(tmp_path, "launch", "logs", "--follow").returncode != 0


def test_clocks_that_differ_by_seconds_change_nothing(
    four_hosts: HostNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make_project(tmp_path / "ours"), make_project(tmp_path / "theirs")
    assert four_hosts.launch(theirs).returncode == 0
    (ours / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ours), os.environ.get("PYTHONPATH", "")]))
    done = four_hosts.launch(ours)
    assert done.returncode == 0, done.stdout + done.stderr
    began = {rank: starts(ours, rank=rank)[0] for rank in range(2)}
    ahead = {each.host: each.time for each in began.values()}
    assert 5.0 < ahead["h1"] - ahead["h0"] < 30.0  # the clocks did differ
    assert steps(ours)[-1] == 60
    assert len(began) == len(starts(ours)) + 1  # one start each
    assert not (ours / "runs" / "tiny" / "verdict.json").exists()
    assert is_same_state(ours, theirs)


def test_a_slow_link_is_named_as_such(four_hosts: HostNetwork, tmp_path: Path) -> None:
    make_project(tmp_path)
    four_hosts.network.shape(1, SLOW_BITS)
    done = four_hosts.launch(tmp_path, "train.steps=40", "checkpoint.every_steps=40", "model.hidden_dim=512")
    assert done.returncode == 0, done.stdout + done.stderr
    report = four_hosts.paceline(tmp_path, "report", "runs/tiny", "--json")
    limits = json.loads(report.stdout)["limits"]
    assert limits["what"] == "link", limits
    assert "a slow link" in limits["sentence"]
