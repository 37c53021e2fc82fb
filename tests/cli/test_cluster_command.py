"""``paceline cluster``: names, one cluster, this machine, and a name that is wrong."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.errors import UsageError

runner = CliRunner()


def test_known_machines_are_listed() -> None:
    shown = runner.invoke(app, ["cluster", "ls"])
    assert shown.exit_code == 0, shown.output
    assert "dgx-h100" in shown.output
    assert "794.5 TFLOP/s bf16" in shown.output
    names = json.loads(runner.invoke(app, ["cluster", "ls", "--json"]).output)
    assert "p5.48xlarge" in names["nodes"]
    assert "infiniband-ndr-8x" in names["networks"]


def test_one_is_shown_with_its_figures() -> None:
    shown = runner.invoke(app, ["cluster", "show", "4x dgx-a100"])
    assert "4x dgx-a100: 32 devices, 4 x 8 (dgx-a100)" in shown.output
    assert "312 TFLOP/s dense, 271.2 measured" in shown.output
    found = json.loads(runner.invoke(app, ["cluster", "show", "32x h100-sxm", "--json"]).output)
    assert (found["devices"], found["node"]["device"]["name"]) == (32, "h100-sxm")


def test_this_machine_is_shown_without_a_name() -> None:
    assert "this machine: " in runner.invoke(app, ["cluster", "show"]).output
    assert json.loads(runner.invoke(app, ["cluster", "show", "--json"]).output)["machine"]["cores"] >= 1


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    found = runner.invoke(app, ["cluster", "show", "dgx-h20"])
    assert isinstance(found.exception, UsageError)
    with pytest.raises(UsageError, match="dgx-h200"):
        raise found.exception
