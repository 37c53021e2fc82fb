"""``paceline learn``: checks answers to the course, and gives hints; progress is in ``$XDG_STATE_HOME``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import AsJson, IsOpened, Port, print_json
from paceline.cli.runs import open_browser
from paceline.health.exit_codes import FAILED
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline_course.exercise import Exercise

app = typer.Typer(no_args_is_help=True, help="The course: check answers, get hints, play with layouts.")


@app.command(context_settings={"ignore_unknown_options": True})  # -3 is a number
def check(
    number: str = typer.Argument("", metavar="NUMBER", help="The exercise, such as 3.2; none: lists all exercises."),
    answer: str = typer.Argument("", metavar="ANSWER", help="A number, word or Python file; none: shows the exercise."),
    as_json: AsJson = False,
) -> None:
    """Check an answer to an exercise of the course, and keep a note of it when it is right."""
    from paceline_course.course import find, judge, load_function, load_progress, save_progress, sentence

    if not number:
        _list(as_json=as_json)
        return
    exercise = find(number)
    if not answer:
        _show(exercise, as_json=as_json)
        return
    given: Any = load_function(exercise, Path(answer)) if exercise.answer == "function" else answer
    verdict = judge(exercise, given)
    if verdict.is_right:
        progress = load_progress(state_file())
        save_progress(state_file(), replace(progress, passed=progress.passed | {number}))
    if as_json:
        print_json({"number": number, "right": verdict.is_right, "words": verdict.words})
    else:
        echo(sentence(exercise, verdict))
        if not verdict.is_right:
            echo(f"A hint: paceline learn hint {number}")
    raise typer.Exit(0 if verdict.is_right else FAILED)


@app.command()
def hint(number: str = typer.Argument(..., metavar="NUMBER", help="The exercise, such as 3.2.")) -> None:
    """Show the next hint to an exercise; each call shows one more."""
    from paceline_course.course import find, hint_text, load_progress, save_progress

    exercise = find(number)
    progress = load_progress(state_file())
    shown = progress.hints.get(number, 0) + 1
    if save_progress(state_file(), replace(progress, hints={**progress.hints, number: shown})):
        echo(hint_text(exercise, shown))
        return
    for place in range(1, len(exercise.hints) + 1):  # which were shown cannot be kept, so all are
        echo(hint_text(exercise, place))


@app.command()
def play(port: Port = None, is_opened: IsOpened = True) -> None:
    """Move sliders, and see the memory and the step time of a model at once."""
    from paceline.view.server import listen, make_server
    from paceline_course.play import make_play_app

    page, found = make_play_app(), listen("127.0.0.1", port)
    url = f"http://127.0.0.1:{found.getsockname()[1]}/"
    echo(f"the page is at {url}\n  Ctrl-C ends it")
    if is_opened:
        open_browser(url)
    make_server(page).run(sockets=[found])


def state_file() -> Path:
    """Returns where progress is kept."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return folder / "paceline" / "learn.json"


def _show(exercise: Exercise, *, as_json: bool) -> None:
    if as_json:
        names = ("number", "title", "asks", "answer", "function")
        print_json({name: getattr(exercise, name) for name in names} | {"hints": len(exercise.hints)})
        return
    form = {"number": "NUMBER", "word": "WORD", "function": "FILE.py"}[exercise.answer]
    echo(f"{exercise.number} {exercise.title}\n{exercise.asks}\n")
    echo(f"paceline learn check {exercise.number} {form}")


def _list(*, as_json: bool) -> None:
    from paceline_course.course import load_progress
    from paceline_course.exercise import lessons

    progress = load_progress(state_file())
    exercises = [each for lesson in lessons().values() for each in lesson.exercises]
    if as_json:
        rows = []
        for each in exercises:
            hints = min(progress.hints.get(each.number, 0), len(each.hints))
            row = {"number": each.number, "title": each.title, "passed": each.number in progress.passed}
            rows.append(row | {"hints_shown": hints})
        print_json(rows)
        return
    for number, lesson in lessons().items():
        echo(f"Lesson {number}: {lesson.title}")
        for each in lesson.exercises:
            echo(f"  {each.number} {'passed' if each.number in progress.passed else '-':<7} {each.title}")
    passed = sum(each.number in progress.passed for each in exercises)
    echo(f"\n{passed} of {len(exercises)} exercises passed")
