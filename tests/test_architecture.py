"""Who may import whom: the rooms of the design as rules over the source, and proof that each rule can fail.

A rule looks at the syntax trees of all files: imports at load time, inside functions, and for type checkers. A type is
knowledge too, so that imports for type checkers obey the direction; they may go sideways, though, and may name torch.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent

LEVELS = (
    ("errors", "units", "imports", "terminal", "untrusted", "notebook"),
    ("bounded_yaml", "charts", "chrome_trace"),
    ("mesh", "shards", "schedule"),
    ("plan",),  # below config: the rules of a layout run while a config is loaded, and the defaults stand there
    ("config", "cluster"),
    ("predict",),
    ("search", "health"),
    ("clock", "free_memory"),
    ("comm", "models", "data"),
    ("engines", "checkpoint"),
    ("records",),
    ("train",),
    ("rehearse", "chaos"),
    ("run",),
    ("calibrate", "verify", "doctor", "launch"),
    ("view",),
    ("learn", "classic"),
    ("cli",),
    ("__main__",),
)
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 500, 70
SIDEWAYS: set[tuple[str, str]] = {("imports", "errors")}
TORCH_FREE = (
    "bounded_yaml",
    "chaos.faults",
    "chaos.notes",
    "chaos.report",
    "classic",
    "cluster",
    "config",
    "errors",
    "health",
    "imports",
    "launch.kubectl",
    "launch.pod",
    "learn",
    "mesh",
    "notebook",
    "plan",
    "predict",
    "records.records",
    "records.report",
    "records.summary",
    "schedule",
    "search",
    "shards",
    "terminal",
    "units",
    "untrusted",
    "view",
)
LAUNCHERS = ("torch.distributed.launcher", "torch.distributed.elastic")
PEERS = ("torch.nn.parallel", "accelerate", "lightning", "deepspeed")
# What stands outside the package, and who may import it: the first two are of the top-level bench/, not in the wheel.
OUTSIDE = {
    "measures": (),
    "slow_links": (),
    "paceline_bench": ("cli",),
    "paceline_course": ("cli", "learn"),
    "paceline_classic": ("", "classic"),
}
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
# Each is one strategy, and knows no other; all else in engines/ may be shared.
ENGINES = {"engines.ddp", "engines.zero", "engines.fsdp", "engines.pipeline"}
# What a file may use by a dotted name alone, and what imports without a statement: other files need no look into
# expressions, where most of their nodes are.
BY_NAME = ("torch.distributed", *ENVIRONMENT, *PEERS)
IMPORTERS = ("importlib.import_module", "import_module", "__import__")
PARTLESS = (ast.expr_context, ast.operator, ast.boolop, ast.cmpop, ast.unaryop, ast.Constant, ast.Name)
NAMELESS = ("utils", "helpers", "common", "misc", "core")


@dataclass(frozen=True, slots=True)
class Use:
    """A module, or a name of one, that a file imports or reaches through a dotted name."""

    line: int
    target: str
    when: Literal["load", "call", "types"]


@dataclass(frozen=True, slots=True)
class Violation:
    file: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.what}"


@dataclass(frozen=True)
class SourceFile:
    path: Path
    package: Path

    @cached_property
    def name(self) -> str:
        """The module's name below the package: ``comm.base``, ``comm`` for its __init__.py, and ``""`` for the root."""
        return ".".join(self.path.relative_to(self.package).with_suffix("").parts).removesuffix("__init__").rstrip(".")

    @cached_property
    def found(self) -> tuple[list[Use], bool, list[tuple[int, str]]]:
        """What the file uses, whether it has a docstring, and what is too long; its tree is large, and not kept."""
        text = self.path.read_text()
        tree = ast.parse(text, str(self.path))
        collector = Collector(
            self.name,
            is_package=self.path.stem == "__init__",
            sees_expressions=any(map(text.__contains__, (*BY_NAME, *IMPORTERS))),
        )
        collector.visit(tree)
        return collector.uses, bool(ast.get_docstring(tree)), list(too_long(text, tree))

    @property
    def uses(self) -> list[Use]:
        return self.found[0]

    def violation(self, line: int, rule: str, what: str) -> Violation:
        return Violation(str(self.path.relative_to(self.package.parent)), line, rule, what)


