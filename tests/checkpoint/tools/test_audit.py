"""Verifying finds each kind of damage, and says what was checked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from trained_gpt import Save, change_manifest

from paceline.checkpoint.manifest import SavedPiece, SavedTensor
from paceline.checkpoint.tools.audit import audit, coverage_problems
from paceline.errors import CheckpointError
from paceline.shards import Region


@pytest.fixture
def copy(saved: Save, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved(), tmp_path / "step-00000007"))


def problems_of(path: Path, what: str) -> str:
    found = {check.what: check for check in audit(path).checks}
    assert not found[what].is_good
    return "\n".join(found[what].problems)


def test_a_good_one_says_what_was_checked(saved: Save) -> None:
    for depth, word in (("full", "SHA-256 of each"), ("fast", "sizes")):
        found = audit(saved(), depth)  # type: ignore[arg-type]
        assert found.is_good
        files, tensors, samples = found.checks
        assert word in files.finding
        assert "each element in exactly one" in tensors.finding
        assert samples.finding.startswith("56 ids in 7 batches hashed again")
        assert "0 to 56 of 40 samples, seed 3, batch 8), each once an epoch" in samples.finding


def test_every_strategy_saves_each_element_once(saved: Save) -> None:
    for strategy in ("ddp", "zero2"):
        assert audit(saved(strategy, 3)).is_good


@pytest.mark.parametrize("place", [3, 60, -1])
def test_a_flipped_bit_is_found_in_any_place(copy: Path, place: int) -> None:
    file = copy / "rank-00001.f32.safetensors"
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)
    assert "rank-00001.f32.safetensors is damaged: its hash" in problems_of(copy, "files")


def test_a_file_that_is_cut_or_missing_is_named(copy: Path) -> None:
    file = copy / "rank-00001.f32.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (copy / "rank-00000.json").unlink()
    told = problems_of(copy, "files")
    assert "rank-00000.json is missing" in told
    assert "rank-00001.f32.safetensors is damaged: it has" in told


def test_a_lost_piece_is_named(copy: Path) -> None:
    change_manifest(copy, lambda m: m["tensors"]["model/token_embedding.weight"]["pieces"].pop())
    assert "model/token_embedding.weight: " in problems_of(copy, "tensors")


def test_a_tensor_that_its_file_has_not_is_named(copy: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"]["model/other"] = manifest["tensors"]["model/norm.weight"]

    change_manifest(copy, change)
    assert "safetensors has no model/other" in problems_of(copy, "tensors")


def test_elements_that_are_there_twice_are_counted() -> None:
    def tensor(*regions: Region) -> SavedTensor:
        return SavedTensor(
            shape=(4, 4), dtype="F32", pieces=tuple(SavedPiece(file="f", region=region) for region in regions)
        )

    flat = [Region(shape=(4, 4), begin=first, end=last) for first, last in ((0, 10), (8, 14))]
    assert coverage_problems("model/a", tensor(*flat)) == ["elements 8 to 10 are saved twice"]
    columns = [Region(shape=(4, 4), begin=0, end=8, cuts=((1, (span,)),)) for span in ((0, 2), (1, 3))]
    assert coverage_problems("model/a", tensor(*columns)) == ["rows 1 to 2 of the dim that is cut are saved twice"]
    good = [Region(shape=(4, 4), begin=0, end=8, cuts=((1, (span,)),)) for span in ((0, 2), (2, 4))]
    assert coverage_problems("model/a", tensor(*good)) == []


def consumed(manifest: dict[str, Any]) -> dict[str, Any]:
    return dict(manifest["values"]["consumed"]["dict"])


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("hash", "0" * 32, "samples were lost, repeated or taken in another order"),
        ("count", 55, "55 samples were consumed, and the order of the data has 56 there"),
        ("count", "many", "cannot be read"),
    ],
)
def test_other_samples_than_those_of_the_order_are_found(copy: Path, key: str, value: object, told: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        pairs = [[name, value if name == key else each] for name, each in consumed(manifest).items()]
        manifest["values"]["consumed"] = {"dict": pairs}

    change_manifest(copy, change)
    assert told in problems_of(copy, "samples")


def test_a_position_or_seed_that_does_not_fit_the_samples_is_found(copy: Path) -> None:
    change_manifest(copy, lambda manifest: manifest.update(position=48))
    assert "the last sample was at position 56, and the run goes on at 48" in problems_of(copy, "samples")
    change_manifest(copy, lambda manifest: manifest["about"]["config"]["train"].update(seed=4))
    assert "the order had seed = 3, and the saved config says 4" in problems_of(copy, "samples")


def test_a_checkpoint_without_a_hash_says_that_it_was_not_checked(copy: Path) -> None:
    change_manifest(copy, lambda manifest: manifest["values"].pop("consumed"))
    found = audit(copy)
    assert found.is_good
    assert not found.checks[2].is_done


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        audit(tmp_path)
