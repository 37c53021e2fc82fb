"""YAML and overrides: what is read, what is refused, and that a dump reads back."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.config import Config, LoadedConfig, config_from_dict, dump_yaml, load_config, load_config_with_sources
from paceline.config.schema import CompressionConfig
from paceline.config.sections import MLPModelConfig
from paceline.config.yaml_text import dump_values, parse_document, parse_value
from paceline.errors import ConfigError, Problem

# A test asserts no timing: a busy machine must not fail a law.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CONFIGS = Path(__file__).parents[2] / "configs"
MINIMAL = "model: {kind: mlp}\ndata: {kind: digits}\n"
KINDS = ["model.kind=mlp", "data.kind=digits"]


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(path: Path | None, *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_our_configs_load_and_round_trip(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tinyshakespeare.txt").touch()  # which one of them reads, and nobody ships
    (tmp_path / "bert").mkdir()  # which another one trains
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    (tmp_path / "bert" / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    assert load_config(write(tmp_path, dump_yaml(config))) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_there_are_three_configs() -> None:
    assert {path.name for path in CONFIGS.glob("*.yaml")} >= {"digits.yaml", "gpt_pydoc.yaml", "resnet_images.yaml"}


def test_numbers_are_read_as_people_mean_them(tmp_path: Path) -> None:
    text = MINIMAL + "optim: {lr: 3e-4, eps: 1E-6, weight_decay: .5}\ntrain: {seed: 010, global_batch: 1_024}\n"
    config = load_config(write(tmp_path, text))
    assert config.optim.lr == 3e-4
    assert config.optim.eps == 1e-6
    assert config.optim.weight_decay == 0.5
    assert config.train.seed == 10
    assert config.train.global_batch == 1024


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e6", 1e6),
        ("-2", -2),
        ("+1.5", 1.5),
        ("5.", 5.0),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("False", False),
        ("", None),
        ("null", None),
        ("~", None),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("0x10", "0x10"),
        ("[1, 2e0, a]", [1, 2.0, "a"]),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.from_regex(r"\A[-+]?[0-9_.]{1,5}(e[-+]?[0-9])?\Z")
    | st.sampled_from(["yes", "null", "~", "<<", "=", "3e-4", "1:20", "- a", "a: b", "#", "", " ", "\t", "'", "{}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@relaxed
@given(values=st.dictionaries(st.text(min_size=1), plain_values, max_size=4))
def test_what_is_dumped_reads_back_as_it_was(values: dict[str, Any]) -> None:
    assert parse_document(dump_values(values), "dump").values == values


@relaxed
@given(args=st.dictionaries(st.text(min_size=1), plain_values, max_size=4), name=st.text("abc012e-+._", min_size=1))
def test_a_config_round_trips(args: dict[str, Any], name: str) -> None:
    values = {
        "name": f"x{name}",
        "model": {"kind": "factory", "factory": "my.code:build", "args": args},
        "data": {"kind": "factory", "factory": "my.code:load"},
    }
    config = config_from_dict(values)
    assert config_from_dict(parse_document(dump_yaml(config), "dump").values) == config


def test_an_empty_section_means_defaults(tmp_path: Path) -> None:
    text = MINIMAL + "optim:\n  # lr: 3\n  schedule:\ntrain:\n"
    assert load_config(write(tmp_path, text)) == load_config(None, KINDS)


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = "model: {kind: mlp}\ndata: &d {kind: digits, workers: 2}\n"
    assert load_config(write(tmp_path, text)).data.workers == 2
    values = parse_document("a: &a {x: 1}\nb: {<<: *a, y: 2}\n", "test").values
    assert values["b"] == {"x": 1, "y": 2}


# What is refused


def test_missing_file_names_those_that_are_there(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    (problem,) = problems_of(tmp_path / "confg.yaml")
    assert "confg.yaml does not exist" in problem.what
    assert str(tmp_path / "config.yaml") in problem.fix
    (problem,) = problems_of(tmp_path / "zzz.yaml")
    assert problem.fix.endswith("are config.yaml")
    (problem,) = problems_of(tmp_path / "nowhere" / "config.yaml")
    assert "no folder" in problem.fix


def test_a_folder_and_a_binary_file_are_no_configs(tmp_path: Path) -> None:
    assert "is a folder" in problems_of(tmp_path)[0].what
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"ab\xff\xfe")
    assert "is not text" in problems_of(path)[0].what
    path.write_bytes(b"a: \x00")
    assert "is not YAML" in problems_of(path)[0].what


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("model: [1,\n", "line 2, column 1"),
        ("a: 1\n\tb: 2\n", "line 2, column 1"),
        ("a: 1\nb: c: d\n", "line 2, column 5"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1"),
        ("a: !!python/name:os.system\n", "line 1, column 4"),
        ("a: *missing\n", "line 1, column 4"),
    ],
)
def test_syntax_errors_tell_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    (problem,) = problems_of(write(tmp_path, text))
    assert problem.what.startswith(where)


@pytest.mark.parametrize(("text", "found"), [("- 1\n- 2\n", "a list of 2"), ("hello\n", "'hello'"), ("3\n", "value 3")])
def test_the_top_is_a_section(tmp_path: Path, text: str, found: str) -> None:
    (problem,) = problems_of(write(tmp_path, text))
    assert found in problem.what


def test_an_empty_file_lacks_model_and_data(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "null\n"):
        assert [each.what for each in problems_of(write(tmp_path, text))] == ["model is missing", "data is missing"]


def test_duplicate_keys_at_any_depth(tmp_path: Path) -> None:
    text = MINIMAL + "train:\n  steps: 1\n  steps: 2\noptim: {schedule: {unit: steps, unit: samples}}\nmodel: {}\n"
    problems = problems_of(write(tmp_path, text))
    assert [each.what for each in problems] == [
        "train.steps is given twice, in lines 4 and 5",
        "optim.schedule.unit is given twice, in lines 6 and 6",
        "model is given twice, in lines 1 and 7",
    ]


def test_keys_that_are_not_text_and_cycles(tmp_path: Path) -> None:
    assert "the key 1 is not text" in problems_of(write(tmp_path, "1: 2\n"))[0].what
    assert "the key null is not text" in problems_of(write(tmp_path, "? \n: 2\n"))[0].what
    assert "refers to itself" in problems_of(write(tmp_path, "a: &a {b: *a}\n"))[0].what
    assert "refers to itself" in problems_of(write(tmp_path, "a: &a [1, *a]\n"))[0].what


def test_problems_tell_the_line(tmp_path: Path) -> None:
    text = MINIMAL + "optim:\n  lr: fast\n  betas:\n    - 2\n    - 0.9\ntrain:\n  sed: 3\n"
    what = [each.what for each in problems_of(write(tmp_path, text), "comm.overlp=true")]
    assert [text.rpartition(" (")[0::2] for text in what] == [
        ("comm.overlp is not a known key", "override)"),
        ("optim.lr = 'fast' is not a number above 0", "line 4)"),
        ("optim.betas = [2, 0.9] is not a list of 2, each a number of at least 0 and below 1", "line 5)"),
        ("train.sed is not a known key", "line 9)"),
    ]


# Overrides


def test_a_length_on_the_command_line_takes_the_place_of_the_other_one_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "train: {epochs: 3}\n")
    train = load_config(path, ["train.steps=5"]).train
    assert (train.steps, train.epochs) == (5, None)
    assert load_config(path, ["train.steps=null"]).train.epochs == 3
    for both in (["train.steps=5", "train.epochs=2"], ["train.epochs=2", "train.steps=5"]):
        with pytest.raises(ConfigError, match="are both given"):
            load_config(path, both)


def test_overrides_replace_and_add(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "train: {epochs: 3}\n")
    config = load_config(
        path,
        [
            "train.epochs=null",
            "train.steps=5",
            "optim.schedule.kind=cosine",
            "optim.lr=1e-2",
            "optim.betas=[0.5, 0.6]",
            "model={kind: mlp, hidden_dim: 8}",
            "name=a=b",
            "train.seed=1",
            "train.seed=2",
        ],
    )
    assert (config.train.epochs, config.train.steps, config.train.seed) == (None, 5, 2)
    assert config.optim.schedule.kind == "cosine"
    assert config.optim.lr == 0.01
    assert config.optim.betas == (0.5, 0.6)
    assert config.model == MLPModelConfig(kind="mlp", hidden_dim=8)
    assert config.name == "a=b"


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("train.steps", "write train.steps=value"),
        ("=3", "write section.key=3"),
        ("train..steps=3", "write train.steps=3"),
        ("--train.steps=3", "write train.steps=3"),
        (".=3", "write section.key=3"),
        ("train.epochs=", """write train.epochs=null for none, train.epochs='""' for an empty text, or leave it out"""),
    ],
)
def test_malformed_overrides(override: str, fix: str) -> None:
    (problem,) = problems_of(None, *KINDS, override)
    assert repr(override) in problem.what
    assert problem.fix == fix


def test_an_override_with_an_unreadable_value_or_through_a_value() -> None:
    (problem,) = problems_of(None, *KINDS, "optim.betas=[0.9,")
    assert "optim.betas=[0.9," in problem.what
    (problem,) = problems_of(None, *KINDS, "train.steps=3", "train.steps.more=3")
    assert problem.what == "override train.steps.more reaches into train.steps = 3"


def test_all_overrides_are_judged_together() -> None:
    assert len(problems_of(None, *KINDS, "train.steps", "train.sed=3", "comm.bucket_mb=-1", "name=a/b")) == 4


def test_the_error_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model: 3\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: 2 problems"):
        load_config(path)
    with pytest.raises(ConfigError, match="my dict: 2 problems"):
        config_from_dict({}, source="my dict")


def test_input_is_not_changed() -> None:
    values: dict[str, Any] = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "optim": {"schedule": None}}
    config_from_dict(values)
    assert values == {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "optim": {"schedule": None}}


def test_a_config_is_frozen() -> None:
    config = load_config(None, KINDS)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]


# Sources


def test_sources(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "optim:\n  lr: 1e-3\n  schedule:\n    kind: cosine\n")
    loaded = load_config_with_sources(path, ["train.steps=3", "comm={overlap: false}"])
    assert loaded.config == load_config(path, ["train.steps=3", "comm={overlap: false}"])
    assert loaded.sources["optim.lr"] == f"file {path}:4"
    assert loaded.sources["optim.schedule.kind"] == f"file {path}:6"
    assert loaded.sources["optim.schedule.unit"] == "default"
    assert loaded.sources["train.steps"] == "override"
    assert loaded.sources["comm.overlap"] == "override"
    assert loaded.sources["comm.bucket_mb"] == "default"
    assert loaded.sources["model.kind"] == f"file {path}:1"


def test_every_key_has_a_source() -> None:
    loaded = load_config_with_sources(None, KINDS)

    def leaves(values: dict[str, Any], place: str = "") -> set[str]:
        found = set()
        for key, value in values.items():
            found |= leaves(value, f"{place}{key}.") if isinstance(value, dict) and value else {place + key}
        return found

    assert set(loaded.sources) == leaves(yaml.safe_load(dump_yaml(loaded.config)))
    assert isinstance(loaded.config, Config)


# What an override undoes


def loaded(tmp_path: Path, text: str, *overrides: str) -> LoadedConfig:
    path = tmp_path / "undo.yaml"
    path.write_text("model: {kind: mlp}\ndata: {kind: digits}\n" + text)
    return load_config_with_sources(path, overrides)


COMPRESSED = "comm:\n  compression:\n    policy: topk\n    ratio: 0.05\n"


@pytest.mark.parametrize("override", ["comm.compression.policy=none", "comm.compression.policy=null"])
def test_what_an_override_makes_idle_is_left_out_and_told(tmp_path: Path, override: str) -> None:
    found = loaded(tmp_path, COMPRESSED, override)
    assert found.config.comm.compression == CompressionConfig()
    (note,) = found.notes
    assert note.startswith("comm.compression.ratio = 0.05 has no effect with comm.compression.policy = none")
    assert loaded(tmp_path, COMPRESSED, "comm.compression=null").config.comm.compression == CompressionConfig()


def test_what_is_idle_without_what_was_left_out_is_left_out_as_well(tmp_path: Path) -> None:
    rows = (
        "data: {kind: jsonl, path: rows, inputs: t, vocab_size: 9, packing: stream, documents: apart, end_token: 0}\n"
    )
    (tmp_path / "packed.yaml").write_text("model: {kind: gpt, size: gpt-nano, vocab_size: 9}\n" + rows)
    found = load_config_with_sources(tmp_path / "packed.yaml", ["data.packing=none"])
    first, second = found.notes
    assert first.startswith("data.documents = apart has no effect with data.packing = none")
    assert second.startswith("data.end_token = 0 has no effect with data.packing = none")


def test_what_is_idle_in_the_file_or_by_two_overrides_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ratio = 0\.05 has no effect"):
        loaded(tmp_path, COMPRESSED.replace("topk", "none"), "train.steps=3")
    with pytest.raises(ConfigError, match=r"ratio = 0\.5 has no effect"):
        loaded(tmp_path, COMPRESSED, "comm.compression.policy=none", "comm.compression.ratio=0.5")
    with pytest.raises(ConfigError, match=r"model\.router = \{\.\.\.\} has no effect without model\.experts"):
        load_config(CONFIGS / "gpt_pydoc.yaml", ["model.router.balance=bias"])


def test_a_run_that_an_override_shortens_gets_a_shorter_warmup(tmp_path: Path) -> None:
    text = "optim: {schedule: {kind: cosine, warmup: 100}}\ntrain: {steps: 1000}\n"
    found = loaded(tmp_path, text, "train.steps=50")
    assert found.config.optim.schedule.warmup == 5.0
    assert found.notes == ("optim.schedule.warmup = 100 does not fit into train.steps = 50 steps: it is 5 here",)
    assert found.sources["optim.schedule.warmup"] == f"derived: {found.notes[0]}"
    assert loaded(tmp_path, text, "train.steps=500").notes == ()
    for overrides in (["train.steps=50", "optim.schedule.warmup=60"], ["optim.schedule.warmup=2000"]):
        with pytest.raises(ConfigError, match=r"is longer than train\.steps"):
            loaded(tmp_path, text, *overrides)
    with pytest.raises(ConfigError, match=r"is longer than train\.steps"):
        loaded(tmp_path, text.replace("1000", "50"))


def test_a_value_with_an_older_word_gets_its_new_one(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("model: {kind: gpt, size: gpt-nano}\ndata: {kind: text, tokens: byte}\n")
    found = load_config_with_sources(tmp_path / "old.yaml")
    assert found.config.data.tokens == "bytes"  # type: ignore[union-attr]
    assert found.notes == ("data.tokens = byte: the word is bytes",)
