"""What happens with an answer to an exercise: it is converted, judged and reported, and kept if it is right.

Which exercises a reader has passed, and how many hints were shown, is kept in one small JSON file. It is a convenience:
a broken one counts as empty, and one that cannot be written stops nothing.

    {"passed": ["1.1", "1.2"], "hints": {"1.2": 1}}
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import linecache
import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, RankFailedError, UsageError, did_you_mean
from paceline.terminal import echo, excerpt
from paceline.untrusted import is_count, parse_json_object, read_regular
from paceline_course.exercise import (
    Exercise,
    MistakeError,
    Said,
    Verdict,
    judge_first,
    judge_formula,
    judge_number,
    judge_word,
    lessons,
)

_MOST_BYTES = 2**16  # of the file
_MOST_EXACT = 2**53  # up to here every whole number is a float


def find(number: str) -> Exercise:
    """Returns the exercise with a number such as "3.2". Raises UsageError for an unknown number."""
    exercises = {each.number: each for lesson in lessons().values() for each in lesson.exercises}
    if number in exercises:
        return exercises[number]
    lesson = number.partition(".")[0]
    known = [each for each in exercises if each.partition(".")[0] == lesson] or list(exercises)
    fix = did_you_mean(number, known, f"the numbers are {', '.join(known)}", cutoff=0.5)
    raise UsageError(f"there is no exercise {number!r}\n  a number is LESSON.EXERCISE, such as 3.2\n  {fix}")


def find_check(exercise: Exercise) -> Callable[[Any], Said]:
    """Returns what judges an answer. Only the file that has it is imported: some need torch."""
    if exercise.check:
        checks: dict[str, Callable[[Any], Said]] = importlib.import_module(f"paceline_course.{exercise.check}").CHECKS
        return checks[exercise.number]
    return partial(judge_first if exercise.needs else _JUDGES[exercise.answer], exercise)


def judge(exercise: Exercise, answer: Any) -> Verdict:
    """Checks an answer; a function that raises is wrong. Raises UsageError for an answer of another kind."""
    taken = _CONVERTERS[exercise.answer](exercise, answer)
    find_mistake = find_check(exercise)
    if exercise.answer != "function":
        return exercise.verdict(find_mistake(taken))
    try:
        return exercise.verdict(find_mistake(taken))
    except MistakeError as error:
        words = str(error)
    except RankFailedError as error:
        failure = f"On rank {error.rank}, {_failure(exercise, error.error, taken)}"
        words = str(error.error) if isinstance(error.error, MistakeError) else failure
    except PacelineError as error:  # ranks that wait for each other, or call different operations: it names the lines
        words = f"The ranks that ran your function {exercise.function} stopped:\n{error}"
    except (Exception, SystemExit) as error:
        words = _failure(exercise, error, taken)
    return Verdict(is_right=False, words=words)


def check(number: str, answer: Any = ...) -> bool:
    """Prints whether an answer is right, and what does not fit where it is wrong; returns whether it is right.

    ``answer`` is a number, a word or a function, as the exercise asks for; ``...`` prints the exercise.
    """
    exercise = find(number)
    if answer is ...:
        ask(number)
        echo("There is no answer yet: put yours in place of the three dots.")
        return False
    verdict = judge(exercise, answer)
    echo(sentence(exercise, verdict))
    return verdict.is_right


def ask(number: str) -> None:
    """Prints what an exercise asks for."""
    exercise = find(number)
    echo(f"{exercise.number} {exercise.title}\n{exercise.asks}")


def hint(number: str, place: int = 1) -> None:
    """Prints a hint of an exercise: the first, or the one at ``place``; past the last one, the last."""
    echo(hint_text(find(number), place))


def load_function(exercise: Exercise, path: Path) -> Callable[..., Any]:
    """Runs a file and returns the function that the exercise asks for. Raises UsageError where there is none."""
    if not path.is_file():
        raise UsageError(
            f"there is no file {str(path)!r}\n  exercise {exercise.number} asks for a Python file that defines "
            f"{exercise.function}\n  write one, and run: paceline learn check {exercise.number} FILE.py"
        )
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    try:
        defined = runpy.run_path(str(path), run_name="answer")  # nothing is cached, so that an edit always counts
    except (Exception, SystemExit) as error:
        where = last_line(error, str(path)) or "the file fails by itself"
        fix = f"run it alone first: python {path}"
        raise UsageError(f"{path} raised {type(error).__name__}: {error}\n  {where}\n  {fix}") from error
    found = defined.get(exercise.function)
    if not callable(found):
        names = [name for name, value in defined.items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(exercise.function, names, n=1)
        fix = f"did you mean it by {near[0]}? Rename that" if near else f"define it: def {exercise.function}(...):"
        raise UsageError(f"{path} defines no function {exercise.function}\n  {exercise.number} calls it\n  {fix}")
    return found  # type: ignore[no-any-return]


def sentence(exercise: Exercise, verdict: Verdict) -> str:
    """Returns the verdict with the number of its exercise."""
    return f"{exercise.number}: {'right' if verdict.is_right else 'not yet'}. {verdict.words}"


def hint_text(exercise: Exercise, place: int) -> str:
    """Returns the hint at ``place``, counted from 1; past the last one, the last."""
    place = min(max(place, 1), len(exercise.hints))
    return f"{exercise.number}, hint {place} of {len(exercise.hints)}: {exercise.hints[place - 1]}"


def _failure(exercise: Exercise, error: BaseException, function: Callable[..., Any]) -> str:
    """Says what the reader's function raised, and at which line of the reader's own file or cell."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = "" if code is None else last_line(error, code.co_filename)
    raised = f"your function {exercise.function} raised {type(error).__name__}: {error}"
    return f"{raised}\n  {where}" if where else raised


