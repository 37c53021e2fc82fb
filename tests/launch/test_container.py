"""The image and the compose file: clean, pinned, made of commands that paceline reads; `make container` builds it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from paceline.cli.app import app
from paceline.config import load_config
from paceline.launch.kubernetes import USER_ID

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (the extra dev has it)")
def test_the_dockerfile_is_clean() -> None:
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout


def test_the_base_has_a_version_and_the_user_is_not_root() -> None:
    assert re.search(r"^ARG BASE=\w+:\d+\.\d+\.\d+-", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == [f"{USER_ID}:{USER_ID}"]


def test_what_is_copied_is_not_ignored() -> None:
    copied = {
        word.rstrip("/")
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for word in line.split()[:-1]
        if not word.startswith("--")
    }
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


def test_the_command_of_the_image_trains_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = yaml.safe_load(re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)[-1])
    assert command[:2] == ["paceline", "train"]
    load_config(Path(command[2]))


def test_the_workers_of_compose_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    whole: Any = typer.main.get_command(app)
    services = COMPOSE["services"]
    workers = [services["worker-1"], services["worker-2"]]
    assert [each["hostname"] for each in workers] == ["worker-1", "worker-2"]
    for worker in workers:
        program, verb, *words = worker["command"]
        assert (program, verb) == ("paceline", "train")
        given = whole.commands["train"].make_context("train", words).params
        assert given["nnodes"] == str(len(workers))
        assert given["rdzv"].partition(":")[0] == "worker-1"
        assert worker["environment"]["PACELINE_SECRET"].startswith("${PACELINE_SECRET:?")


@pytest.mark.parametrize("name", ["worker-1", "worker-2", "page"])
def test_services_of_compose_may_do_little(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
