"""What readers of the source rely on: files that a text names exist, engines and functions fit into a head.

Each rule is a function from a package to what breaks it, and is shown to fail on a planted one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
OTHER_FOLDERS = [Path(__file__).parents[1] / name for name in ("src", "tests", "scripts", "bench")]

MOST_ATTRIBUTES = 24  # of an engine, with those of its base classes
MOST_ARGUMENTS = 8  # of a constructor, or of a function that others call
# What has more today: it may have fewer. ``fit`` is a signature that users were promised.
MORE_ARGUMENTS = {"trainer.py: fit": 9, "train/step.py: train_step": 9}

# Lines of each room, and of the files beside them. Who needs more raises it in the same commit, and says why.
LINES = {
    "beside the rooms": 1_550,  # charts.py came from other rooms; classic.py names what moved out
    "calibrate": 1_675,
    "chaos": 1_210,
    "checkpoint": 5_050,  # memory.py: snapshots in the memory of hosts
    "cli": 3_290,  # completion.py; checkpoint upcycle
    "cluster": 2_042,  # what attention over ranks costs; its tiles; kernels that go by numbers
    "comm": 7_442,  # ranks that torchrun restarts; kept.py: files that keepers of hosts serve; emulated links
    "config": 3_600,  # checkpoint.memory
    "data": 4_870,  # streams are compared between ranks; generators of samplers; packing; pictures of digits
    "doctor": 830,
    "engines": 11_710,  # ranks that share sequences; inputs on the host; MLPs in tiles; experts and norms over ranks
    "health": 1_570,  # verdicts on experts
    "launch": 2_850,
    "models": 3_825,  # attention over ranks and inside documents; experts, their balance, their adapters
    "plan": 1_610,  # the same; ranks that share sequences; shapes with experts and more heads, rules for their ranks
    "predict": 4_370,  # what snapshots cost; whole gradients; what is least certain
    "records": 3_880,  # what saves cost
    "rehearse": 3_061,  # one of many ranks on a real GPU; attention and dropout as a GPU has them
    "run": 8_215,  # keeper.py: a host's snapshots; one that is stopped
    "schedule": 1_380,  # the ring on which keys and values travel
    "search": 2_655,  # what snapshots take
    "train": 5_435,  # snapshots.py
    "verify": 1_125,
    "view": 1_965,  # texts, failures, tags and notes of a run; the table of all runs; the map of experts
}

# Lines of the packages beside this one. The course has its curves, its capstone, lessons on scale and on experts, and
# what these begin with on the page with sliders, which came from its script.
BESIDE_LINES = {"paceline_bench": 3_830, "paceline_classic": 1_800, "paceline_course": 1_920}
PACKAGES = [SOURCE, *map(SOURCE.with_name, BESIDE_LINES)]

FILE_NAME = re.compile(r"(?<![\w/.*{}<>-])[\w/]+\.py(?!\w)")
COMMENT = re.compile(r"#.*")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


@dataclass(slots=True)
class KnownClass:
    """What a class is made of: its bases, and the attributes that it sets itself."""

    bases: list[str]
    attributes: set[str] = field(default_factory=set)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a module, its classes and their functions, without a look into what functions do."""
    yield node
    if isinstance(node, ast.Module | ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, DOCUMENTED):
                yield from definitions(inner)


def sources(package: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), path


# Files that are named exist.


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the comments and docstrings of a file that name a file, with their first lines."""
    text = path.read_text()
    if ".py" not in text:
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if ".py" in line and (comment := COMMENT.search(line)):
            yield number, comment.group()
    for node in definitions(tree_of(path)):
        if isinstance(node, DOCUMENTED) and (found := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, found


def lost_files(package: Path) -> list[str]:
    """Names the files that a comment or a docstring sends readers to, and that are not there.

    A name such as ``my_model.py`` is a user's file, and a path into a folder that is none of ours another project's.
    """
    ours = [path for folder in (SOURCE, package, *OTHER_FOLDERS) for path in folder.rglob("*.py")]
    known = {path.name for path in ours}
    endings = {"/".join(path.parts[-count:]) for path in ours for count in (2, 3, 4)}
    folders = {path.parent.name for path in ours}
    lost = []
    for name, path in sources(package):
        for first, text in texts(path):
            for match in FILE_NAME.finditer(text):
                wanted = match.group().removeprefix("paceline/")
                folder, _, last = wanted.rpartition("/")
                is_foreign = last.startswith("my_") or (folder and folder.split("/")[0] not in folders)
                if not is_foreign and wanted not in (endings if folder else known):
                    lost.append(f"{name}:{first + text[: match.start()].count(chr(10))}: there is no {wanted}")
    return lost


# Engines hold few attributes.


def own_attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yields what a class sets: in its body, and of ``self`` in its methods."""
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    for inner in ast.walk(node):
        is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if is_set and isinstance(inner.value, ast.Name) and inner.value.id == "self":
            yield inner.attr


