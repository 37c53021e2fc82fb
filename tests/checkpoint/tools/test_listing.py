"""Listing tells why each checkpoint is kept, and what is wrong with those that are not whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from trained_gpt import Save, change_manifest

from paceline.checkpoint.find import Retention, retention_of
from paceline.checkpoint.tools.listing import folder_of, list_folder, summarize
from paceline.errors import CheckpointError


@pytest.fixture
def run(saved: Save, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 to 50, which keeps the last two, every 20th and the best by accuracy."""

    def change(step: int, accuracy: float) -> Any:
        def apply(manifest: dict[str, Any]) -> None:
            keep = {"keep": 2, "keep_every": 20, "keep_best": 1, "best_metric": "eval_accuracy"}
            manifest["step"] = step
            manifest["about"]["config"]["checkpoint"] = keep
            manifest["values"]["metrics"] = {"dict": [["step", step], ["eval_accuracy", accuracy]]}

        return apply

    for step, accuracy in ((10, 0.9), (20, 0.5), (30, 0.6), (40, 0.7), (50, 0.8)):
        path = shutil.copytree(saved(), tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        change_manifest(Path(path), change(step, accuracy))
    return tmp_path / "run"


def test_each_says_why_it_is_kept(run: Path) -> None:
    found = {each.step: each for each in list_folder(run, now=4e9)}
    assert {step: each.kept for step, each in found.items()} == {
        10: ("best eval_accuracy",),
        20: ("every 20 steps",),
        30: ("not by the policy: goes with the next save",),
        40: ("one of the last", "every 20 steps"),
        50: ("newest",),
    }
    assert found[50].metrics == {"eval_accuracy": 0.8}
    assert (found[50].world, found[50].strategy, found[50].problem) == (2, "fsdp", "")
    assert (found[50].age_s or 0) > 0


def test_what_is_not_whole_is_listed_with_its_reason(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000050" / "manifest.json").write_text("{}")
    (folder / "step-00000040" / "rank-00001.json").unlink()
    (folder / ".step-00000060.abcd").mkdir()
    (folder / ".step-00000060.abcd" / "rank-00000.json").write_text("12345")
    found = {each.step: each for each in list_folder(run, now=0.0)}
    assert "is no manifest" in found[50].problem
    assert found[40].problem == "rank-00001.json is missing"
    assert (found[60].problem, found[60].num_bytes) == (
        "left by a save that was cut short; the next start removes it",
        5,
    )
    assert found[30].kept == ("newest",)
    assert found[60].kept == ()


def test_a_flipped_bit_is_seen_when_hashes_are_asked_for(run: Path) -> None:
    file = run / "checkpoints" / "step-00000030" / "rank-00000.f32.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert not any(each.problem for each in list_folder(run, now=0.0, depth="fast"))
    assert [each.step for each in list_folder(run, now=0.0, depth="full") if each.problem] == [30]


def test_a_run_a_folder_and_a_checkpoint_name_the_same(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints"
    assert folder_of(run) == folder_of(folder) == folder_of(folder / "step-00000010") == folder
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        folder_of(tmp_path)


def test_settings_become_the_policy_that_they_ask_for() -> None:
    assert retention_of({}) == Retention()
    assert retention_of({"keep": 3, "keep_best": 2, "best_metric": "eval_accuracy"}) == Retention(
        last=3, best=2, metric="eval_accuracy", mode="max"
    )


def test_a_summary_counts_by_kind_and_picks_by_name(saved: Save) -> None:
    found = summarize(saved(), "layers.0.*")
    assert {each.name.partition("/")[0] for each in found.tensors} == {"model", "optimizer"}
    assert all("layers.0." in each.name for each in found.tensors)
    assert found.bytes_by_kind["optimizer"] == 2 * found.bytes_by_kind["model"] == 8 * found.num_parameters
    (group,) = found.optimizer.values()
    assert (group["lr"], group["parameters"]) == (1e-2, len(found.manifest.tensors) // 3)
