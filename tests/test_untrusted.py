"""Input within bounds: JSON, YAML, names and files that others wrote are refused in a sentence, at once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.bounded_yaml import load_yaml
from paceline.config.load import load_config
from paceline.errors import ConfigError, UsageError
from paceline.untrusted import file_inside, open_regular, parse_json, plain_name, read_regular

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(value=VALUES)
def test_json_that_is_right_is_read_as_it_is(value: object) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only)
        try:
            text.encode()
        except UnicodeEncodeError:
            continue
        assert parse_json(text) == json.loads(text)
        assert parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 10_000 + "]" * 10_000, "nested more than 200 levels"),
        ('{"a":' * 300 + "1" + "}" * 300, "nested more than 200 levels"),
        ('["]]]",' * 300 + "1" + "]" * 300, "nested more than 200 levels"),
        ("[" * 100_000, "nested more than 200 levels"),
        ("9" * 5_000, "a number of 5,000 digits"),
        ('"\\ud800"', "surrogates not allowed"),
        (b'"\xff"', "can't decode"),
        ("[1, 2", "delimiter"),
        ("", "Expecting value"),
    ],
)
def test_json_beyond_the_bounds_is_refused_in_a_sentence(text: str | bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_json(text)


def test_brackets_in_texts_are_no_levels() -> None:
    assert parse_json(json.dumps(["[" * 500, '\\"[[' * 300])) == ["[" * 500, '\\"[[' * 300]
    with pytest.raises(ValueError, match="it has 12 bytes, and JSON is read up to 10"):
        parse_json(" " * 12, most_bytes=10)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../a", "a/b", "a\\b", "a\0", "x" * 300, 3, None, ["a"]]
)
def test_a_name_is_one_part(name: object) -> None:
    with pytest.raises(ValueError, match=r"is no name of a file|leads out of the folder"):
        plain_name(name)


def test_links_may_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (tmp_path / "outside").write_text("secret")
    (folder / "inside").write_text("mine")
    (folder / "near").symlink_to("inside")
    for name, target in (("far", tmp_path / "outside"), ("up", "../outside"), ("zero", "/dev/zero")):
        (folder / name).symlink_to(target)
        with pytest.raises(ValueError, match="a link that leads out of the folder"):
            file_inside(folder, name)
    (folder / "twice").symlink_to("far")
    with pytest.raises(ValueError, match="leads out"):
        file_inside(folder, "twice")
    assert file_inside(folder, "near").read_text() == "mine"


def test_a_snapshot_of_hugging_faces_cache_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a" / "snapshots" / "1f2e"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a" / "blobs").mkdir()
    (tmp_path / "models--a" / "blobs" / "77").write_text("weights")
    (tmp_path / "models--a" / "other").write_text("secret")
    (snapshot / "model.safetensors").symlink_to("../../blobs/77")
    (snapshot / "config.json").symlink_to("../../other")
    assert file_inside(snapshot, "model.safetensors").read_text() == "weights"
    with pytest.raises(ValueError, match="leads out"):
        file_inside(snapshot, "config.json")


def test_pipes_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(OSError, match=f"it is {kind}, and not a file"):
            open_regular(path)
        with pytest.raises(OSError, match=f"it is {kind}"):
            read_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="it has 11 bytes, and is read up to 10"):
        read_regular(tmp_path / "large", 10)


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(40))
LEVELS = "".join(f"a{n}: &a{n} {'[' * 40}{f'*a{n - 1}' if n else 1}{']' * 40}\n" for n in range(3))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ALIASES, "more than 20,000 values, aliases counted in full"),
        (MERGES, "more than 20,000 values"),
        (LEVELS, "nested more than 64 levels"),
        ("a: " + "[" * 10_000 + "]" * 10_000, "nested more than 64 levels"),
        ("a: " + "9" * 5_000, "a number has 5,000 digits"),
        ("a: &a [*a]", "refers to itself"),
        ('a: "\\ud800"', "half of a character"),
        ("a: !!bool maybe", "does not fit its tag"),
        ("a: !!timestamp 2024-99-99", "does not fit its tag"),
        ("a: !!python/object/apply:os.system [echo]", "could not determine a constructor"),
        ("a: " + "x" * 200_000, "characters, and YAML is read up to"),
    ],
)
def test_yaml_beyond_the_bounds_is_refused_in_a_sentence(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(yaml.YAMLError, match=told):
        load_yaml(text)
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_config(tmp_path / "a.yaml")


def test_a_config_that_never_ends_is_refused() -> None:
    with pytest.raises(ConfigError):
        load_config("/dev/zero")


def test_a_catalog_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    from paceline.cluster.entries import read_catalog

    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(UsageError, match="it is a named pipe"):
        read_catalog(tmp_path / "a.yaml")


# Who reads JSON and YAML by itself, and why it may. Control data is that of a job's own processes.
OWN_READERS = {
    "bounded_yaml.py": "the reader of YAML",
    "untrusted.py": "the reader of JSON",
    "checkpoint/write.py": "a copy of what it has itself",
    "comm/objects.py": "what ranks of the same job send one another",
    "data/documents.py": "lines of bounded length, of which those that cannot be read are skipped and counted",
    "comm/ledger/file.py": "the ledger of a rank on this host",
    "health/ledger_view.py": "control data",
    "health/pairing.py": "control data",
    "health/straggler.py": "control data",
    "run/other_hosts.py": "control data",
    "run/watch.py": "control data",
    "run/worker.py": "its own command line",
    "plan/rule_case.py": "a table of the package",
    "records/event_words.py": "a table of the package",
    "rehearse/dryrun/operators.py": "a table of the package",
}


def test_one_reader_for_json_and_one_for_yaml() -> None:
    words = re.compile(r"json\.loads?\b|yaml\.(safe_|full_|unsafe_)?load\(")
    source = Path(paceline.__file__).parent
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if words.search(path.read_text())}
    assert found <= OWN_READERS.keys()
    packages = ("paceline_bench", "paceline_classic", "paceline_course")
    beside = [path for name in packages for path in source.with_name(name).rglob("*.py")]
    others = {str(path.relative_to(source.parent)) for path in beside if words.search(path.read_text())}
    # Its own command line, and a trace that torch has written for it just before.
    assert others == {"paceline_bench/gpu/loops.py", "paceline_bench/traced_step.py"}