class Collector(ast.NodeVisitor):
    """Finds what a file uses, and when."""

    def __init__(self, name: str, *, is_package: bool, sees_expressions: bool) -> None:
        self.uses: list[Use] = []
        self._seen = ast.AST if sees_expressions else (ast.stmt, ast.excepthandler, ast.match_case)
        self._parents = ["paceline", *name.split(".")] if is_package else ["paceline", *name.split(".")[:-1]]
        self._when: Literal["load", "call", "types"] = "load"

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._parents[: len(self._parents) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            self._add(node, f"{module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = dotted_name(node)
        if dotted is not None and is_below(dotted, BY_NAME):
            self._add(node, dotted)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = dotted_name(node.func)
        if function in IMPORTERS and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                self._add(node, argument.value)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if dotted_name(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            before, self._when = self._when, "types"
            for child in node.body:
                self.visit(child)
            self._when = before
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        before = self._when
        self._when = "call" if before == "load" else before
        self.generic_visit(node)
        self._when = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815
    visit_Lambda = visit_FunctionDef  # noqa: N815

    def generic_visit(self, node: ast.AST) -> None:
        """Visits what a node is made of, but for the many parts that have none themselves."""
        for name in node._fields:
            part = getattr(node, name, None)
            for each in part if isinstance(part, list) else (part,):
                if isinstance(each, self._seen) and not isinstance(each, PARTLESS):
                    self.visit(each)

    def _add(self, node: ast.stmt | ast.expr, target: str) -> None:
        self.uses.append(Use(node.lineno, target, self._when))


def dotted_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def is_below(name: str, stems: tuple[str, ...]) -> bool:
    return any(name == stem or name.startswith(f"{stem}.") for stem in stems)


class Tree:
    """All files of a package, and the rules over them."""

    def __init__(self, package: Path) -> None:
        self.files = [SourceFile(path, package) for path in sorted(package.rglob("*.py"))]
        self._names = {file.name for file in self.files}
        self.engines = self._names & ENGINES

    def violations(self) -> list[Violation]:
        rules = (direction, no_torch, only_comm_talks, peers, outside, engines, environment, names, docstrings, sizes)
        found = [violation for file in self.files for rule in rules for violation in rule(self, file)]
        return found + list(self._cycles())

    def inner(self, use: Use) -> str | None:
        """The module of this package that ``use`` names, below the package; None for others."""
        if not is_below(use.target, ("paceline",)):
            return None
        name = use.target.removeprefix("paceline").removeprefix(".")
        while name not in self._names and "." in name:
            name = name.rpartition(".")[0]
        return name if name in self._names else ""

    def _cycles(self) -> Iterator[Violation]:
        """Modules that import one another: at load time, inside functions or for types. Doors of rooms are left out.

        A room's __init__.py loads its public names when they are asked for.
        """
        files = {file.name: file for file in self.files if file.path.stem != "__init__"}
        graph = {
            name: {inner for use in file.uses if (inner := self.inner(use)) in files} - {name}
            for name, file in files.items()
        }
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle = list(reversed(error.args[1]))
            first = files[cycle[0]]
            line = next(use.line for use in first.uses if self.inner(use) == cycle[1])
            yield first.violation(line, "cycle", " imports ".join(cycle))


Rule = Callable[[Tree, SourceFile], Iterator[Violation]]


@cache
def room_of(name: str) -> tuple[int, str] | None:
    """The level of a module, and the room that it belongs to there: the longest that fits."""
    fits = [(len(room), level, room) for level, row in enumerate(LEVELS) for room in row if is_below(name, (room,))]
    return max(fits)[1:] if fits else None


def direction(tree: Tree, file: SourceFile) -> Iterator[Violation]:
    here = room_of(file.name)
    if here is None and file.name:
        yield file.violation(1, "direction", f"{file.name} has no level: add its room to LEVELS")
    for use in file.uses:
        target = tree.inner(use)
        if target is None:
            continue
        if not file.name:
            if use.when != "types":
                yield file.violation(
                    use.line, "direction", f"the public names are loaded on first use, {target} is not"
                )
        elif not target:
            if use.target not in ("paceline", "paceline.__version__"):
                yield file.violation(use.line, "direction", f"import {use.target} from its own module")
        elif here is not None and (there := room_of(target)) is not None and there[1] != here[1]:
            yield from upward(file, use, here, there, target)


def upward(
    file: SourceFile, use: Use, here: tuple[int, str], there: tuple[int, str], target: str
) -> Iterator[Violation]:
    if there[0] > here[0]:
        yield file.violation(use.line, "direction", f"{file.name} imports {target}, which is above it")
    elif there[0] == here[0] and use.when != "types" and (here[1], target) not in SIDEWAYS:
        yield file.violation(use.line, "direction", f"{file.name} imports {target}, a room of the same level")


def no_torch(_: Tree, file: SourceFile) -> Iterator[Violation]:
    if is_below(file.name, TORCH_FREE):
        for use in file.uses:
            if is_below(use.target, ("torch",)) and use.when != "types":
                yield file.violation(use.line, "no torch", f"{file.name} uses {use.target}")


def only_comm_talks(_: Tree, file: SourceFile) -> Iterator[Violation]:
    for use in file.uses:
        if not is_below(use.target, ("torch.distributed",)) or is_below(file.name, ("comm",)):
            continue
        if is_below(file.name, ("run",)) and is_below(use.target, LAUNCHERS):
            continue
        if is_below(file.name, ("checkpoint.tools",)) and is_below(use.target, ("torch.distributed.checkpoint",)):
            continue  # files of that format; no rank talks
        yield file.violation(use.line, "only comm talks", f"{file.name} uses {use.target}")


def peers(_: Tree, file: SourceFile) -> Iterator[Violation]:
    for use in file.uses:
        if is_below(use.target, PEERS):
            yield file.violation(use.line, "peers", f"{file.name} uses {use.target}, which is for paceline_bench alone")


def outside(_: Tree, file: SourceFile) -> Iterator[Violation]:
    for use in file.uses:
        importers = OUTSIDE.get(use.target.partition(".")[0])
        if importers is not None and not is_below(file.name, importers):
            yield file.violation(use.line, "outside", f"{file.name} uses {use.target}, which is outside the package")


def engines(tree: Tree, file: SourceFile) -> Iterator[Violation]:
    if not is_below(file.name, ("engines",)):
        return
    allowed = ("comm.base",) if file.name in tree.engines else ("comm.base", "comm.objects")
    if file.name == "engines.apply":
        allowed = (*allowed, "comm.compress")  # where a layout's compression becomes what an engine is handed
    for use in file.uses:
        target = tree.inner(use) or ""
        if is_below(target, ("comm",)) and target not in allowed:
            yield file.violation(use.line, "engines", f"{file.name} uses {target}; of comm only {', '.join(allowed)}")
        if target == "engines.apply" or (file.name in tree.engines and target in tree.engines - {file.name}):
            yield file.violation(use.line, "engines", f"{file.name} uses {target}; engines are combined in apply")


def environment(_: Tree, file: SourceFile) -> Iterator[Violation]:
    if is_below(file.name, ("run", "cli", "launch.remote", "comm.torch_dist", "comm.meeting")):
        return
    for use in file.uses:
        if use.target in ENVIRONMENT:
            yield file.violation(use.line, "environment", f"{file.name} uses {use.target}; take it as a value")


def names(_: Tree, file: SourceFile) -> Iterator[Violation]:
    for part in file.name.split("."):
        if part.strip("_") in NAMELESS:
            yield file.violation(1, "names", f"{part} says nothing: name the noun")


def docstrings(_: Tree, file: SourceFile) -> Iterator[Violation]:
    if not file.found[1]:
        yield file.violation(1, "docstrings", f"{file.name or 'the package'} has no module docstring")


def sizes(_: Tree, file: SourceFile) -> Iterator[Violation]:
    for line, what in file.found[2]:
        yield file.violation(line, "sizes", what)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all statements below a node, without looking into expressions, which are ten times as many."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        below = getattr(node, name, None)
        for each in below if isinstance(below, list) else ():
            yield each
            yield from statements(each)


def too_long(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if (lines := text.count("\n")) > MOST_LINES:
        yield 1, f"the file has {lines} lines, and {MOST_LINES} are the most"
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield node.lineno, f"{node.name} has {lines} lines, and {MOST_LINES_OF_A_FUNCTION} are the most"


IMPORTER = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} imports torch")
"""


def import_without_torch(package: Path, *others: str) -> str:
    """Imports the torch-free modules in a process of its own; returns what went wrong, if anything did."""
    modules = [f"paceline.{file.name}" for file in Tree(package).files if is_below(file.name, TORCH_FREE)]
    found = subprocess.run(
        [sys.executable, "-c", IMPORTER, *modules, *others],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stderr.strip() if found.returncode else ""


def test_the_package_keeps_its_rules() -> None:
    found = Tree(SOURCE).violations()
    assert not found, "\n" + "\n".join(map(str, found))


RULES_OF_FILES = (environment, names, docstrings, sizes)


@pytest.mark.parametrize(
    ("package", "rules"),
    [
        ("paceline_bench", RULES_OF_FILES),
        ("paceline_course", (*RULES_OF_FILES, only_comm_talks, peers)),
        ("paceline_classic", (*RULES_OF_FILES, only_comm_talks, peers)),
    ],
)
def test_the_packages_beside_it_keep_the_rules_of_files(package: str, rules: tuple[Rule, ...]) -> None:
    tree = Tree(SOURCE.with_name(package))
    assert not [str(violation) for file in tree.files for rule in rules for violation in rule(tree, file)]
    strangers = {"paceline.cli", *OUTSIDE} - {package}
    assert not [use for file in tree.files for use in file.uses if is_below(use.target, tuple(strangers))]


def test_torch_free_modules_load_without_torch() -> None:
    assert import_without_torch(SOURCE, "paceline_classic.analysis") == ""


# The rules can fail.


Plant = Callable[[dict[str, str]], Path]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Makes a package of the files given, each of which gets a docstring on its first line."""

    def make(files: dict[str, str]) -> Path:
        package = tmp_path / "paceline"
        for name, text in {"__init__.py": "", **files}.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(package).parents[:-1]:
                (package / folder / "__init__.py").touch()
            path.write_text(f'"""A module."""\n{text}')
        for path in package.rglob("__init__.py"):
            path.write_text(path.read_text() or '"""A room."""\n')
        return package

    return make


IN_FUNCTION = "def f():\n    {}\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"


@pytest.mark.parametrize(
    ("file", "text", "line", "rule"),
    [
        ("comm/base.py", "import paceline.train.step", 2, "direction"),
        ("comm/base.py", "from paceline.train import step", 2, "direction"),
        ("comm/base.py", "from ..train import step", 2, "direction"),
        ("comm/__init__.py", "from ..train.step import run", 2, "direction"),
        ("comm/base.py", IN_FUNCTION.format("from paceline.train.step import run"), 3, "direction"),
        ("comm/base.py", FOR_TYPES.format("from paceline.train.step import Step"), 4, "direction"),
        ("comm/base.py", "import importlib\nimportlib.import_module('paceline.train.step')", 3, "direction"),
        ("health/straggler.py", "from paceline.records import sinks", 2, "direction"),
        ("models/gpt.py", "from paceline.comm.other import send", 2, "direction"),
        ("mesh.py", "from paceline.config import Config", 2, "direction"),
        ("checkpoint.py", "from paceline.engines.other import shard", 2, "direction"),
        ("records/report.py", "from paceline.run.function_ranks import run_processes", 2, "direction"),
        ("train/step.py", "from paceline import connect", 2, "direction"),
        ("__init__.py", "from paceline.comm.other import connect", 2, "direction"),
        ("attic/old.py", "", 1, "direction"),
        ("shards.py", "import torch", 2, "no torch"),
        ("config/load.py", IN_FUNCTION.format("from torch import nn"), 3, "no torch"),
        ("records/report.py", "import torch.utils.data as data", 2, "no torch"),
        ("train/step.py", "import torch.distributed as dist", 2, "only comm talks"),
        ("train/step.py", "from torch import distributed", 2, "only comm talks"),
        ("train/step.py", FOR_TYPES.format("from torch.distributed import ProcessGroup"), 4, "only comm talks"),
        ("train/step.py", "import torch\nx = torch.distributed.is_initialized()", 3, "only comm talks"),
        ("run/supervise.py", "from torch.distributed import init_process_group", 2, "only comm talks"),
        ("engines/ddp.py", "from torch.nn.parallel import DistributedDataParallel", 2, "peers"),
        ("train/step.py", "import accelerate", 2, "peers"),
        ("verify/runs.py", "from measures.loop import bench_loop", 2, "outside"),
        ("verify/runs.py", "from paceline_bench.arms import select", 2, "outside"),
        ("view/page.py", "from paceline_course.play import curves_for", 2, "outside"),
        ("view/page.py", "from paceline_classic.analysis import TrainingMetrics", 2, "outside"),
        ("learn.py", "from paceline_bench.arms import select", 2, "outside"),
        ("engines/ddp.py", "from paceline.comm.objects import gather", 2, "engines"),
        ("engines/fsdp.py", "from paceline.comm import virtual", 2, "engines"),
        ("engines/fsdp.py", "from paceline.engines.ddp import DataParallel", 2, "engines"),
        ("engines/buckets/buckets.py", "from paceline.comm.virtual.communicator import run_virtual", 2, "engines"),
        ("engines/agree.py", "from paceline.engines.apply import parallelize", 2, "engines"),
        ("train/step.py", "import os\nx = os.environ['RANK']", 3, "environment"),
        ("train/step.py", "import os\nx = os.getenv('RANK')", 3, "environment"),
        ("train/step.py", "from os import environ", 2, "environment"),
        ("comm/base.py", "import os\nx = os.environ.get('RANK')", 3, "environment"),
        ("train/utils.py", "", 1, "names"),
        ("train/_helpers.py", "", 1, "names"),
        ("common/store.py", "", 1, "names"),
        ("train/step.py", "x = 1\n" * 500, 1, "sizes"),
        ("train/step.py", IN_FUNCTION.format("y = 1\n    " * 69 + "y = 1"), 2, "sizes"),
    ],
)
def test_a_planted_violation_is_named(plant: Plant, file: str, text: str, line: int, rule: str) -> None:
    others = (
        *(
            "train/step.py",
            "records/sinks.py",
            "comm/other.py",
            "comm/objects.py",
            "comm/virtual/communicator.py",
            "config/load.py",
        ),
        *("engines/other.py", "engines/ddp.py", "engines/apply.py", "run/processes.py"),
    )
    files = {other: "" for other in others if other != file}
    found = [str(violation) for violation in Tree(plant({**files, file: text})).violations()]
    assert any(each.startswith(f"paceline/{file}:{line}: {rule}: ") for each in found), found
    assert {each.split(": ")[1] for each in found} <= {rule, "direction"}


@pytest.mark.parametrize("form", ["{}", IN_FUNCTION, FOR_TYPES])
def test_modules_that_import_one_another_are_named(plant: Plant, form: str) -> None:
    files = {
        "data/fetch.py": "from paceline.data.loader import read",
        "data/order.py": "from paceline.data import fetch",
        "data/loader.py": "",
    }
    assert Tree(plant(files)).violations() == []
    back = form.format("from paceline.data.order import share")
    (found,) = Tree(plant({**files, "data/loader.py": back})).violations()
    assert " imports data." in str(found)
    assert ": cycle: data." in str(found)


def test_a_file_without_a_docstring_is_named(tmp_path: Path) -> None:
    package = tmp_path / "paceline"
    package.mkdir()
    (package / "__init__.py").write_text('"""The package."""\n')
    (package / "mesh.py").write_text("SIZE = 1\n")
    assert list(map(str, Tree(package).violations())) == [
        "paceline/mesh.py:1: docstrings: mesh has no module docstring"
    ]


def test_what_is_allowed_is_not_named(plant: Plant) -> None:
    files = {
        "__init__.py": FOR_TYPES.format("from paceline.comm.base import Work"),
        "__main__.py": "from paceline.cli.main import main",
        "errors.py": "",
        "imports.py": "from paceline.errors import UsageError",
        "shards.py": FOR_TYPES.format("import torch"),
        "data/shape.py": "",
        "models/gpt.py": "import torch\n" + FOR_TYPES.format("from paceline.data.shape import DataShape"),
        "comm/base.py": "import torch\nfrom paceline.errors import UsageError",
        "comm/objects.py": "from .base import Work",
        "comm/torch_dist.py": "import os\nimport torch.distributed as dist\nx = os.environ['RANK']",
        "engines/agree.py": "from paceline.comm.objects import gather_objects",
        "engines/ddp.py": "from paceline.comm.base import Work\nfrom paceline.engines.agree import check",
        "engines/apply.py": "from paceline.engines.ddp import DataParallel",
        "run/processes.py": "import os\nfrom torch.distributed.launcher.api import elastic_launch\nx = os.environ",
        "verify/runs.py": "from paceline.run.function_ranks import run_processes",
        "cli/main.py": "from paceline import __version__\nfrom paceline.verify.runs import verify",
        "cli/bench.py": "from paceline_bench.arms import select",
        "cli/learn.py": "from paceline_course.play import make_play_app",
        "learn.py": "from paceline_course.course import check",
        "classic.py": FOR_TYPES.format("from paceline_classic.trainer import DistributedTrainer"),
    }
    assert Tree(plant(files)).violations() == []


def test_torch_behind_another_module_is_named(plant: Plant, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    package = plant({"records/report.py": "from paceline.clock import Mark", "clock.py": "import torch\nMark = torch"})
    assert Tree(package).violations() == []
    assert import_without_torch(package) == "importing paceline.records.report imports torch"
