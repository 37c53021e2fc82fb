"""Runs on virtual ranks from the command line: one process, the records of many, and failures that name the rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.records.records import EndRecord, Record, RunRecord, read_records

# torch leaves the files of redirected output to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

Call = Callable[..., Any]
Ends = Callable[[Path], list[Record]]


def test_virtual_ranks_train_in_one_process(project: Path, call: Call, ends: Ends) -> None:
    gpt = "model={kind: gpt, layers: 1, heads: 2, width: 16, context: 8}"
    data = "data={kind: synthetic_tokens, vocab_size: 16, samples: 64, context: 8}"
    called = call("train", "tiny.yaml", gpt, data, "comm.backend=virtual", "parallel.ranks=4")
    assert called.code == 0, called.err
    assert "ddp on 4 ranks (virtual, cpu)" in called.out
    folder = project / "runs" / "tiny"
    assert [(end.status, end.step) for end in ends(folder) if isinstance(end, EndRecord)] == [("done", 3)] * 4
    records = [next(iter(read_records(path))) for path in (folder / "records").iterdir()]
    expected = json.loads((folder / "prediction.json").read_text())
    assert (expected["reason"], expected["step_s"]) == ("virtual ranks take turns in one process", None)
    assert "predicted" not in called.out
    assert len({record.pid for record in records if isinstance(record, RunRecord)}) == 1


def test_a_virtual_rank_that_fails_is_named(project: Path, call: Call, ends: Ends) -> None:
    bomb = ["optim.kind=user_code:Optimizer", "optim.args.plot=checkpoint:raise"]  # goes off when rank 0 saves
    called = call("train", "tiny.yaml", "comm.backend=virtual", *bomb)
    assert called.code == 1
    first = called.err.splitlines()[0]  # rank 0 tells the others, and any of them may be the first to say so
    assert first.startswith("paceline: rank ")
    assert first.endswith("a mistake of the user")
    assert [end.status for end in ends(project / "runs" / "tiny") if isinstance(end, EndRecord)] == ["failed"] * 2
