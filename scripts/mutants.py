"""Judges the tests themselves: makes small mistakes in the source, one at a time, and looks which test notices.

    python scripts/mutants.py map --jobs 14             run all tests once: who enters which function (Python 3.12)
    python scripts/mutants.py try --number 200 --seed 7 --jobs 14

A mistake is an operator turned (``+`` to ``-``, ``<`` to ``<=``, ``and`` to ``or``) or a call left out. Each is tried
first with the tests of its own room (src/paceline/ROOM, tests/ROOM) that enter the changed function or stand in a file
that the map does not know, then with all others that enter it: a test that never enters it cannot notice. Tests that
fail without a mistake are left out; one that fails with it must fail twice. What was tried already is read from the
record, and not tried again. ``--rooms`` draws from some rooms alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "paceline"
TOUCHED = ROOT / "build" / "touched.json"
RECORD = ROOT / "bench" / "results" / "mutants-cpu.json"
LEFT_OUT = (".git", ".venv", "build", "runs", "wheels", "node_modules", "__pycache__")

# The rooms that train, keep or predict.
ROOMS = ["engines", "comm", "train", "checkpoint", "data", "run", "plan", "predict", "search", "cluster", "rehearse"]
ROOMS += ["schedule", "calibrate", "models", "config", "health", "records", "verify"]

# Kernels and graphs that no test without a GPU can enter: tests marked gpu compare them with the plain way.
ONLY_ON_A_GPU = ["engines/pooling_kernel.py", "models/head_kernel.py", "train/adamw_kernel.py", "train/graphed_step.py"]

TURNED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.Is: ("is", "is not"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}


def main() -> None:
    """Makes the map, or tries mistakes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["map", "try"])
    parser.add_argument("tests", nargs="*", help="map: only these tests")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help="draw mistakes in these rooms alone")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="the longest that the tests of one mistake may take")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--options", default="", help="further options for pytest")
    args = parser.parse_intermixed_args()
    if args.verb == "map":
        make_map(args)
    else:
        try_mistakes(args)


def make_map(args: argparse.Namespace) -> None:
    """Runs the tests once, and keeps which of them enter which function, how long they take, and which fail."""
    TOUCHED.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        lines, report = Path(folder, "lines"), Path(folder, "report.xml")
        pool = str(ROOT / "tests" / "pool")
        start = f"import sys\nsys.path.append({pool!r})\nimport touched\ntouched.install({str(lines)!r})\n"
        Path(folder, "sitecustomize.py").write_text(start, encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, pool, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "touched", "-n", str(args.jobs), "--dist", "worksteal"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *args.options.split(), *args.tests]
        subprocess.run(command, cwd=ROOT, env=env, check=False)
        functions: dict[str, set[str]] = {}
        for line in lines.read_text(encoding="utf-8").splitlines():
            test, _, function = line.partition("\t")
            if test:
                functions.setdefault(function, set()).add(test)
        times, failed = read_report(report)
    kept = {name: sorted(tests) for name, tests in functions.items()}
    TOUCHED.write_text(json.dumps({"functions": kept, "times": times, "failed": failed}), encoding="utf-8")
    print(f"{len(times)} tests, {len(failed)} failed, enter {len(kept)} functions: {TOUCHED}")


def read_report(path: Path) -> tuple[dict[str, float], list[str]]:
    """Returns how long each test took, and which failed, by the names that pytest takes."""
    times: dict[str, float] = {}
    failed = []
    for case in ElementTree.parse(path).iter("testcase"):
        parts = case.get("classname", "").split(".")
        while len(parts) > 1 and not Path(ROOT, *parts).with_suffix(".py").is_file():
            parts.pop()
        name = f"{'/'.join(parts)}.py::{case.get('name')}"
        times[name] = times.get(name, 0.0) + float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
    return times, failed