def last_line(error: BaseException, file: str) -> str:
    """Returns the last line of ``file`` that the error passed through, with its text; "" where there is none."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{Path(file).name}, line {error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return ""
    number = frames[-1].lineno or 0
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}, line {number}" + (f": {text}" if text else "")


def _number(exercise: Exercise, answer: Any) -> int | float:
    """Returns the number that text or a value stands for: a whole one as an int."""
    text = answer.strip() if isinstance(answer, str) else answer
    try:
        if isinstance(text, bool | complex):
            raise ValueError
        value = _parse_number(text) if isinstance(text, str) else float(text)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        fix = "write it as 96, 0.75, 3/4 or 1.5e9"
        raise _refusal(exercise, answer, "is no number", "one number, without a unit", fix)
    return int(value) if value.is_integer() and abs(value) <= _MOST_EXACT else value


def _parse_number(text: str) -> float:
    above, slash, below = text.partition("/")
    if slash:
        return _parse_number(above.strip()) / _parse_number(below.strip())
    groups = text.split(",")  # 96,000
    if len(groups) > 1 and any(len(each.partition(".")[0]) != 3 for each in groups[1:]):
        raise ValueError(text)
    return float("".join(groups))


def _word(exercise: Exercise, answer: Any) -> str:
    if not isinstance(answer, str) or not answer.strip():
        fix = "write it in quotes in Python, without them in a shell"
        raise _refusal(exercise, answer, "is no word", "one word", fix)
    return answer.strip().lower()


def _function(exercise: Exercise, answer: Any) -> Callable[..., Any]:
    if not callable(answer):
        fix = "in Python pass the function itself, without brackets; in a shell give the file that defines it"
        raise _refusal(exercise, answer, "cannot be called", f"a function {exercise.function}", fix)
    return answer  # type: ignore[no-any-return]


def _refusal(exercise: Exercise, answer: Any, why: str, asks_for: str, fix: str) -> UsageError:
    what = f"the answer to {exercise.number} is {excerpt(repr(answer))}, which {why}"
    return UsageError(f"{what}\n  it asks for {asks_for}\n  {fix}")


_JUDGES: dict[str, Callable[..., Said]] = {"number": judge_number, "word": judge_word, "function": judge_formula}
_CONVERTERS: dict[str, Callable[[Exercise, Any], Any]] = {"number": _number, "word": _word, "function": _function}


# Progress.


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The exercises that were passed, and the number of hints shown for each."""

    passed: frozenset[str] = frozenset()
    hints: dict[str, int] = field(default_factory=dict)


def load_progress(path: Path) -> Progress:
    """Reads the file; an empty progress where there is none, or where it cannot be read."""
    try:
        return parse_progress(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError):
        return Progress()


def parse_progress(text: bytes) -> Progress:
    """Reads progress from JSON. Raises ValueError for anything else; values of another kind are left out."""
    found = parse_json_object(text, _MOST_BYTES)
    passed, hints = found.get("passed"), found.get("hints")
    numbers = [each for each in passed if isinstance(each, str)] if isinstance(passed, list) else []
    counts = hints.items() if isinstance(hints, dict) else ()
    return Progress(passed=frozenset(numbers), hints={key: count for key, count in counts if is_count(count, 1000)})


def save_progress(path: Path, progress: Progress) -> bool:
    """Writes the file, whole or not at all; returns whether it was written."""
    text = json.dumps({"passed": sorted(progress.passed), "hints": progress.hints}, indent=1)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return False
    return True
