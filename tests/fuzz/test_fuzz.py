"""A few inputs of each target of the fuzzer; ``make fuzz`` takes 10,000. And proof that it sees what must not be."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fuzz_guard import verdict_of
from fuzz_targets import TARGETS, Evil, Target, remove_template

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from fuzz import fuzz


@pytest.fixture(scope="module", autouse=True)
def _no_template_stays() -> Iterator[None]:
    yield
    remove_template()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning", "ignore:.*TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_input_does_what_it_must_not(target: Target, tmp_path: Path) -> None:
    problems = fuzz(target, 2, range(1 + target.weight), tmp_path)
    assert not problems, "\n\n".join(problems)


def test_the_fuzzer_sees_what_must_not_be(tmp_path: Path) -> None:
    folder, outside = tmp_path / "work", tmp_path / "outside"
    folder.mkdir()
    evil = pickle.dumps(Evil(tmp_path / "planted"))
    assert "pickle.find_class" in verdict_of(lambda: pickle.loads(evil), folder)
    assert f"open {outside}" in verdict_of(lambda: outside.write_text("x"), folder)
    assert "os.mkdir" in verdict_of(outside.with_name("b").mkdir, folder)
    assert "subprocess.Popen" in verdict_of(lambda: subprocess.run(["true"], check=True), folder)
    assert "KeyError" in verdict_of(lambda: {}["a"], folder)
    assert "memory" in verdict_of(lambda: torch.zeros(2**40), folder).lower()
    assert "UnicodeEncodeError" in verdict_of(lambda: print("\ud800"), folder)
    assert verdict_of(lambda: (folder / "mine").write_text("x"), folder) == ""
    assert verdict_of(lambda: (folder / "mine").rename(folder / "other"), folder) == ""


def test_the_fuzzer_ends_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz_guard.bounded.__wrapped__.__defaults__", (0.05, 2**30))
    assert "took more than" in verdict_of(lambda: time.sleep(10), tmp_path)
