"""The configs that come with the package, by name: a link to ``configs/`` of the repository, files in a wheel."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError, Problem

FOLDER = Path(__file__).parents[1] / "configs"
_ENDINGS = (".yaml", ".json")


def shipped_configs() -> dict[str, Path]:
    """Returns all files that come with the package by name: configs, and models as Hugging Face describes them."""
    return {path.stem: path for path in sorted(FOLDER.glob("*")) if path.suffix in _ENDINGS}


def find_config(path: str | Path) -> Path:
    """Returns the file of a path, or of a name that ships. Raises ConfigError where ``digits.yaml``, say, lies here."""
    asked = Path(path)
    shipped = shipped_configs().get(str(path))
    if shipped is None or asked.is_file():
        return asked
    own = Path(shipped.name)
    if own.is_file() and own.read_bytes() != shipped.read_bytes():
        what = f"{asked} is the name of a config that comes with Paceline, and {own} lies here and differs from it"
        fix = f"write {own} for the file, or {shipped} for the other"
        raise ConfigError([Problem(what=what, rule="a name stands for one config", fix=fix)], source=str(asked))
    return shipped
