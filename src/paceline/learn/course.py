"""The exercises of all lessons by number, and what happens with an answer: it is converted, judged and reported.

Each lesson keeps its exercises in a file of its own (lesson_1.py), under ``EXERCISES``. A lesson that is not there is
skipped. Only the lesson that is asked for is imported, because most of them need torch.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable
from typing import Any

from paceline.errors import PacelineError, RankFailedError, UsageError
from paceline.learn.exercise import Exercise, Verdict, wrong
from paceline.learn.failures import line_of
from paceline.terminal import echo

LESSONS: dict[int, str] = {
    1: "Ranks and collectives",
    2: "Ring, tree, hierarchical: watch the bytes",
    3: "Data parallelism",
    4: "Where memory goes, and ZeRO",
    5: "FSDP, the life of a unit",
    6: "Tensor and sequence parallelism",
    7: "Pipelines and their bubbles",
    8: "Precision, speed and MFU",
    9: "Planning a real run",
}
_MOST_EXACT = 2**53  # up to here every whole number is a float


def lesson_exercises(lesson: int) -> tuple[Exercise, ...]:
    """Returns the exercises of one lesson; none where it has no module."""
    name = f"paceline.learn.lesson_{lesson}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return ()
    exercises: tuple[Exercise, ...] = module.EXERCISES
    return exercises


def all_exercises() -> tuple[Exercise, ...]:
    """Returns the exercises of all lessons, in their order."""
    return tuple(each for lesson in LESSONS for each in lesson_exercises(lesson))


def find(number: str) -> Exercise:
    """Returns the exercise with a number such as "3.2". Raises UsageError for an unknown number."""
    lesson, _, _ = number.partition(".")
    here = lesson_exercises(int(lesson)) if lesson.isascii() and lesson.isdigit() and int(lesson) in LESSONS else ()
    for each in here:
        if each.number == number:
            return each
    known = [each.number for each in here or all_exercises()]
    near = difflib.get_close_matches(number, known, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]}?" if near else f"the numbers are {', '.join(known)}"
    raise UsageError(f"there is no exercise {number!r}\n  a number is LESSON.EXERCISE, such as 3.2\n  {fix}")


def judge(exercise: Exercise, answer: Any) -> Verdict:
    """Checks an answer. A function that raises is a wrong answer, whose words name the line.

    Raises UsageError for an answer of another kind than the exercise asks for.
    """
    taken = _CONVERTERS[exercise.answer](exercise, answer)
    if exercise.answer != "function":
        return exercise.check(taken)
    try:
        return exercise.check(taken)
    except RankFailedError as error:
        return wrong(f"On rank {error.rank}, {_failure(exercise, error.error, taken)}")
    except PacelineError as error:  # ranks that wait for each other, or call different operations: it names the lines
        return wrong(f"The ranks that ran your function {exercise.function} stopped:\n{error}")
    except (Exception, SystemExit) as error:
        return wrong(_failure(exercise, error, taken))


def check(number: str, answer: Any = ...) -> bool:
    """Prints whether an answer is right, and what does not fit where it is wrong; returns whether it is right.

    ``answer`` is a number, a word or a function, as the exercise asks for; ``...`` prints the exercise.
    """
    exercise = find(number)
    if answer is ...:
        echo(f"{_question(exercise)}\nThere is no answer yet: put yours in place of the three dots.")
        return False
    verdict = judge(exercise, answer)
    echo(sentence(exercise, verdict))
    return verdict.is_right


def ask(number: str) -> None:
    """Prints what an exercise asks for."""
    echo(_question(find(number)))


def hint(number: str, place: int = 1) -> None:
    """Prints a hint of an exercise: the first, or the one at ``place``; past the last one, the last."""
    exercise = find(number)
    echo(hint_text(exercise, place))


def sentence(exercise: Exercise, verdict: Verdict) -> str:
    """Returns the verdict with the number of its exercise."""
    return f"{exercise.number}: {'right' if verdict.is_right else 'not yet'}. {verdict.words}"


def hint_text(exercise: Exercise, place: int) -> str:
    """Returns the hint at ``place``, counted from 1; past the last one, the last."""
    place = min(max(place, 1), len(exercise.hints))
    return f"{exercise.number}, hint {place} of {len(exercise.hints)}: {exercise.hints[place - 1]}"


def _question(exercise: Exercise) -> str:
    return f"{exercise.number} {exercise.title}\n{exercise.asks}"


def _failure(exercise: Exercise, error: BaseException, function: Callable[..., Any]) -> str:
    where = line_of(error, function)
    raised = f"your function {exercise.function} raised {type(error).__name__}: {error}"
    return f"{raised}\n  {where}" if where else raised


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
        raise UsageError(
            f"the answer to {exercise.number} is {_shown(answer)}, which is no number\n"
            f"  exercise {exercise.number} asks for one number, without a unit\n"
            "  write it as 96, 0.75, 3/4 or 1.5e9"
        )
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
        raise UsageError(
            f"the answer to {exercise.number} is {_shown(answer)}, which is no word\n"
            f"  exercise {exercise.number} asks for one word\n  write it in quotes in Python, without them in a shell"
        )
    return answer.strip().lower()


def _function(exercise: Exercise, answer: Any) -> Callable[..., Any]:
    if not callable(answer):
        raise UsageError(
            f"the answer to {exercise.number} is {_shown(answer)}, which cannot be called\n"
            f"  exercise {exercise.number} asks for a function {exercise.function}\n"
            f"  in Python pass the function itself, without brackets; in a shell give the file that defines it"
        )
    return answer  # type: ignore[no-any-return]


def _shown(answer: Any) -> str:
    text = repr(answer)
    return text if len(text) <= 60 else f"{text[:57]}..."


_CONVERTERS: dict[str, Callable[[Exercise, Any], Any]] = {"number": _number, "word": _word, "function": _function}