def mistakes_in(source: str) -> Iterator[tuple[int, int, int, str]]:
    """Yields where a line can be changed, and to what: line, first and last column in bytes, new text."""
    rows = source.encode().split(b"\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno:
            yield node.lineno, node.col_offset, node.end_col_offset or 0, "pass"
        for left, operator, right in operands_of(node):
            old, new = TURNED.get(type(operator), ("", ""))
            at = rows[right.lineno - 1].find(old.encode(), left.end_col_offset, right.col_offset) if old else -1
            if at >= 0 and left.end_lineno == right.lineno:
                yield right.lineno, at, at + len(old), new


def operands_of(node: ast.AST) -> list[tuple[ast.expr, ast.AST, ast.expr]]:
    """Returns pairs of neighbours with the operator between them."""
    if isinstance(node, ast.BinOp):
        return [(node.left, node.op, node.right)]
    if isinstance(node, ast.Compare):
        return list(zip([node.left, *node.comparators], node.ops, node.comparators, strict=False))
    if isinstance(node, ast.BoolOp):
        return [(left, node.op, right) for left, right in zip(node.values, node.values[1:], strict=False)]
    return []


def function_at(source: str, line: int) -> int:
    """Returns the first line of the innermost function around a line; 0 outside of all."""
    around = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            around = max(around, min([node.lineno, *(each.lineno for each in node.decorator_list)]))
    return around


def chosen_mistakes(number: int, seed: int, rooms: Sequence[str] = ROOMS) -> list[dict[str, Any]]:
    """Returns that many mistakes, drawn from rooms: from all that train, keep or predict, unless told otherwise."""
    found = []
    for room in rooms:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            name = str(path.relative_to(PACKAGE))
            if name in ONLY_ON_A_GPU:
                continue
            for line, start, stop, new in mistakes_in(source):
                row = source.encode().split(b"\n")[line - 1]
                changed = (row[:start] + new.encode() + row[stop:]).decode().strip()
                place = {"room": room, "file": name, "line": line, "start": start, "stop": stop, "new": new}
                found.append({**place, "was": row.decode().strip(), "is": changed})
    random.Random(seed).shuffle(found)
    return found[:number]


def tests_for(mistake: dict[str, Any], touched: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the tests that enter the changed function: those of its room, and the others; the shortest first."""
    functions, times = touched["functions"], touched["times"]
    line = function_at((PACKAGE / mistake["file"]).read_text(encoding="utf-8"), mistake["line"])
    if line:
        entered = set(functions.get(f"{mistake['file']}:{line}", ()))
    else:  # what stands outside of functions is for all that enter the file
        entered = {
            test for name, tests in functions.items() if name.startswith(mistake["file"] + ":") for test in tests
        }
    entered = {test for test in (entered & set(times)) - set(touched["failed"]) if is_there(test)}
    ordered = sorted(entered, key=lambda test: times[test])
    own = [test for test in ordered if test.startswith(f"tests/{mistake['room']}/")]
    mapped = {test.partition("::")[0] for test in times}
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / mistake["room"]).rglob("test_*.py"))
    own += [file for file in files if file not in mapped]  # written since the map was made
    return own, [test for test in ordered if not test.startswith(f"tests/{mistake['room']}/")]


def is_there(test: str) -> bool:
    """Says whether a test of the map still stands in its file: pytest starts none where one of them does not."""
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.is_file() and f"def {name.partition('[')[0].rpartition('::')[2]}(" in path.read_text(encoding="utf-8")


def try_mistakes(args: argparse.Namespace) -> None:
    """Tries each mistake in a copy of the tree, several at a time, and writes the record after each."""
    touched = json.loads(TOUCHED.read_text(encoding="utf-8"))
    known = json.loads(args.record.read_text(encoding="utf-8"))["mistakes"] if args.record.exists() else []
    done = {(each["file"], each["line"], each["start"], each["new"]): each for each in known}
    left = [
        each
        for each in chosen_mistakes(args.number, args.seed, args.rooms)
        if (each["file"], each["line"], each["start"], each["new"]) not in done
    ]
    trees: queue.Queue[Path] = queue.Queue()
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.jobs):
            tree = Path(folder, str(number))
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
            trees.put(tree)

        def work(mistake: dict[str, Any]) -> None:
            tree = trees.get()
            try:
                found = try_one(mistake, tree, touched, args)
            finally:
                trees.put(tree)
            with lock:
                known.append(found)
                write_record(args, known)
                print(f"{found['noticed']:6} {found['file']}:{found['line']}  {found['was']}  ->  {found['is']}")
                sys.stdout.flush()

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(work, left))
    print(json.dumps(summary_of(known)))


def try_one(mistake: dict[str, Any], tree: Path, touched: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Returns the mistake with who noticed it: ``room``, ``other`` or ``nobody``, and by which test."""
    path = tree / "src" / "paceline" / mistake["file"]
    whole = path.read_bytes()
    rows = whole.split(b"\n")
    row = rows[mistake["line"] - 1]
    rows[mistake["line"] - 1] = row[: mistake["start"]] + mistake["new"].encode() + row[mistake["stop"] :]
    path.write_bytes(b"\n".join(rows))
    try:
        own, others = tests_for(mistake, touched)
        for who, tests in (("room", own), ("other", others)):
            test = first_failure(tests, tree, args)
            if test:
                return {**mistake, "noticed": who, "by": test}
        return {**mistake, "noticed": "nobody", "tests": len(own) + len(others)}
    finally:
        path.write_bytes(whole)


def first_failure(tests: list[str], tree: Path, args: argparse.Namespace) -> str:
    """Returns the first test that fails, twice; an empty text if none does."""
    while tests:
        failed = run_tests(tests, tree, args)
        if not failed or failed not in tests or run_tests([failed], tree, args):
            return failed
        tests = tests[tests.index(failed) + 1 :]  # it failed by chance
    return ""


def run_tests(tests: list[str], tree: Path, args: argparse.Namespace) -> str:
    """Runs tests until one fails, and returns that one; what hangs or cannot be read in is a failure too."""
    with tempfile.TemporaryDirectory() as folder:
        names, report = Path(folder, "names"), Path(folder, "report.xml")
        names.write_text("\n".join(tests), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-o", "timeout=90", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *args.options.split(), f"@{names}"]
        env = {**os.environ, "PYTHONPATH": str(tree / "src"), "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        with subprocess.Popen(command, cwd=tree, env=env, **quiet) as process:  # type: ignore[call-overload]
            try:
                code = process.wait(args.seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return "the tests did not end"
        if code in (0, 5):
            return ""
        failed = read_report(report)[1] if report.exists() else []
        return failed[0] if failed else "the tests did not start"


def summary_of(known: list[dict[str, Any]]) -> dict[str, float]:
    """Returns how many mistakes there were, and which share was noticed."""
    count = {who: sum(each["noticed"] == who for each in known) for who in ("room", "other", "nobody")}
    judged = max(len(known), 1)
    shares = {"by_all": 1 - count["nobody"] / judged, "by_room": count["room"] / judged}
    return {"mistakes": len(known), **count, **{name: round(share, 3) for name, share in shares.items()}}


def write_record(args: argparse.Namespace, known: list[dict[str, Any]]) -> None:
    """Writes all that was tried so far."""
    order = sorted(known, key=lambda each: (each["noticed"], each["file"], each["line"], each["start"]))
    told = {"seed": args.seed, "summary": summary_of(known), "mistakes": order}
    args.record.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
