"""The oldest and the newest packages: what the script pins and counts, and that files which name versions agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from paceline.bounded_yaml import load_yaml
from paceline.doctor import machine

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def compat(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import compat

    return compat


def test_every_package_that_is_needed_is_held_at_its_lower_bound(compat: Any) -> None:
    bounds = compat.lower_bounds(PROJECT)
    assert len(PROJECT["dependencies"]) == len([name for name in bounds if f"{name}>=" in str(PROJECT["dependencies"])])
    held = compat.pins(bounds)
    assert f"torch=={bounds['torch']}.*" in held
    assert any(pin.startswith("transformers==") for pin in held)


def test_outcomes_are_those_of_pytest(compat: Any, tmp_path: Path) -> None:
    tests = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    (tmp_path / "test_some.py").write_text(tests + "@pytest.fixture\ndef e(): yield; 1/0\ndef test_d(e): assert 0\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "test_some.py"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    found = compat.outcomes((tmp_path / "report.xml").read_text())
    failed = ["test_some.py::test_b", "test_some.py::test_d"]
    assert found == {"passed": 1, "skipped": 1, "failed": failed}
    mended = {"passed": 1, "skipped": 0, "failed": failed[:1]}
    told = {"passed": 2, "skipped": 1, "failed": failed[:1], "again": [{"commit": "abc", "ran": 2, "failed": 1}]}
    assert compat.once_more(found, mended, "abc") == told
    with pytest.raises(SystemExit, match="2 tests failed in the record, and 1 were run"):
        compat.once_more(found, {**mended, "failed": []}, "abc")


def test_all_that_names_versions_names_the_same() -> None:
    pythons = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    workflow = load_yaml((ROOT / ".github" / "workflows" / "checks.yaml").read_text())
    assert workflow["jobs"]["checks"]["strategy"]["matrix"]["python"] == pythons
    assert f"{pythons[0]} to {pythons[-1]}" in (ROOT / "README.md").read_text()
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert f"torch>={'.'.join(map(str, machine._OLDEST_TORCH))}" in PROJECT["dependencies"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == PROJECT["dependencies"]
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text()))
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    for lock in ("cpu", "cuda"):
        locked = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", (ROOT / "locks" / f"{lock}.txt").read_text()))
        assert {name: version for name, version in locked.items() if pinned.get(name, version) != version} == {}
        assert ("torch" in locked) == (lock == "cuda")
        names = {re.split(r"[>=\[]", each)[0].lower() for each in PROJECT["dependencies"]} - {"torch"}
        assert names <= locked.keys()


def test_the_record_is_of_the_versions_that_are_claimed(compat: Any) -> None:
    lowest = compat.read_record().get("lowest")
    if lowest is None:
        pytest.skip("make compat has not been run")
    for name, bound in compat.lower_bounds(PROJECT).items():
        assert lowest["versions"][name].startswith(bound), name
    page = (ROOT / "docs" / "start.md").read_text()
    for arm, told in (("newest", "On the newest all tests pass"), ("lowest", "On the oldest all tests pass")):
        failed = compat.read_record()[arm]["failed"]
        assert (told if not failed else f"On the oldest {len(failed)} tests fail") in page, arm
