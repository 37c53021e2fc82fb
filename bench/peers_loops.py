"""A script of one process beside its conversions to Paceline, Accelerate and Lightning, and mistakes in each of them.

    python bench/peers_loops.py --output bench/results/own-loops-cpu.json     # run all of it; 20 to 30 minutes
    python bench/peers_loops.py --arms "paceline ddp" --mistakes leaves       # print one cell, write nothing
    python bench/peers_loops.py --write                                       # docs/convert.md from scripts and record

The scripts are in ``own_loops``. Every run has processes and a folder of its own, on Gloo ranks of this CPU. A mistake
is an edit of the script; what came of it is read from its exit code, its output and its curve:

    right      the validation losses are those of the same script without the mistake
    told       the same, or others, with a warning that names the mistake
    named      it stops, and the error says what is wrong, the rule, and what to do
    error      it stops with another error
    silent     it trains to the end on other numbers, without a word
    hang       nothing happens until the time limit
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import importlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from own_loops.mistakes import ARMS, MISTAKES, SCRIPTS, script_of
from paceline_bench.timing import BenchRecord

ROOT = Path(__file__).parents[1]
PAGE, RECORD = ROOT / "docs" / "convert.md", ROOT / "bench" / "results" / "own-loops-cpu.json"
LIMIT_S = 90.0  # a right run takes 2 to 20 s beside other work
TELLS_S = 20.0  # after the first rank has failed
EPOCHS, CLOSE, SAMPLES = 3, 1e-5, 1397
# What is there without a further line, by a look at the folder and the terminal of a right run.
SHOWN = {
    "paceline": "the print; live page, report, comparison and records of every rank; trackers by a word",
    "accelerate": "the print; trackers by further lines",
    "lightning": "a progress bar, losses in a CSV file; trackers by further lines",
}


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a run of a script left: its exit code (None: it hung), its curve, and what it wrote."""

    code: int | None
    curve: list[float] | None
    text: str