def engine_attributes(package: Path) -> dict[str, set[str]]:
    """Returns the attributes of each engine, with those of its base classes."""
    known: dict[str, KnownClass] = {}
    for _, path in sources(package / "engines"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                known[node.name] = KnownClass(bases, set(own_attributes(node)))

    def line(name: str) -> list[str]:
        return [name, *(above for base in known[name].bases if base in known for above in line(base))]

    found = {name: line(name) for name in known}
    engines = {name: names for name, names in found.items() if "Engine" in names}
    return {name: set().union(*(known[each].attributes for each in names)) for name, names in engines.items()}


def crowded_engines(package: Path) -> list[str]:
    return [
        f"{name} has {len(found)} attributes: {', '.join(sorted(found))}"
        for name, found in engine_attributes(package).items()
        if len(found) > MOST_ATTRIBUTES
    ]


# Functions take few arguments.


def wide_functions(package: Path) -> dict[str, int]:
    """Returns the functions and constructors that take too many arguments, with their number.

    A verb of the command line has an argument for each of its options, and a kernel one for each of its pointers.
    """
    wide = {}
    for name, path in sources(package):
        for node in () if name.startswith("cli/") else definitions(tree_of(path)):
            if isinstance(node, FUNCTIONS) and (node.name == "__init__" or not node.name.startswith("_")):
                every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                count = sum(each.arg not in ("self", "cls") for each in every)
                if count > MOST_ARGUMENTS and not any("triton" in ast.unparse(each) for each in node.decorator_list):
                    wide[f"{name}: {node.name}"] = count
    return wide


def test_files_that_comments_and_docstrings_name_exist() -> None:
    found = [lost for package in PACKAGES for lost in lost_files(package)]
    assert not found, "\n" + "\n".join(found)


def test_an_engine_has_few_attributes_with_those_of_its_bases() -> None:
    engines = engine_attributes(SOURCE)
    assert {"DataParallel", "ZeroParallel", "FullySharded", "CombinedParallel"} <= engines.keys()
    assert not (found := crowded_engines(SOURCE)), "\n" + "\n".join(found)


def test_functions_that_others_call_take_few_arguments() -> None:
    found = {name: count for package in PACKAGES for name, count in wide_functions(package).items()}
    assert not (wide := {name: count for name, count in found.items() if count > MORE_ARGUMENTS.get(name, 0)}), wide


def test_the_protocol_of_engines_knows_its_children_as_types_alone() -> None:
    """``engine.py`` imports nothing of a strategy, or of what strategies are made of, when it is loaded."""
    loaded = [node for node in tree_of(SOURCE / "engines" / "engine.py").body if isinstance(node, ast.ImportFrom)]
    inner = {node.module for node in loaded if node.module and node.module.startswith("paceline.engines.")}
    assert inner == {f"paceline.engines.{name}" for name in ("groups", "loss_sums", "precision")}


# The rules can fail.


def plant(folder: Path, name: str, text: str) -> Path:
    path = folder / "paceline" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return folder / "paceline"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"""A module (see old_step.py)."""\n', 1),
        ('"""A module.\n\nSee train/old_step.py.\n"""\n', 3),
        ("x = 1  # as in old_step.py\n", 1),
        ('def f():\n    """Runs.\n\n    As old_step.py does.\n    """\n', 4),
    ],
)
def test_a_lost_file_is_named(tmp_path: Path, text: str, line: int) -> None:
    (found,) = lost_files(plant(tmp_path, "train/step.py", text))
    assert found.startswith(f"train/step.py:{line}: there is no ")


@pytest.mark.parametrize("name", ["step.py", "train/step.py", "my_net.py", "torch/nn/step.py", "test_source_rules.py"])
def test_files_that_are_there_and_those_of_others_are_not_named(tmp_path: Path, name: str) -> None:
    assert not lost_files(plant(tmp_path, "train/step.py", f'"""See {name}."""\n'))


def test_attributes_count_with_those_of_the_bases(tmp_path: Path) -> None:
    lines = "\n".join(f"        self.x{number} = {number}" for number in range(MOST_ATTRIBUTES))
    text = f"class Engine:\n    def __init__(self):\n{lines}\n\nclass Mine(Engine):\n    y: int = 0\n"
    package = plant(tmp_path, "engines/mine.py", text)
    assert [each.split(":")[0] for each in crowded_engines(package)] == [f"Mine has {MOST_ATTRIBUTES + 1} attributes"]


@pytest.mark.parametrize(("name", "is_named"), [("run", True), ("__init__", True), ("_run", False)])
def test_a_function_of_nine_arguments_is_named(tmp_path: Path, name: str, is_named: bool) -> None:
    text = f"class A:\n    def {name}(self, a, b, c, d, e, f, g, *, h, i=1): ...\n"
    assert wide_functions(plant(tmp_path, "train/step.py", text)) == ({f"train/step.py: {name}": 9} if is_named else {})


def lines_by_room(source: Path) -> dict[str, int]:
    """Counts the lines of each folder of a package, and of the files beside them."""
    found: dict[str, int] = {}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).parts
        room = parts[0] if len(parts) > 1 else "beside the rooms"
        found[room] = found.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return found


def test_no_room_is_wider_than_its_budget() -> None:
    found = lines_by_room(SOURCE)
    assert found.keys() == LINES.keys()
    wide = {
        room: f"{lines} lines, and {LINES[room]} are the most" for room, lines in found.items() if lines > LINES[room]
    }
    assert not wide, wide
    beside = {name: sum(lines_by_room(SOURCE.with_name(name)).values()) for name in BESIDE_LINES}
    assert not {name: lines for name, lines in beside.items() if lines > BESIDE_LINES[name]}


def test_lines_are_counted_by_room(tmp_path: Path) -> None:
    (tmp_path / "room" / "inner").mkdir(parents=True)
    (tmp_path / "room" / "a.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "room" / "inner" / "c.py").write_text("c = 3\n")
    (tmp_path / "errors.py").write_text("d = 4\n")
    assert lines_by_room(tmp_path) == {"room": 3, "beside the rooms": 1}
