"""``paceline checkpoint``: every verb and its exit code, and a run that goes on from what was taken in."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trained_gpt import LLAMA, save_trained

from paceline.comm.virtual.communicator import run_virtual

# torch leaves the files of redirected output to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

Call = Callable[..., Any]

GPT = "model={kind: gpt, size: gpt-nano, tied: false}"  # as LLAMA
DATA = "data={kind: synthetic_tokens, vocab_size: 50, samples: 64, context: 64}"


@pytest.fixture
def folder(project: Path) -> Path:
    """A run's folder with two checkpoints, steps 2 and 3."""
    run = project / "runs" / "saved"
    for step in (2, 3):
        run_virtual(partial(save_trained, folder=run / "checkpoints", strategy="ddp", model=LLAMA, step=step), 2)
    return run


def as_json(called: Any) -> Any:
    return json.loads(called.out)


def test_a_run_is_listed_shown_and_verified(folder: Path, call: Call) -> None:
    listed = call("checkpoint", "ls", str(folder))
    assert listed.code == 0
    assert "one of the last" in listed.out
    assert "2 ranks ddp" in listed.out
    rows = as_json(call("checkpoint", "ls", str(folder), "--full", "--json"))
    assert [(row["step"], row["is_whole"], row["metrics"]) for row in rows] == [
        (2, True, {"eval_loss": 0.5}),
        (3, True, {"eval_loss": 0.5}),
    ]
    shown = call("checkpoint", "inspect", str(folder), "--tensors", "layers.0.*")
    assert "step 3, 24 samples consumed, saved because of: steps" in shown.out
    assert "model/layers.0.attention.query.weight" in shown.out
    assert "model/layers.1" not in shown.out
    assert as_json(call("checkpoint", "inspect", str(folder), "--json"))["position"] == 24
    verified = call("checkpoint", "verify", str(folder))
    assert verified.code == 0
    told = "24 ids in 3 batches hashed again in the order of the data (0 to 24 of 40 samples, seed 3, batch 8)"
    assert f"{told}, each once an epoch" in verified.out


def test_a_run_is_moved_exported_and_taken_in(folder: Path, call: Call) -> None:
    resharded = call("checkpoint", "reshard", str(folder), "moved", "--ranks", "3", "--json")
    assert resharded.code == 0, resharded.err
    same = call("checkpoint", "diff", str(folder), "moved")
    assert same.code == 0
    assert "the same state, to the last bit" in same.out
    exported = call("checkpoint", "export", "moved", "out.safetensors")
    assert exported.code == 0, exported.err
    assert call("checkpoint", "import", "out.safetensors", "start").code == 0
    other = call("checkpoint", "diff", str(folder), "start")
    assert other.code == 1
    assert "only in A: optimizer/" in other.out


@pytest.mark.exhaustive
def test_a_run_starts_from_what_was_taken_in(folder: Path, call: Call, project: Path) -> None:
    assert call("checkpoint", "export", str(folder), "out.safetensors").code == 0
    assert call("checkpoint", "import", "out.safetensors", "start").code == 0
    called = call("train", "tiny.yaml", GPT, DATA, "comm.backend=virtual", "train.steps=1", "--resume", "start")
    assert called.code == 0, called.err
    found = as_json(call("checkpoint", "diff", "start", str(project / "runs" / "tiny"), "--json"))
    assert found["values"]["step"] == [0, 1]
    assert found["num_compared"] == len(found["tensors"])  # all of it has learned
    assert max(each["max_absolute"] for each in found["tensors"]) < 0.01  # from there, and not from anew


def test_damage_is_named_with_an_exit_code_and_the_older_one_is_found(folder: Path, call: Call) -> None:
    file = next((folder / "checkpoints" / "step-00000003").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    verified = call("checkpoint", "verify", str(file.parent))
    assert verified.code == 1
    assert f"{file.name} is damaged: its hash" in verified.out
    assert call("checkpoint", "verify", str(file.parent), "--fast").code == 0
    for words in (("export", "a.safetensors"), ("reshard", "b", "--ranks", "1")):  # which would have good hashes
        made = call("checkpoint", words[0], str(file.parent), *words[1:])
        assert made.code == 2
        assert f"{file.name} is damaged" in made.err
    file.unlink()
    listed = call("checkpoint", "ls", str(folder))
    assert listed.code == 1
    assert f"NO: {file.name} is missing" in listed.out
    passed = call("checkpoint", "inspect", str(folder))
    assert "passed over step-00000003" in passed.err
    assert "step-00000002" in passed.out


def test_refusals_say_what_to_do(folder: Path, call: Call, project: Path) -> None:
    (project / "empty").mkdir()
    (project / "weights.pt").write_bytes(b"")
    (project / "loop").mkdir()
    for name in ("manifest.json", ".metadata"):
        (project / "loop" / name).symlink_to(name)  # which even the super-user cannot read
    for words, told in (
        (("ls", "nowhere"), "no checkpoint in nowhere: there is no such folder"),
        (("verify", "nowhere"), "no checkpoint in nowhere: there is no such folder"),
        (("inspect", "tiny.yaml"), "no checkpoint in tiny.yaml: it is a file"),
        (("inspect", "empty"), "name a checkpoint, a run's folder, or one with checkpoints"),
        (("diff", str(folder), "weights.pt"), "paceline checkpoint import weights.pt DST"),
        (("ls", "loop"), "loop/manifest.json cannot be read: Too many levels of symbolic links"),
        (("inspect", "loop"), "look at the disk, or use another checkpoint"),
        (("diff", "loop", str(folder)), "loop/manifest.json cannot be read"),
        (("reshard", "loop", "d", "--ranks", "2"), "loop/manifest.json cannot be read"),
        (("export", "loop", "d"), "loop/manifest.json cannot be read"),
        (("reshard", str(folder), "tiny.yaml", "--ranks", "2"), "a file is where a folder is needed"),
        (("export", str(folder), "tiny.yaml/d"), "a file is where a folder is needed"),
        (("import", "empty", "d", "--format", "dcp", "--allow-pickle"), "it has no .metadata"),
        (("import", "nowhere", "d", "--format", "safetensors"), "nowhere is not there"),
        (
            ("import", "loop", "d", "--format", "dcp", "--allow-pickle"),
            "cannot be read: Too many levels of symbolic links",
        ),
        (("inspect", str(folder), "--tensors", "x*"), "no tensor fits 'x*'"),
        (("reshard", str(folder), "d", "--ranks", "3", "--tensor", "2"), "tensor = 2 does not divide ranks = 3"),
        (("reshard", str(folder), "d", "--ranks", "2", "--strategy", "fdsp"), "there are ddp, zero1"),
        (("export", str(folder), "d", "--format", "onnx"), "there are safetensors, torch, dcp"),
        (("import", "nowhere.pt", "d"), "nowhere.pt is not there"),
        (("import", str(folder), "d"), "is no folder with weights"),
        (("import", str(folder), "d", "--format", "torch"), "--format torch reads a file"),
        (("ls", "s4://bucket/run"), "s4://bucket/run cannot be opened"),
    ):
        called = call("checkpoint", *words)
        assert called.code == 2, (words, called)
        assert told in called.err, (words, called)
        assert "--resume" not in called.err or words[0] == "import", words
        assert len(called.err.splitlines()) >= 3, (words, called)
    assert not (project / "d").exists()
