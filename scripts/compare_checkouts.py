"""Proves that two checkouts of Paceline behave the same.

    python scripts/compare_checkouts.py BEFORE AFTER                  run every case on both, and compare
    python scripts/compare_checkouts.py BEFORE AFTER --only ddp plan  only cases whose names hold one of these words
    python scripts/compare_checkouts.py --record CHECKOUT FACTS.json  keep the facts of one checkout
    python scripts/compare_checkouts.py --against FACTS.json CHECKOUT compare a checkout with kept facts
    python scripts/compare_checkouts.py --list                        name the cases and their commands

A case is one or more commands, ``python -m paceline ...``, run with CHECKOUT/src in a fresh folder that holds a copy of
CHECKOUT/configs. The script never imports Paceline, so modules may move between the checkouts. From what the commands
print and leave it takes facts, each a name and a value:

    records/       loss, gradient norm, learning rate, samples of each step and rank, as the bits of the floats
    trace/         how often each rank issued each operation, by kind, bytes and group
    plan.json      batch, mesh, steps
    checkpoints/   the hash of every file of tensors
    stdout, JSON   each value; modelled and predicted times too, as they follow from formulas
    stderr         of commands that must fail: the message and the exit code

Facts are compared exactly. What another run on the same machine changes is no fact: measured times, dates, paths.
A failed command makes its case fail even if it fails on both checkouts, for then nothing was compared. Compare on one
machine, with one version of torch: another one rounds in other places.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from compare_cases import Case, all_cases

Facts = dict[str, str]

TIMEOUT_S = 400
RECORD_FIELDS = {
    "run": ("world_size", "num_parameters", "strategy", "backend", "global_batch", "microbatch", "accumulate"),
    "step": ("epoch", "position", "loss", "loss_sum", "count", "lr", "grad_norm", "samples", "loss_scale"),
    "eval": ("loss", "accuracy", "samples"),
    "event": ("name",),
    "end": ("status",),
}
# Depend on how long things took; or, buckets, are chosen by measured times.
TIMED_EVENTS = {"straggler", "buckets", "settings"}
SUMMARY_FIELDS = ("status", "strategy", "world_size", "steps", "final_loss", "test_loss", "test_accuracy")
PLAN_FIELDS = ("batch", "mesh", "steps_per_epoch", "total_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one case gave on one checkout: its facts, or the last lines of the command that failed."""

    facts: Facts
    crash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One row of the table."""

    case: str
    status: Literal["same", "different", "failed"]
    num_facts: int
    num_different: int = 0
    detail: str = ""


# ---- from a command's output and files to facts


def flatten(value: Any, name: str = "", ignored: Sequence[str] = ()) -> Facts:
    """Returns one fact for each value inside plain data; a float is written as its bits."""
    if isinstance(value, dict):
        parts = [(str(key), item) for key, item in value.items() if key not in ignored]
    elif isinstance(value, list):
        parts = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {name: value.hex() if isinstance(value, float) else json.dumps(value)}
    if not parts:
        return {name: "empty"}
    return {
        key: fact
        for part, item in parts
        for key, fact in flatten(item, f"{name}.{part}" if name else part, ignored).items()
    }


def normalise(text: str, folders: Iterable[tuple[Path, str]]) -> str:
    """Returns the text without what another folder or moment changes: paths, process ids, ends of lines."""
    for folder, word in folders:
        text = text.replace(str(folder), word)
    text = re.sub(r"(pid|process) \d+", r"\1 N", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _text_facts(name: str, text: str) -> Facts:
    return {f"{name} line {number}": line for number, line in enumerate(text.splitlines(), start=1)}


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from (json.loads(line) for line in path.read_text().splitlines() if line)


def record_facts(rank: str, records: Iterable[dict[str, Any]]) -> Facts:
    """Returns what a rank recorded, without its measured times.

    Records are named by kind and step, as the last step may be written before or after its evaluation.
    """
    facts: Facts = {}
    seen: Counter[str] = Counter()
    for record in records:
        # How often sums of operations are written follows from the clock; the operations themselves are compared apart.
        if record.get("name") in TIMED_EVENTS or record["type"] == "comm":
            continue
        where = " ".join(str(record[key]) for key in ("type", "name", "step") if key in record)
        seen[where] += 1
        attempt = f" attempt {seen[where]}" if seen[where] > 1 else ""
        values = {field: record.get(field) for field in RECORD_FIELDS.get(record["type"], ())}
        facts |= flatten(values, f"{rank} {where}{attempt}")
    return facts


def operation_facts(rank: str, operations: Iterable[dict[str, Any]]) -> Facts:
    """Returns how often a rank issued each operation, by kind, bytes and group."""
    counts = Counter(f"{each['kind']} of {each['num_bytes']} bytes in {each['group']}" for each in operations)
    return {f"{rank} {operation}": f"{count} times" for operation, count in sorted(counts.items())}


def timeline_facts(events: Iterable[dict[str, Any]]) -> Facts:
    """Returns count and total duration of each kind of event in a modelled time line, whose times are formulas."""
    durations: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            durations[f"time line {event['tid']} {event['name']} {event.get('args', '')}"].append(event["dur"])
    return {name: f"{len(each)} times, {math.fsum(each):.3f} us" for name, each in sorted(durations.items())}


def _find(value: Any, key: str) -> Any:
    """Returns the first value of that key at any depth of plain data, or None."""
    if not isinstance(value, dict):
        return None
    return value[key] if key in value else next((hit for each in value.values() if (hit := _find(each, key))), None)


def run_facts(folder: Path, stdout: str, *, is_modelled: bool) -> Facts:
    """Returns what a run printed as JSON and left in its folder."""
    facts: Facts = {}
    for run in sorted(folder.glob("runs/*")):
        for path in sorted(run.glob("records/rank-*.jsonl")):
            facts |= record_facts(path.stem, _json_lines(path))
        for path in sorted(run.glob("trace/rank-*.jsonl")):
            facts |= operation_facts(path.stem, _json_lines(path))
        for path in run.glob("plan.json"):
            plan = json.loads(path.read_text())
            facts |= flatten({key: _find(plan, key) for key in PLAN_FIELDS}, "plan")
        for path in sorted(run.glob("checkpoints/step-*/*.safetensors")):
            name = f"checkpoint {path.parent.name} {path.name}"
            facts[name] = f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    if (trace := folder / "trace.json").exists():
        facts |= timeline_facts(json.loads(trace.read_text())["traceEvents"])
    summary = json.loads(stdout)  # last: the first difference then names the step that it began with
    return facts | flatten(summary if is_modelled else {key: summary.get(key) for key in SUMMARY_FIELDS}, "summary")


# ---- running


def _execute(command: Sequence[str], folder: Path, checkout: Path) -> tuple[int, str, str]:
    """Runs one command of a checkout; returns exit code, stdout and stderr. Ends its processes at the time limit."""
    fixed = {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *command],
        cwd=folder,
        env=os.environ | fixed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        stderr += f"\nended by the script after {TIMEOUT_S} s"
    return process.returncode, stdout, stderr


def run_case(case: Case, checkout: Path, before: Path, folder: Path) -> Outcome:
    """Runs the commands of a case in an empty folder and returns the facts of the last one."""
    shutil.copytree(checkout / "configs", folder / "configs")
    words = (f"{n} riders, {n * n % 97} kilometres of wind;" for n in range(100))
    (folder / "text.txt").write_text(" ".join(words))
    folders = ((folder.resolve(), "FOLDER"), (checkout, "CHECKOUT"))
    code, stdout, stderr = 0, "", ""
    for number, command in enumerate(case.commands):
        source = before if case.starts_with_before and number == 0 else checkout
        code, stdout, stderr = _execute(command, folder, source)
        (folder / f"output-{number}.txt").write_text(f"{command}\nexit code {code}\n{stdout}\n{stderr}")
        if (code == 0) == (case.reader == "error"):
            last = "\n".join((stdout + "\n" + stderr).strip().splitlines()[-12:])
            return Outcome(facts={}, crash=f"{' '.join(command)}\nexit code {code}\n{last}")
    stdout, stderr = normalise(stdout, folders), normalise(stderr, folders)
    try:
        if case.reader == "run":
            return Outcome(facts=run_facts(folder, stdout, is_modelled=case.commands[-1][0] == "simulate"))
        if case.reader == "json":
            return Outcome(facts=flatten(json.loads(stdout), "", case.ignored))
    except (ValueError, KeyError) as error:
        return Outcome(facts={}, crash=f"{' '.join(case.commands[-1])}\nits output cannot be read: {error!r}")
    return Outcome(facts={"exit code": str(code)} | _text_facts("stdout", stdout) | _text_facts("stderr", stderr))


def run_cases(cases: Sequence[Case], checkouts: Sequence[Path], kept: Path, jobs: int) -> list[dict[str, Outcome]]:
    """Runs all cases on each of the checkouts, several at once; prints a line as each ends."""
    tasks = [(case, number) for case in cases for number in range(len(checkouts))]
    done = iter(range(1, len(tasks) + 1))

    def run(task: tuple[Case, int]) -> Outcome:
        case, number = task
        folder = kept / ("before", "after")[number] / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        outcome = run_case(case, checkouts[number], checkouts[0], folder)
        result = "FAILED" if outcome.crash else f"{len(outcome.facts)} facts"
        print(f"[{next(done)}/{len(tasks)}] {case.name} on {checkouts[number]}: {result}", file=sys.stderr, flush=True)
        return outcome

    outcomes: list[dict[str, Outcome]] = [{} for _ in checkouts]
    with ThreadPoolExecutor(jobs) as pool:
        for (case, number), outcome in zip(tasks, pool.map(run, tasks), strict=True):
            outcomes[number][case.name] = outcome
    return outcomes


# ---- comparing


def _readable(fact: str | None) -> str:
    if fact is None:
        return "nothing"
    return f"{float.fromhex(fact)!r} ({fact})" if re.fullmatch(r"-?0x[01]\.[0-9a-f]+p[+-]\d+", fact) else fact


def compare(name: str, before: Outcome, after: Outcome) -> Verdict:
    """Judges one case: every fact must be there on both sides, and be the same to the bit."""
    crashes = [f"{side}: {each.crash}" for side, each in (("before", before), ("after", after)) if each.crash]
    if crashes or not before.facts:
        return Verdict(case=name, status="failed", num_facts=0, detail="\n".join(crashes) or "no facts")
    names = [*before.facts, *(each for each in after.facts if each not in before.facts)]
    different = [each for each in names if before.facts.get(each) != after.facts.get(each)]
    if not different:
        return Verdict(case=name, status="same", num_facts=len(names))
    first = different[0]
    detail = f"{first}: {_readable(before.facts.get(first))} -> {_readable(after.facts.get(first))}"
    return Verdict(case=name, status="different", num_facts=len(names), num_different=len(different), detail=detail)


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns a line for each case; below it the first difference, or the last lines of what failed."""
    width = max((len(each.case) for each in verdicts), default=4)
    lines = [f"{'case':{width}}  {'result':9}  facts  different"]
    for each in verdicts:
        lines.append(f"{each.case:{width}}  {each.status:9}  {each.num_facts:5}  {each.num_different or '-'!s:>9}")
        lines += [f"    {line}" for line in each.detail.splitlines()]
    num_same = sum(each.status == "same" for each in verdicts)
    return "\n".join([*lines, "", f"{num_same} of {len(verdicts)} cases are the same"])