def run_script(text: str, ranks: int, folder: Path, epochs: int = EPOCHS) -> Done:
    """Runs a script on ranks of its own in a folder; with 0 ranks, as one process that no launcher started.

    Ranks are forked from this process, which has loaded the libraries: that takes longer than all else. When one has
    failed it ends the others, as launchers do, after they had time to tell what they know.
    """
    (folder / "curve.json").unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_fork(text, rank, ranks, port, folder, epochs) for rank in range(max(ranks, 1))]
    codes: dict[int, int] = {}
    until = time.monotonic() + LIMIT_S
    while len(codes) < len(children) and time.monotonic() < until:
        for child in children:
            if child not in codes and (ended := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(ended[1])
                if codes[child]:
                    until = min(until, time.monotonic() + TELLS_S)
        time.sleep(0.05)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    code = next((each for each in codes.values() if each), 0 if len(codes) == len(children) else None)
    found = folder / "curve.json"
    curve = json.loads(found.read_text()) if found.exists() else None
    return Done(code=code, curve=curve, text=(folder / "output.txt").read_text(encoding="utf-8", errors="replace"))


def _fork(text: str, rank: int, ranks: int, port: int, folder: Path, epochs: int) -> int:
    """Starts one rank, as Python would run the script: with its hooks for errors and for the end."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        if ranks:
            size = str(ranks)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "peers"}
        sys.argv = ["script.py", str(epochs)]
        Path("script.py").write_text(text, encoding="utf-8")
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(text, str(folder / "script.py"), "exec"), vars(module))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def difference(curve: Sequence[float] | None, right: Sequence[float]) -> float:
    """Returns the largest difference of two curves; infinite where one has a NaN, or ends early."""
    if curve is None or len(curve) != len(right) or not all(map(math.isfinite, curve)):
        return math.inf
    return max(abs(a - b) for a, b in zip(curve, right, strict=True))


# Mistakes.

_ERROR = re.compile(r"^(?:\[rank\d\]: ?)?((?:paceline\.errors\.)?\w*(?:Error|Exception|Exited)\b.*)$", re.MULTILINE)
_NOT_FINITE = re.compile(r"^.* is not finite\b.*$", re.MULTILINE)  # which a library may log, as no warning
_COUNTED = re.compile(r"^samples (\d+)$", re.MULTILINE)
_WARNING = re.compile(r"^.*?(?:Warning: )(.*)$", re.MULTILINE)


# What others say of a mistake by its name.
NAMING = ("Expected to have finished reduction", "parameters that were not used")


def outcome(done: Done, right: Done) -> tuple[str, str]:
    """Says what came of a mistake, and what was seen of it."""
    assert right.curve is not None
    if done.code is None:
        return "hang", f"after {LIMIT_S:g} s"
    if done.code:
        return _failure(done.text)
    off = difference(done.curve, right.curve)
    seen = "a curve with NaN" if math.isinf(off) else f"the curve differs by {off:.1e}"
    if math.isinf(off) and done.curve is not None and len(done.curve) != len(right.curve):
        seen = f"it ended after {len(done.curve)} of {len(right.curve)} epochs"
    known = set(_WARNING.findall(right.text))
    told = _NOT_FINITE.findall(done.text)
    told += [each for each in _WARNING.findall(done.text) if each not in known and not _is_other(each)]
    if told:
        return "told", told[0][:200]
    return ("right" if off < CLOSE else "silent"), seen


def _failure(text: str) -> tuple[str, str]:
    errors = [each for each in _ERROR.findall(text) if "ChildFailedError" not in each]
    ours = [each for each in errors if each.startswith("paceline.errors.")]
    if ours:
        return "named", ours[0].removeprefix("paceline.errors.")[:200]
    first = errors[0] if errors else "a process died"
    return ("named" if any(each in first for each in NAMING) else "error"), first[:200]


def _is_other(warning: str) -> bool:
    """Whether a warning is of the launcher or the end of processes, and not of the mistake."""
    return "destroy_process_group" in warning or "leaked" in warning


def try_mistakes(arms: Sequence[str], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Makes each mistake in the script of each arm, on two ranks."""
    rights: dict[tuple[str, str], Done] = {}
    for name in names:
        mistake = MISTAKES[name]
        for arm in arms:
            right = mistake.right.get(arm.split()[0], ())
            key = (arm, name if right else "")
            if key not in rights:
                rights[key] = _in_a_folder(script_of(arm, right))
            done = _in_a_folder(script_of(arm, mistake.edits(arm)))
            found, seen = outcome(done, rights[key])
            counts = [int(each) for each in _COUNTED.findall(done.text)]
            if counts:  # of a library that fills the last batch up
                more = sum(counts) // EPOCHS - SAMPLES
                found, seen = ("silent" if more else "right"), f"an epoch has {more} sample{'s' * (more != 1)} twice"
            print(f"{arm}: {mistake.words}: {found} ({seen})", flush=True)
            yield {"kind": "mistake", "name": name, "words": mistake.words, "arm": arm, "outcome": found, "seen": seen}


_PLAIN: list[float] = []


def _plain_curve() -> list[float]:
    if not _PLAIN:
        _PLAIN.extend(_in_a_folder(script_of("plain"), ranks=0).curve or [])
    return _PLAIN


def _in_a_folder(text: str, ranks: int = 2) -> Done:
    with _folder() as folder:
        return run_script(text, ranks, folder)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Makes a folder for a while: not a TemporaryDirectory, which forked processes would remove at their end."""
    found = Path(tempfile.mkdtemp(prefix="own-loops-"))
    try:
        yield found
    finally:
        shutil.rmtree(found)


# Curves and resume.


def changed_lines(name: str) -> dict[str, int]:
    """Counts the lines that differ from the plain script: one that was replaced by another is one change."""
    before, after = ((SCRIPTS / f"{each}.py").read_text(encoding="utf-8").splitlines() for each in ("plain", name))
    parts = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    sizes = [(a2 - a1, b2 - b1) for word, a1, a2, b1, b2 in parts if word != "equal"]
    return {
        "changed": sum(max(each) for each in sizes),
        "removed": sum(each[0] for each in sizes),
        "added": sum(each[1] for each in sizes),
    }


def compare_curves(arms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Runs the script of each arm on 1, 2 and 3 ranks, and on 2 ranks for two epochs, then on 3 for the rest."""
    plain = _plain_curve()
    for arm in arms:
        curves = {str(ranks): _in_a_folder(script_of(arm), ranks).curve for ranks in (1, 2, 3)}
        with _folder() as folder:
            run_script(script_of(arm), 2, folder, epochs=2)
            done = run_script(script_of(arm), 3, folder)
        row = {
            "kind": "script",
            "arm": arm,
            **changed_lines(ARMS[arm][0]),
            "off": {ranks: _or_none(difference(curve, plain)) for ranks, curve in curves.items()},
            "resumed": _or_none(difference(done.curve, plain)),
            "resumed_own": _or_none(difference(done.curve, curves["3"] or [])),
            "resume_failed": "" if done.code == 0 else _failure(done.text)[1],
        }
        print(row, flush=True)
        yield row


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


# The page.

NAMES = {"paceline ddp": "Paceline, `ddp`", "paceline fsdp": "Paceline, `fsdp`"}
OUTCOMES = {
    "right": "right",
    "told": "a warning names it",
    "named": "an error names it",
    "error": "another error",
    "silent": "**silent**",
    "hang": "**hang**",
}


def parts(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the page has between its marks: the plain script, what changes in it, and the tables."""
    before, after = ((SCRIPTS / f"{name}.py").read_text(encoding="utf-8") for name in ("plain", "with_paceline"))
    changes = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:]
    shown = ["..." if line.startswith("@@") else line for line in changes]
    return {
        "script": f"```python\n{before}```",
        "changes": "\n".join(["```diff", *shown, "```"]),
        "peers": "\n".join(_peers_table(record)),
        "mistakes": "\n".join(_mistakes_table(record)),
    }


def with_parts(page: str, record: Mapping[str, Any]) -> str:
    """Returns the page with these parts in place of what is there."""
    for name, text in parts(record).items():
        begin, end = f"<!-- {name}: begin (bench/peers_loops.py) -->\n", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}{text}\n{end}{rest.split(end)[1]}"
    return page


def _titles(record: Mapping[str, Any]) -> list[str]:
    versions = record["config"]["versions"]
    return [NAMES.get(arm, f"{arm.title()} {versions.get(arm, '')}") for arm in ARMS]


def _peers_table(record: Mapping[str, Any]) -> Iterator[str]:
    rows = {row["arm"]: row for row in record["rows"] if row["kind"] == "script"}
    found = [rows[arm] for arm in ARMS]
    yield from _head(["the script", *_titles(record)])
    yield _line("changed lines", [f"{row['changed']} (+{row['added']} -{row['removed']})" for row in found])
    for ranks in ("1", "2", "3"):
        words = f"the plain script's curve on {ranks} rank{'s' if ranks != '1' else ''}"
        yield _line(words, [_off(row["off"][ranks]) for row in found])
    yield _line("2 epochs on 2 ranks, the third on 3: the curve", [_off(row["resumed"]) for row in found])
    yield _line("beside its own curve on 3 ranks", [_off(row["resumed_own"]) for row in found])
    yield _line("what is shown", [SHOWN[arm.split()[0]] for arm in ARMS])


def _mistakes_table(record: Mapping[str, Any]) -> Iterator[str]:
    rows = {(row["name"], row["arm"]): row for row in record["rows"] if row["kind"] == "mistake"}
    yield from _head(["mistake", *_titles(record)])
    for name, mistake in MISTAKES.items():
        yield _line(mistake.words, [_cell(rows[name, arm]) for arm in ARMS])


def _head(titles: Sequence[str]) -> Iterator[str]:
    yield _line(titles[0], titles[1:])
    yield "|" + "---|" * len(titles)


def _line(first: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def _off(value: float | None) -> str:
    if value is None:
        return "no curve"
    return f"equal ({value:.0e})" if value < CLOSE else f"differs by {value:.0e}"


def _cell(row: Mapping[str, Any]) -> str:
    detail = re.search(r"\d\.\de[+-]\d+|an epoch has .*|a curve with NaN", row["seen"])
    if detail is None or row["outcome"] != "silent" or row["name"] in ("unshared", "other optimizer", "own rate"):
        return OUTCOMES[row["outcome"]]  # of these the size says nothing
    return f"{OUTCOMES[row['outcome']]} ({detail[0]})"


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--mistakes", nargs="+", default=list(MISTAKES), choices=[*MISTAKES, "none"])
    parser.add_argument("--output", type=Path, help="write the record, with the curves")
    parser.add_argument("--mistakes-alone", action="store_true", help="run no curves: the record keeps those it has")
    parser.add_argument("--write", action="store_true", help="write docs/convert.md from the record")
    options = parser.parse_args()
    if options.write:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        PAGE.write_text(with_parts(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    peers = [name for name in ("accelerate", "lightning") if name in options.arms]
    for name in ("torch", "sklearn.datasets", "paceline", *peers):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    warnings.simplefilter("always")
    rows = list(try_mistakes(options.arms, [each for each in options.mistakes if each != "none"]))
    if options.output is None:
        return
    if not options.mistakes_alone:
        rows += compare_curves(options.arms)
    versions: dict[str, str] = {}
    if options.output.exists():  # of arms that were not asked for, or of mistakes
        made = {(row["arm"], row.get("name")) for row in rows}
        before = json.loads(options.output.read_text(encoding="utf-8"))
        rows += [row for row in before["rows"] if (row["arm"], row.get("name")) not in made]
        versions = before["config"]["versions"]
    order = [(arm, name) for name in (None, *MISTAKES) for arm in ARMS]
    rows.sort(key=lambda row: order.index((row["arm"], row.get("name"))))
    versions |= {name: importlib.metadata.version(name) for name in peers}
    BenchRecord(
        name="own-loops",
        command="python bench/peers_loops.py --output bench/results/own-loops-cpu.json",
        rows=rows,
        config={"epochs": EPOCHS, "limit_s": LIMIT_S, "close": CLOSE, "versions": versions},
    ).write(options.output)


if __name__ == "__main__":
    main()
