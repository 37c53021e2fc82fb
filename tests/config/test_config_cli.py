"""``paceline config``: each command prints what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.cli.options import load_and_tell
from paceline.config import load_config
from paceline.config.schema import json_schema
from paceline.errors import ConfigError

DIGITS = str(Path(__file__).parents[2] / "configs" / "digits.yaml")


def invoke(*args: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["config", *args], env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result.output


def test_show_prints_yaml_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "shown.yaml"
    path.write_text(invoke("show", DIGITS, "optim.lr=1e-3"))
    assert load_config(path) == load_config(Path(DIGITS), ["optim.lr=1e-3"])


def test_show_json() -> None:
    assert json.loads(invoke("show", DIGITS, "train.seed=5", "--json"))["train"]["seed"] == 5


def test_explain_prints_a_table() -> None:
    lines = invoke("explain", DIGITS, "optim.lr=1e-3", "--ranks", "2").splitlines()
    assert lines[0].split() == ["key", "value", "origin"]
    row = next(line for line in lines if line.startswith("optim.lr "))
    assert row.split() == ["optim.lr", "0.001", "override"]
    assert any(line.startswith("optim.betas") and "[0.9, 0.999]" in line for line in lines)
    assert any(line.startswith("train.microbatch") and "64 / (1 x 2)" in line for line in lines)


def test_explain_json() -> None:
    rows = json.loads(invoke("explain", DIGITS, "--ranks", "4", "--json"))
    assert {"key", "value", "origin"} == set(rows[0])
    assert next(row for row in rows if row["key"] == "train.microbatch")["value"] == 16


def test_explain_estimates_memory() -> None:
    rows = json.loads(invoke("explain", DIGITS, "--ranks", "4", "parallel.strategy=fsdp", "--json"))
    (row,) = (row for row in rows if row["key"] == "derived.memory")
    assert row["value"] > 2**20
    assert "gradients" in row["origin"]
    rows = json.loads(invoke("explain", DIGITS, "--json"))
    assert next(row for row in rows if row["key"] == "derived.memory")["value"] is None
    own = ["model={kind: factory, factory: 'a:b'}", "--ranks", "1", "--json"]
    rows = json.loads(invoke("explain", DIGITS, *own))
    assert "own code" in next(row for row in rows if row["key"] == "derived.memory")["origin"]


def test_explain_shows_how_a_strategy_is_chosen() -> None:
    asked = ["explain", DIGITS, "parallel.strategy=auto", "parallel.device=cpu", "--ranks", "2"]
    rows = {row["key"]: row for row in json.loads(invoke(*asked, "--json"))}
    assert rows["derived.strategy"]["value"] == "ddp"
    assert "it fits; predicted" in rows["derived.strategy"]["origin"]
    assert [line.split(":")[0] for line in rows["derived.strategy_ladder"]["value"]] == [
        "ddp",
        "zero1",
        "zero2",
        "fsdp",
        "pipeline 2 x data 1",
        "impossible",  # to split the layers of an mlp
    ]
    text = invoke(*asked)
    assert "parallel.strategy = auto: candidates, the cheapest first\n  ddp: fits" in text


def test_explain_shows_how_a_mesh_is_chosen() -> None:
    model = "model={kind: gpt, layers: 4, heads: 4, width: 32, context: 16}"
    asked = ["explain", DIGITS, model, "data={kind: synthetic_tokens, context: 16}", "parallel.device=cpu"]
    asked += ["parallel.strategy=auto", "train={global_batch: 2, steps: 1}", "--ranks", "8"]
    rows = {row["key"]: row for row in json.loads(invoke(*asked, "--json"))}
    assert rows["parallel.strategy"]["value"] == "auto"
    degrees = [rows[f"parallel.{name}"]["value"] for name in ("pipeline", "tensor", "data")]
    assert degrees[0] * degrees[1] * degrees[2] == 8
    assert degrees[2] <= 2  # a batch of two samples
    split = next(name for name, degree in zip(("pipeline", "tensor"), degrees, strict=False) if degree > 1)
    assert rows[f"parallel.{split}"]["origin"] == "derived: chosen, as parallel.strategy = auto"
    assert rows["derived.mesh"]["value"] in rows["derived.strategy"]["value"]
    assert rows["derived.memory"]["value"] > 2**20
    assert rows["parallel.ranks"]["value"] == 8
    text = invoke(*asked)
    assert "parallel.strategy = auto: candidates, the cheapest first" in text
    assert "impossible: data 8: parallel.ranks = 8 is more than train.global_batch = 2" in text


def test_explain_estimates_a_split_model() -> None:
    split = str(Path(DIGITS).parent / "gpt_3d.yaml")
    rows = {row["key"]: row for row in json.loads(invoke("explain", split, "--json"))}
    assert "the cpu rank that needs most" in rows["derived.memory"]["origin"]


def test_schema() -> None:
    assert json.loads(invoke("schema")) == json_schema()


def test_check() -> None:
    assert "no problems" in invoke("check", DIGITS)
    assert json.loads(invoke("check", DIGITS, "--json"))["ok"] is True
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        invoke("check", DIGITS, "train.lr=3")
    with pytest.raises(ConfigError, match=r"parallel\.ranks = 3"):
        invoke("check", DIGITS, "--ranks", "3")
    found = json.loads(invoke("check", DIGITS, "train.lr=3", "name=a/b", "--json", exit_code=1))
    assert found["ok"] is False
    assert len(found["problems"]) == 2
    assert found["problems"][0]["fix"] == "did you mean optim.lr?"


def test_check_looks_for_all_that_a_config_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_check.py").write_text("def watch(trainer, result): ...\nbroken = 3\n")
    (tmp_path / "text.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    named = [
        "data={kind: mixture, sources: {a: {kind: tokens, path: 'a-*.bin'}, b: {kind: text, path: tex.txt}}}",
        "train.hooks=['mine_to_check:watch', 'mine_to_check:wacht']",
        "train.metrics={f1: 'not_there:f1', other: 'mine_to_check:broken'}",
        "optim.groups={'*.weight': {lr: 0.1}, 'nothing.*': {frozen: true}}",
    ]
    model = "model={kind: gpt, layers: 1, heads: 1, width: 8, context: 8}"
    found = json.loads(invoke("check", DIGITS, model, *named, "--json", exit_code=1))["problems"]
    assert [each["what"].partition("\n")[0] for each in found] == [
        "data.sources.b.path = 'tex.txt' does not exist",
        "data.sources.a.path = 'a-*.bin' does not exist",
        "train.metrics.f1 = 'not_there:f1': there is no module 'not_there'",
        "train.metrics.other = 'mine_to_check:broken' is of type int, which cannot be called",
        "train.hooks[1] = 'mine_to_check:wacht': mine_to_check has no 'wacht'",
        "optim.groups: 'nothing.*' fits no parameter",
    ]
    assert found[0]["fix"] == "did you mean text.txt?"
    right = ["data={kind: text, path: text.txt, context: 4}", "optim.groups={'*.weight': {lr: 0.1}}"]
    assert "no problems" in invoke("check", DIGITS, model, *right)


@pytest.mark.parametrize("command", ["show", "explain", "schema", "check"])
def test_help_teaches_with_an_example(command: str) -> None:
    assert f"paceline config {command}" in invoke(command, "--help")


def test_shown_yaml_has_every_section() -> None:
    assert list(yaml.safe_load(invoke("show", DIGITS)))[:3] == ["name", "model", "data"]


def test_check_tells_of_a_shorter_warmup_as_train_does(capsys: pytest.CaptureFixture[str]) -> None:
    path = DIGITS.replace("digits", "gpt_pydoc")
    note = "optim.schedule.warmup = 20 does not fit into train.steps = 6 steps: it is 0 here"
    assert invoke("check", path, "train.steps=6").splitlines() == [f"paceline: {note}", f"{path}: no problems"]
    load_and_tell(Path(path), ["train.steps=6"])
    assert capsys.readouterr().err == f"paceline: {note}\n"
    (row,) = [
        line for line in invoke("explain", path, "train.steps=6").splitlines() if line.startswith("optim.schedule.w")
    ]
    assert row.rstrip().split(maxsplit=2)[1:] == ["0", f"derived: {note}"]
