"""The script that compares two checkouts: its facts leave out what time changes, and it finds a planted difference."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("compare_checkouts")


def _step(**changes: Any) -> dict[str, Any]:
    measured = {"step_s": 0.1, "time": 1.0, "memory_bytes": 3}
    return {"type": "step", "step": 1, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "samples": 8, **measured, **changes}


def test_a_float_becomes_its_bits(script: ModuleType) -> None:
    facts = script.flatten({"loss": 0.1, "steps": [1, None, "x"], "seconds": 3.2, "none": {}}, "", ("seconds",))
    assert facts == {"loss": (0.1).hex(), "steps.0": "1", "steps.1": "null", "steps.2": '"x"', "none": "empty"}


def test_measured_times_are_no_facts(script: ModuleType) -> None:
    straggler = {"type": "event", "name": "straggler", "step": 1}
    facts = script.record_facts("rank-0", [_step(), straggler])
    assert facts == script.record_facts("rank-0", [_step(step_s=9.0, time=7.0, memory_bytes=1)])


def test_the_last_step_may_be_written_after_its_evaluation(script: ModuleType) -> None:
    evaluation = {"type": "eval", "step": 1, "loss": 2.0, "accuracy": None, "samples": 4}
    before, after = (script.record_facts("rank-0", each) for each in ([_step(), evaluation], [evaluation, _step()]))
    assert before == after
    assert script.record_facts("rank-0", [_step(), _step()]) != script.record_facts("rank-0", [_step()])


@pytest.mark.parametrize(
    "changes", [{"loss": math.nextafter(2.5, 3)}, {"lr": 0.2}, {"grad_norm": None}, {"samples": 7}]
)
def test_a_planted_difference_of_a_step_is_found(script: ModuleType, changes: dict[str, Any]) -> None:
    before = script.Outcome(facts=script.record_facts("rank-0", [_step()]))
    after = script.Outcome(facts=script.record_facts("rank-0", [_step(**changes)]))
    verdict = script.compare("case", before, after)
    assert (verdict.status, verdict.num_different) == ("different", 1)
    assert f"step 1.{next(iter(changes))}" in verdict.detail


def test_one_more_operation_is_found_and_their_order_is_not(script: ModuleType) -> None:
    reduce, gather = ({"kind": kind, "num_bytes": 64, "group": [0, 1]} for kind in ("all_reduce", "all_gather"))
    first, turned, more = (
        script.Outcome(facts=script.operation_facts("rank-0", each))
        for each in ([reduce, gather], [gather, reduce], [reduce, gather, gather])
    )
    assert script.compare("case", first, turned).status == "same"
    found = script.compare("case", first, more)
    assert found.status == "different"
    assert "all_gather of 64 bytes in [0, 1]: 1 times -> 2 times" in found.detail


def test_a_fact_that_only_one_side_has_is_a_difference(script: ModuleType) -> None:
    verdict = script.compare("case", script.Outcome(facts={"a": "1"}), script.Outcome(facts={"a": "1", "b": "2"}))
    assert (verdict.status, verdict.detail) == ("different", "b: nothing -> 2")


def test_a_case_that_fails_on_both_sides_is_not_the_same(script: ModuleType) -> None:
    crashed = script.Outcome(facts={}, crash="train\nexit code 1\nlast line")
    verdict = script.compare("case", crashed, crashed)
    assert verdict.status == "failed"
    assert "last line" in script.table([verdict])


def test_text_is_compared_without_paths_and_processes(script: ModuleType, tmp_path: Path) -> None:
    folders = ((tmp_path, "FOLDER"),)
    assert script.normalise(f"{tmp_path}/runs of pid 12 \n", folders) == "FOLDER/runs of pid N"


def test_times_of_a_modelled_time_line_are_facts(script: ModuleType) -> None:
    event = {"ph": "X", "tid": 1, "name": "all_reduce", "args": {"bytes": 4}, "ts": 0.0, "dur": 2.5}
    assert list(script.timeline_facts([event, {"ph": "M"}, {**event, "ts": 3.0}]).values()) == ["2 times, 5.000 us"]


def test_a_plan_may_gain_fields_and_levels(script: ModuleType, tmp_path: Path) -> None:
    plan = {"batch": {"microbatch": 2}, "mesh": {"shard": 4}, "total_steps": 3}
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "plan.json").write_text(json.dumps(plan))
    before = script.run_facts(tmp_path, "{}", is_modelled=False)
    (run / "plan.json").write_text(json.dumps({"layout": {"mesh": plan.pop("mesh")}, "cluster": "new", **plan}))
    assert script.run_facts(tmp_path, "{}", is_modelled=False) == before
    assert before["plan.mesh.shard"] == "4"


def test_cases_have_names_of_their_own_and_configs_that_exist(script: ModuleType) -> None:
    cases = list(script.all_cases())
    assert len({case.name for case in cases}) == len(cases)
    configs = {word for case in cases for command in case.commands for word in command if word.startswith("configs/")}
    assert {each for each in configs if not (SCRIPTS.parent / each).exists()} == {"configs/digit.yaml"}  # an error


def test_kept_facts_are_compared_and_a_difference_gives_exit_code_1(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of checkouts whose Paceline is one line."""
    for name, loss in (("before", 1), ("after", 2)):
        package = tmp_path / name / "src" / "paceline"
        package.mkdir(parents=True)
        (tmp_path / name / "configs").mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(f"print({loss})")
    shutil.copytree(tmp_path / "before", tmp_path / "copy")
    kept, only = str(tmp_path / "facts.json"), ("--only", "config-schema")
    assert script.main(["--record", str(tmp_path / "before"), kept, *only]) == 0
    assert script.main(["--against", kept, str(tmp_path / "copy"), *only]) == 0
    assert script.main(["--against", kept, str(tmp_path / "after"), *only]) == 1
    assert "stdout line 1: 1 -> 2" in capsys.readouterr().out


def test_a_folder_without_the_package_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main([str(tmp_path), str(tmp_path)])
