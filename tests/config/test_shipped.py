"""The configs that come with the package: found by name in any folder, written out, never mistaken for another file."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.config.shipped import FOLDER, find_config, shipped_configs
from paceline.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_config_of_the_repository_is_found_by_its_name() -> None:
    repository = Path(__file__).parents[2] / "configs"
    assert set(shipped_configs()) == {path.stem for path in repository.iterdir()}
    for name, path in shipped_configs().items():
        assert find_config(name).read_bytes() == (repository / path.name).read_bytes()
    assert load_config("digits", ["train.epochs=2"]).train.epochs == 2


def test_a_path_stays_what_it_is() -> None:
    for path in ("digits.yaml", "configs/digits.yaml", "./digits", "nothing"):
        assert find_config(path) == Path(path)


def test_a_file_of_the_name_comes_first_and_one_beside_it_is_no_riddle() -> None:
    Path("digits").write_text("model: {kind: mlp}\ndata: {kind: digits}\ntrain: {epochs: 1}\n")
    assert find_config("digits") == Path("digits")
    Path("gpt_7b.yaml").write_bytes((FOLDER / "gpt_7b.yaml").read_bytes())
    assert find_config("gpt_7b").parent == FOLDER  # it says the same
    Path("gpt_7b.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"gpt_7b\.yaml lies here and differs") as refused:
        find_config("gpt_7b")
    assert "write gpt_7b.yaml for the file" in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "fix"),
    [
        ("digit", "did you mean digits?"),
        ("configs/digits.yaml", "did you mean digits? It comes with Paceline"),
        ("gpt-7b.yaml", "did you mean gpt_7b?"),
        ("nowhere/else.yaml", "there is no folder nowhere"),
    ],
)
def test_what_is_not_there_gets_the_name_of_what_ships(asked: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(asked)
    assert fix in str(refused.value)
