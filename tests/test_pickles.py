"""No code path loads a pickle unasked: every place that could is known here, with the reason why it may."""

from __future__ import annotations

import ast
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint.tools.incoming import format_of, open_incoming
from paceline.errors import CheckpointError

SOURCE = Path(paceline.__file__).parent
PACKAGES = ("paceline", "paceline_bench", "paceline_classic", "paceline_course")
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pandas"}
WORDS = (
    *MODULES,
    "torch.load",
    "import load",
    "yaml",
    "weights_only",
    "allow_",
    "eval(",
    "exec(",
    "hub",
    "runpy",
    "jit",
)
LOADERS = {"load", "loads", "Unpickler", "unsafe_load", "full_load", "load_all", "read_pickle", "load_object"}
# The calls that load, by module and function: how many there are, and why they may.
ALLOWED = {
    ("bounded_yaml", "yaml.load"): (2, "the bounded loader, and the safe one in C: both make plain values"),
    ("checkpoint.tools.incoming", "torch.load"): (1, "with --allow-pickle, with weights_only"),
    ("checkpoint.tools.distributed", "torch.load"): (1, "with --allow-pickle, with weights_only"),
    ("checkpoint.tools.distributed", "pickle.Unpickler"): (1, "with --allow-pickle, by a closed list of names"),
    ("data.fetch", "pickle.loads"): (1, "what the line has just pickled itself, to see whether it can be"),
    ("paceline_course.course", "runpy.run_path"): (
        1,
        "an answer to an exercise: the Python file that its reader names, to be run",
    ),
    ("run.function_ranks", "pickle.loads"): (4, "over pipes from and to processes that this one has started"),
}


def loads(tree: ast.Module) -> Counter[str]:
    """Returns the calls and base classes of a module that load pickles or run code, by dotted names."""
    found: Counter[str] = Counter()
    nodes = list(ast.walk(tree))
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes:
        used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        for name in filter(None, (dotted(each) for each in used)):
            name = imported.get(name, name)
            module, _, last = name.rpartition(".")
            is_loader = last in LOADERS and (
                module.split(".")[0] in MODULES or module in ("torch", "yaml", "torch.jit")
            )
            if is_loader or name in ("eval", "exec", "torch.hub.load", "runpy.run_path"):
                found[name] += 1
        if isinstance(node, ast.Call) and any(each.arg == "allow_pickle" for each in node.keywords):
            found["allow_pickle"] += 1
        if isinstance(node, ast.Call) and any(
            each.arg == "weights_only" and getattr(each.value, "value", None) is not True for each in node.keywords
        ):
            found["weights_only=False"] += 1
    return found


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def test_every_place_that_loads_a_pickle_is_known() -> None:
    found: dict[tuple[str, str], int] = {}
    for path in sorted(path for name in PACKAGES for path in SOURCE.with_name(name).rglob("*.py")):
        inside = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else SOURCE.parent)
        module, text = ".".join(inside.with_suffix("").parts), path.read_text()
        if any(word in text for word in WORDS):  # to parse all files takes seconds
            found |= {(module, name): count for name, count in loads(ast.parse(text)).items()}
    assert found == {place: count for place, (count, _) in ALLOWED.items()}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pickle\npickle.load(f)", "pickle.load"),
        ("from pickle import loads\nloads(b)", "pickle.loads"),
        ("from torch import load\nload(f)", "torch.load"),
        ("import torch\ntorch.load(f, weights_only=False)", "weights_only=False"),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle"),
        ("import dill\ndill.loads(b)", "dill.loads"),
        ("import yaml\nyaml.unsafe_load(t)", "yaml.unsafe_load"),
        ("import pickle\nclass A(pickle.Unpickler): ...", "pickle.Unpickler"),
        ("exec(text)", "exec"),
    ],
)
def test_the_walk_finds_loaders(text: str, name: str) -> None:
    assert name in loads(ast.parse(text))


class Planted:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.path,)


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[Path], Path]:
    """Writes a pickle that would make a folder; returns that folder."""

    def plant(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
        return tmp_path / "ran"

    return plant


def write_hugging_face(folder: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")


def test_a_hidden_pickle_in_a_folder_of_hugging_face_is_not_looked_at(
    tmp_path: Path, planted: Callable[[Path], Path]
) -> None:
    write_hugging_face(tmp_path / "hf")
    ran = planted(tmp_path / "hf" / ".metadata")
    assert format_of(tmp_path / "hf") == "safetensors"
    assert set(open_incoming(tmp_path / "hf", format_of(tmp_path / "hf")).model) == {"a"}
    assert not ran.exists()


@pytest.mark.parametrize("name", ["dcp/.metadata", "a.pt", "a.bin", "a.safetensors"])
def test_a_pickle_is_opened_only_where_it_is_allowed_and_never_run(
    tmp_path: Path, planted: Callable[[Path], Path], name: str
) -> None:
    ran = planted(tmp_path / name)
    path = tmp_path / name.removesuffix("/.metadata")
    if name != "a.safetensors":
        with pytest.raises(CheckpointError, match=r"a pickle: it was not opened(.|\n)*--allow-pickle"):
            open_incoming(path, format_of(path))
    with pytest.raises(CheckpointError):
        open_incoming(path, format_of(path), allows_pickle=True)
    torch.save({"a": torch.ones(2), "b": Planted(ran)}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="never code"):
        open_incoming(tmp_path / "b.pt", "torch", allows_pickle=True)
    assert not ran.exists()


def test_the_format_that_is_named_is_the_one_that_is_read(tmp_path: Path) -> None:
    write_hugging_face(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    with pytest.raises(CheckpointError, match="is a safetensors file\n  --format torch reads"):
        open_incoming(path, "torch", allows_pickle=True)
    torch.save({"a": torch.ones(3)}, tmp_path / "b.safetensors")
    assert set(open_incoming(tmp_path / "b.safetensors", "torch", allows_pickle=True).model) == {"a"}
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        open_incoming(tmp_path / "b.safetensors", "safetensors")


def test_a_torch_file_whose_tensors_show_the_same_bytes_again_and_again_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(2**40)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="tensors of 4,398,046,511,104 bytes in a file of"):
        open_incoming(tmp_path / "a.pt", "torch", allows_pickle=True)