# ---- the command line


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "src" / "paceline" / "__init__.py").exists():  # an installed Paceline would run in its place
        raise argparse.ArgumentTypeError(f"{text} has no src/paceline/__init__.py; give the root of a checkout")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s BEFORE AFTER | --record CHECKOUT FILE | --against FILE CHECKOUT | --list   [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="*", metavar="CHECKOUT", help="a folder with src/paceline and configs")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--record", action="store_true", help="write the facts of CHECKOUT to FILE")
    mode.add_argument("--against", type=Path, metavar="FILE", help="facts of --record, in the place of BEFORE")
    mode.add_argument("--list", action="store_true", help="name the cases and their commands, and run nothing")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="cases whose names hold one of these")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the commands print and leave in FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table and all facts to FILE")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="commands at the same time (default: 2)")
    return parser


def _chosen(words: Sequence[str]) -> list[Case]:
    cases = [case for case in all_cases() if any(word in case.name for word in words)]
    if not cases:
        sys.exit(f"no case has {' or '.join(words)} in its name; --list shows them all")
    return cases


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _read_kept(path: Path, cases: Sequence[Case]) -> dict[str, Outcome]:
    """Returns what ``--record`` wrote; a case that the file lacks has not been recorded."""
    kept = json.loads(path.read_text())
    missing = Outcome(facts={}, crash=f"{path} has no such case; record it again")
    return {case.name: Outcome(**kept[case.name]) if case.name in kept else missing for case in cases}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns 0 if all cases are the same, else 1."""
    parser = _parser()
    given = parser.parse_args(arguments)
    cases = _chosen(given.only)
    if given.list:
        for case in cases:
            print(case.name, *(f"    paceline {' '.join(command)}" for command in case.commands), sep="\n")
        return 0
    if len(given.folders) != (1 if given.against else 2):
        parser.error("give BEFORE AFTER, or --record CHECKOUT FILE, or --against FILE CHECKOUT")
    try:
        checkouts = [_checkout(each) for each in given.folders[: 1 if given.record else None]]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="compare-") as temporary:
        outcomes = run_cases(cases, checkouts, (given.keep or Path(temporary)).resolve(), given.jobs)
    if given.record:
        _write(Path(given.folders[1]), {name: asdict(outcome) for name, outcome in outcomes[0].items()})
        failed = [f"{name}: {outcome.crash}" for name, outcome in outcomes[0].items() if outcome.crash]
        print(f"{len(cases) - len(failed)} of {len(cases)} cases recorded", *failed, sep="\n")
        return 1 if failed else 0
    if given.against:
        outcomes.insert(0, _read_kept(given.against, cases))
    before, after = outcomes
    verdicts = [compare(case.name, before[case.name], after[case.name]) for case in cases]
    print(table(verdicts))
    if given.json:
        sides = {case.name: {"before": before[case.name].facts, "after": after[case.name].facts} for case in cases}
        _write(given.json, {"verdicts": [asdict(each) for each in verdicts], "facts": sides})
    return 0 if all(each.status == "same" for each in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
