"""Lines of descent: a run that went back goes on from where it is, and not from where it once was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import CheckpointWriter, Retention, State, find_checkpoint, list_checkpoints, read_manifest
from paceline.checkpoint.find import spots_in
from paceline.checkpoint.manifest import Line, Spot, likely_line, line_from, newest_line, parse_line
from paceline.comm.solo import SoloCommunicator
from paceline.errors import CheckpointError
from paceline.shards import Shard, whole_region

FIRST, TURNED = Line(), Line(((0, 0), (1, 8)))


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def save(folder: Path, step: int, line: Line | None = None, keep: int | None = None) -> Path:
    shard = Shard(name="model/w", region=whole_region((3,)), tensor=torch.full((3,), float(step)))
    writer = CheckpointWriter(folder, SoloCommunicator(torch.device("cpu")), Retention(last=keep))
    return writer.save(State(step=step, position=step, shards=[shard], line=line))


def steps_in(folder: Path) -> list[int]:
    return [int(path.name[-8:]) for path in list_checkpoints(folder)]


def test_a_line_has_what_it_came_along() -> None:
    assert TURNED.has(FIRST, 8)
    assert not TURNED.has(FIRST, 9)
    assert TURNED.has(TURNED, 100)
    assert not FIRST.has(TURNED, 9)
    assert not Line(((0, 0), (2, 12))).has(TURNED, 9)
    assert parse_line(TURNED.to_json()) == TURNED
    for wrong in ([], [[1]], "a", None):
        with pytest.raises(CheckpointError, match="is no line"):
            parse_line(wrong)


def test_a_start_further_back_takes_a_new_line() -> None:
    found = [Spot(line=FIRST, step=step) for step in (4, 8, 12)]
    assert line_from(found[2], found) == FIRST
    assert line_from(found[1], found) == TURNED
    assert line_from(None, found) == Line(((1, 0),))  # another run in the same folder
    assert line_from(None, []) == FIRST
    found.append(Spot(line=TURNED, step=12))
    assert line_from(found[2], found) == Line(((0, 0), (2, 12)))  # the one that was left is taken up again


@given(data=st.data())
def test_whatever_runs_did_the_last_save_is_the_newest(data: st.DataObject) -> None:
    """Starts at any checkpoint, or the beginning, and some saves: the newest line is the last run's own."""
    found: dict[int, Spot] = {}  # a step has one folder
    for _ in range(data.draw(st.integers(1, 6))):
        starts = [None, *sorted(found.values(), key=lambda spot: spot.step)]
        start = data.draw(st.sampled_from(starts))
        line, step = line_from(start, list(found.values())), 0 if start is None else start.step
        way = [] if start is None else [start]
        for _ in range(data.draw(st.integers(1, 3))):
            step += data.draw(st.integers(1, 3))
            found[step] = Spot(line=line, step=step)
            way.append(found[step])
        newest = newest_line(found.values())
        assert newest == line
        assert all(newest.has(spot.line, spot.step) for spot in way)
        assert max(spot.age for spot in found.values()) == (line.number, step)


def test_the_newest_of_the_line_is_taken_and_what_was_left_is_told(tmp_path: Path) -> None:
    for step in (4, 8, 12, 16):
        save(tmp_path, step)
    save(tmp_path, 10, TURNED)
    told: list[str] = []
    found = find_checkpoint("auto", tmp_path, tell=lambda passed: told.append(str(passed)))
    assert found.name == "step-00000010"
    assert told == [
        f"passed over step-000000{step}: the run has gone back from it, and step-00000010 is on its line"
        for step in (12, 16)
    ]
    assert steps_in(tmp_path) == [12, 16, 4, 8, 10]
    (found / "rank-00000.json").unlink()
    assert find_checkpoint("auto", tmp_path).name == "step-00000008"


def test_before_its_first_save_a_run_that_went_back_is_where_it_went(tmp_path: Path) -> None:
    paths = {step: save(tmp_path, step) for step in (4, 8, 12)}
    own = line_from(read_manifest(paths[8]).spot, list(spots_in(tmp_path).values()))
    assert find_checkpoint("auto", tmp_path, own=own) == paths[8]
    assert find_checkpoint("auto", tmp_path) == paths[12]
    save(tmp_path, 12, own)  # takes the other's place
    assert find_checkpoint("auto", tmp_path, own=own) == paths[12]
    later = save(tmp_path, 14, line_from(read_manifest(paths[8]).spot, list(spots_in(tmp_path).values())))
    assert find_checkpoint("auto", tmp_path, own=own) == later  # went back once more: the higher number counts


def test_what_was_left_goes_first_and_the_last_good_one_never(tmp_path: Path) -> None:
    for step in (4, 8, 12, 16):
        save(tmp_path, step)
    save(tmp_path, 10, TURNED, keep=2)
    assert steps_in(tmp_path) == [8, 10]
    for path in list_checkpoints(tmp_path):
        (path / "rank-00000.json").unlink()
    save(tmp_path, 9, Line(((0, 0), (2, 8))), keep=2)
    assert steps_in(tmp_path)[-1] == 9  # the others are damaged, and do not take its place


def test_without_a_line_the_steps_tell(tmp_path: Path) -> None:
    """A loop of the user's own: a step that is not behind the newest means that it went back."""
    for step in (4, 8, 12):
        assert read_manifest(save(tmp_path, step)).line == FIRST
    assert read_manifest(save(tmp_path, 10)).line == TURNED
    assert read_manifest(save(tmp_path, 12)).line == TURNED
    assert steps_in(tmp_path) == [4, 8, 10, 12]
    assert likely_line(3, [Spot(line=FIRST, step=4)]) == Line(((1, 0),))


def test_checkpoints_from_before_there_were_lines_are_read(tmp_path: Path) -> None:
    import hashlib

    path = save(tmp_path, 4)
    body = (path / "manifest.json").read_text().replace('  "line": [[0, 0]],\n', "").partition(',\n  "sha256"')[0]
    text = f',\n  "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'
    (path / "manifest.json").write_text(body + text)
    assert find_checkpoint("auto", tmp_path) == path
    assert read_manifest(path).line == FIRST
