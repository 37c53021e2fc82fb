"""The table of exit codes in docs/deployment.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.config import config_from_dict
from paceline.health.exit_codes import DONE, MEANINGS
from paceline.launch.kubernetes import render
from paceline.launch.kubernetes_options import KubernetesOptions

ROOT = Path(__file__).parents[2]
OPTIONS = KubernetesOptions(name="digits", image="paceline:0.1")
CONFIG = config_from_dict({"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 1}})


def rows() -> dict[int, list[str]]:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    table = page.partition("## Exit codes for schedulers")[2].partition("\n## ")[0]
    found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if re.match(r"\| \d", line)
    ]
    return {int(row[0]): row[1:] for row in found}


def test_codes_and_meanings_are_those_of_the_code() -> None:
    assert {code: row[0] for code, row in rows().items()} == MEANINGS


@pytest.mark.parametrize("code", sorted(set(MEANINGS) - {DONE}))
def test_a_job_does_what_the_table_says(code: int) -> None:
    (job,) = [each for each in render(OPTIONS, CONFIG) if each["kind"] == "Job"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    taken = (rule["action"] for rule in rules if code in rule.get("onExitCodes", {}).get("values", []))
    words = {"Ignore": "again, not counted", "FailJob": "ends", None: "again, counted"}[next(taken, None)]
    assert rows()[code][3] == words


def test_systemd_does_what_the_table_says() -> None:
    unit = (ROOT / "infrastructure" / "cloud-init.yaml.tftpl").read_text(encoding="utf-8")
    always = re.findall(r"RestartForceExitStatus=(.*)", unit)[0].split()
    never = re.findall(r"RestartPreventExitStatus=(.*)", unit)[0].split()
    for code, row in rows().items():
        if code != DONE:
            expected = "again" if str(code) in always else "ends" if str(code) in never else "again, counted"
            assert row[5] == expected
