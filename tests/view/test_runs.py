"""Runs as they are found and read: files that grow, that are damaged, older or strange, and what is said first."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_records import END, RUN, STEP, write_records
from view_runs import steps_of, write_run

from paceline.records.records import CommRecord, EventRecord, HostRecord, parse_line, to_line
from paceline.run.records import append_event
from paceline.view.document import Window, describe, differences, heat, timeline
from paceline.view.folder import config_of, glance
from paceline.view.runs import ShownRun, find_runs, names_of


def read(folder: Path) -> ShownRun:
    run = ShownRun(folder)
    while run.look():
        pass
    return run


def test_a_run_is_read_as_it_grows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10, is_done=False)
    run = read(folder)
    version = run.version
    assert run.state().step == 10
    assert not run.look()
    assert run.version == version
    path = folder / "records" / "rank-0.jsonl"
    whole, half = map(to_line, steps_of(0, 11, 12))
    with path.open("a") as file:
        file.write(whole + half[:50])
        file.flush()
        run.look()
        assert run.state().step == 11  # the half line waits
        file.write(half[50:])
    run.look()
    assert (run.state().step, run.problems()) == (12, [])
    assert run.columns.curves()["loss"][11] == pytest.approx(1 / 12)


def test_a_run_is_read_when_the_files_of_all_ranks_are(tmp_path: Path) -> None:
    run = ShownRun(write_run(tmp_path / "run", steps=10))
    shares = [run.share_read for _ in iter(lambda: run.look(0.0), False)]  # a file at each look
    assert len(shares) >= 2
    assert shares == sorted(shares)
    assert [share < 1 for share in shares] == [True] * (len(shares) - 1) + [False]


def test_damaged_lines_older_versions_and_absent_ranks_are_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=3, steps=6)
    (folder / "records" / "rank-2.jsonl").unlink()
    lines = (folder / "records" / "rank-0.jsonl").read_text().splitlines()
    old = {
        key: value for key, value in json.loads(lines[2]).items() if key not in ("mfu", "host_s", "loss_scale", "lr")
    }
    newer = json.loads(lines[4]) | {"schema": 99}
    lines[1] = lines[1][:40]
    lines[2], lines[4] = json.dumps(old, separators=(",", ":")), json.dumps(newer, separators=(",", ":"))
    lines.insert(3, '{"type":"step","schema":1,"step":"two"}')
    lines.insert(3, "\x00\x01")
    (folder / "records" / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    run = read(folder)
    assert run.columns.steps.tolist() == [1, 2, 3, 4, 5, 6]  # those of rank 1
    problems = run.problems()
    assert len(problems) == 2
    assert "rank-0.jsonl: 4 lines could not be read" in problems[0]
    assert "no records of rank 2" in problems[1]
    told = describe(run)
    assert told["state"]["status"] == "done"
    assert told["curves"]["lr"]["mean"][1] == pytest.approx(STEP.lr)


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=30)
    run = read(folder)
    write_run(folder, steps=5)
    while run.look():
        pass
    assert (run.state().step, run.attempts) == (5, 1)


def test_a_restart_is_an_attempt_and_an_event(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10, is_done=False)
    path = folder / "records" / "rank-0.jsonl"
    again = replace(RUN, world_size=1, host="elsewhere", time=RUN.time + 100)
    with path.open("a") as file:
        failed = replace(END, status="failed", step=10, message="rank 1 was killed\nmore", time=RUN.time + 50)
        file.write(to_line(failed))
    run = read(folder)
    assert run.state().status == "failed"
    assert run.state().sentence.endswith("rank 1 was killed")
    with path.open("a") as file:
        file.write(to_line(again) + "".join(map(to_line, steps_of(0, 8, 9))))
    run.look()
    state = run.state(now=RUN.time + 101)
    assert (state.status, state.step, state.attempts) == ("running", 10, 2)
    assert np.isnan(run.columns.curves()["loss"][9])  # rank 0 has not made it again, and rank 1 is no part any more
    assert [event["name"] for event in describe(run)["events"]] == ["checkpoint", "evaluation", "attempt"]


def test_a_process_that_is_gone_without_an_end_has_died(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    here = replace(RUN, world_size=1, host=socket.gethostname(), pid=os.getpid(), time=4e9)
    write_records(folder, 0, here, STEP)
    assert read(folder).state().status == "running"
    write_records(folder, 0, replace(here, pid=2**22 + 1), STEP)
    state = read(folder).state()
    assert state.status == "died"
    assert "the process of rank 0 is gone" in state.sentence


def test_at_a_glance_a_run_goes_on_while_a_rank_or_a_host_writes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10, is_done=False)
    rank, host = (folder / "records" / name for name in ("rank-0.jsonl", "host-node.jsonl"))
    assert glance(folder)["status"] == "running"
    os.utime(rank, (1, 1))
    assert glance(folder)["status"] == "unfinished"
    host.write_text(to_line(HostRecord(host="node", values={}, time=RUN.time)))
    assert glance(folder)["status"] == "running"  # in a long step
    with rank.open("a") as file:
        file.write(to_line(END))
    assert glance(folder)["status"] == "done"


def test_what_samplers_and_collectives_left(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10)
    values = {"hw.gpu.utilization/0": 0.5, "hw.gpu.utilization/1": 0.75}
    samples = [HostRecord(host="node-1", values=values, time=RUN.time + each / 10) for each in (2, 4)]
    (folder / "records" / "host-node-1.jsonl").write_text("".join(map(to_line, samples)))
    told = CommRecord(step=5, kind="all_reduce", group="world", ranks=2, calls=3, bytes=100, seconds=0.5, time=RUN.time)
    own = EventRecord(name="scalars", step=3, detail={"<b>": 2.0, "note": "x"}, time=RUN.time + 1)
    with (folder / "records" / "rank-0.jsonl").open("a") as file:
        file.write(to_line(told) + to_line(own))
    found = describe(read(folder))
    assert [(each["name"], each["mean"], each["x"]["step"]) for each in found["hosts"]] == [
        ("hw.gpu.utilization/0", [0.5, 0.5], [2, 4]),
        ("hw.gpu.utilization/1", [0.75, 0.75], [2, 4]),
    ]
    assert found["comm"][0]["points"] == [[5, 0.0, 200.0, 100, 3, 0.5]]
    assert found["own"] == {"<b>": [[3, 1.0, 2.0]]}


def test_windows_buckets_maps_and_timelines(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", steps=40, slow=1.5))
    told = describe(run, Window(first=11, last=30, points=5))
    assert told["x"]["step"] == [12.5, 16.5, 20.5, 24.5, 28.5]
    assert told["curves"]["loss"]["max"][0] == pytest.approx(1 / 11, rel=1e-4)
    assert told["range"] == [1, 40]
    assert "mfu" not in told["curves"]
    with pytest.raises(KeyError):
        heat(run, "folder", Window())
    found = timeline(run, 3, 4)
    assert (found["steps"], found["ranks"]) == ([3, 4], [0, 1])
    assert found["end"] == [pytest.approx([0.1, 0.2], rel=1e-5)] * 2
    assert [part[1][0] for part in found["parts"]] == pytest.approx([0.01, 0.03, 0.03, 0.02, 0.01])
    assert "monitor.trace" in found["note"]


def test_operations_of_a_trace_are_in_the_timeline(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    (folder / "trace").mkdir()
    operation = {"kind": "all_reduce", "num_bytes": 8, "group": [0, 1], "start_s": 5.0, "end_s": 5.01}
    times = [RUN.time + 0.25, RUN.time + 90]
    lines = "".join(json.dumps(operation | {"time": time}) + "\n" for time in times)
    (folder / "trace" / "rank-0.jsonl").write_text(lines)
    (folder / "trace" / "rank-1.jsonl").write_text(json.dumps(operation) + "\n")
    found = timeline(read(folder), 3, 4)
    assert found["operations"] == [[0, pytest.approx(0.05, abs=1e-5), pytest.approx(0.01), "all_reduce", 8]]
    assert "trace of rank 1 cannot be read" in found["note"]


def test_rows_of_several_hosts_lie_on_one_clock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    path = folder / "records" / "rank-1.jsonl"
    # Rank 1 is on another host, whose clock is 90 s ahead: all its times are.
    lines = [parse_line(line) for line in path.read_text().splitlines()]
    lines = [replace(line, time=line.time + 90) for line in lines]
    lines[0] = replace(lines[0], host="another")  # type: ignore[call-arg]
    path.write_text("".join(map(to_line, lines)))
    (folder / "trace").mkdir()
    operation = {"kind": "all_reduce", "num_bytes": 8, "start_s": 5.0, "end_s": 5.01, "time": RUN.time + 90.25}
    (folder / "trace" / "rank-1.jsonl").write_text(json.dumps(operation) + "\n")
    found = timeline(read(folder), 3, 4)
    assert found["end"][1][0] - found["end"][0][0] == pytest.approx(90)
    assert "were not compared" in found["note"]
    for rank, ahead_s in enumerate((0.0, 90.0)):
        assert append_event(folder, rank, "clock", {"ahead_s": ahead_s, "ranks": [rank]})
    found = timeline(read(folder), 3, 4)
    assert found["end"] == [pytest.approx([0.1, 0.2], rel=1e-4)] * 2
    assert [each[:2] for each in found["operations"]] == [[1, pytest.approx(0.05, abs=1e-5)]]
    assert "differ by up to 1 min 30 s, and are corrected" in found["note"]
    assert "clock" not in [event["name"] for event in describe(read(folder))["events"]]


def test_runs_are_found_named_apart_and_never_outside_of_the_folder(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a" / "run", steps=2), write_run(tmp_path / "b" / "run", steps=2)
    os.utime(one / "config.yaml", (1, 1))
    outside = write_run(tmp_path / "outside", steps=2)
    (tmp_path / "a" / "link").symlink_to(outside)
    (tmp_path / "a" / "empty").mkdir()
    found, problems = find_runs([tmp_path / "a", other, tmp_path / "nothing"])
    assert found == [other, one]
    assert problems == [f"{tmp_path / 'nothing'} does not exist; a run's folder has records/rank-<r>.jsonl"]
    assert names_of(found) == ["b/run", "a/run"]
    (one / "records" / "rank-1.jsonl").unlink()
    (one / "records" / "rank-1.jsonl").symlink_to(outside / "records" / "rank-1.jsonl")
    assert list(read(one).columns.ranks) == [0]


def test_a_link_to_itself_beside_a_run_does_not_end_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    for loop in (tmp_path / "loop", run / "trace", run / "records" / "rank-1.jsonl"):
        loop.unlink(missing_ok=True)
        loop.symlink_to(loop.name)
    assert find_runs([tmp_path]) == ([run], [])
    assert find_runs([tmp_path / "loop"])[0] == []
    found = read(run)
    assert describe(found)["state"]["step"] == 2
    assert timeline(found, 0, 2)["steps"] == [1, 2]


def test_configs_are_compared_by_setting(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one", steps=2), write_run(tmp_path / "other", steps=3)
    configs = [config_of(one), config_of(other), {}]
    assert differences(configs) == [("train.steps", ["2", "3", ""]), ("name", ["one", "other", ""])]
    first = ["optim.lr", "train.global_batch", "parallel.strategy"]
    named = ["name", "data.seed", *reversed(first), "model.depth"]
    found = differences([dict.fromkeys(named, value) for value in ("1", "2")])
    assert [name for name, _ in found] == [*first, "data.seed", "model.depth", "name"]
    (one / "config.yaml").write_text("a: [")
    assert config_of(one) == {}
