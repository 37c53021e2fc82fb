"""The machinery of the course: numbers, answers of every kind, functions that raise, hints, and progress."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline
from paceline.cli.app import app as whole_app
from paceline.cli.learn import app
from paceline.errors import UsageError
from paceline_course import course
from paceline_course.course import Progress, load_progress, parse_progress, save_progress
from paceline_course.exercise import RIGHT, Exercise, Lesson, Said, calculate, judge_number, lessons, says

ROOT = Path(__file__).parents[2]
runner = CliRunner()


def doubles(function: Any) -> Said:
    return RIGHT if function(3) == 6 else says("otherwise")


def of_four_ranks(function: Any) -> Said:
    return RIGHT if paceline.run_virtual(function, ranks=4) == [0, 1, 2, 3] else says("otherwise")


def exercise(number: str, title: str, asks: str, right: str, otherwise: str, *hints: str, **more: Any) -> Exercise:
    words = {"right": right, "otherwise": otherwise}
    return Exercise(number=number, title=title, asks=asks, hints=hints, says=words, check="of_the_test", **more)


EXERCISES = (
    exercise("1.1", "A number", "How many?", "So many.", "{value} is not it.", "Think.", "Count.", answer="number"),
    exercise("1.2", "A word", "Which?", "That one.", "Another.", "Think.", answer="word"),
    exercise(
        *("1.3", "A function", "Write it.", "It doubles.", "It should double.", "Think."),
        answer="function",
        function="double",
    ),
    exercise("1.4", "A function of ranks", "Write it.", "Yes.", "No.", "Think.", answer="function", function="name"),
)
CHECKS = {
    "1.1": lambda value: RIGHT if value == 96000 else says("otherwise", value=value),
    "1.2": lambda word: RIGHT if word == "ring" else says("otherwise"),
    "1.3": doubles,
    "1.4": of_four_ranks,
}


@pytest.fixture
def lesson(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Puts a lesson of its own in place of the course, and the state in a folder of its own, which it returns."""
    module = ModuleType("paceline_course.of_the_test")
    module.CHECKS = CHECKS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for place in ("paceline_course.course.lessons", "paceline_course.exercise.lessons"):
        monkeypatch.setattr(place, lambda: {1: Lesson("The first", EXERCISES)})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> tuple[int, str]:
    found = runner.invoke(app, list(words))
    if isinstance(found.exception, UsageError):
        return 2, str(found.exception)  # as run_command reports it
    return found.exit_code, found.output


# The course that ships.


def every_exercise() -> list[Exercise]:
    return [each for lesson in lessons().values() for each in lesson.exercises]


def test_every_lesson_has_three_exercises_or_more_with_hints_checks_and_words() -> None:
    for number, lesson in lessons().items():
        assert len(lesson.exercises) >= 3
        assert [each.number for each in lesson.exercises] == [f"{number}.{n + 1}" for n in range(len(lesson.exercises))]
        for each in lesson.exercises:
            assert course.find_check(each)
            assert each.title
            assert each.asks
            assert each.hints
            assert (each.answer == "function") == bool(each.function)


def test_every_sentence_of_an_exercise_is_named_by_its_check() -> None:
    """Of a name that the check does not have, nobody would ever read the sentence."""
    for each in every_exercise():
        names = each.says.keys() - {"right", "otherwise"} - each.slips.keys()
        if each.answer == "word" and each.truth:
            continue  # each names a word
        files = (f"{each.check}.py", "exercise.py", "watched.py") if each.check else ("exercise.py",)
        source = "".join((Path(course.__file__).parent / name).read_text(encoding="utf-8") for name in files)
        assert not [name for name in names if f'"{name}"' not in source], each.number


NUMBERS = [each for each in every_exercise() if each.truth and each.answer != "word"]


@pytest.mark.parametrize("each", NUMBERS, ids=lambda each: each.number)
def test_every_slip_of_a_number_is_named_as_itself(each: Exercise) -> None:
    """No slip comes to what another one does in every case, and no sentence has the right answer."""
    found: dict[str, set[str]] = {name: set() for name in each.slips}
    for case in each.cases or [{}]:
        symbols = each.symbols(**case)
        assert judge_number(each, symbols["truth"], **case) == RIGHT
        for name, formulas in each.slips.items():
            for formula in formulas if isinstance(formulas, list) else [formulas]:
                value = calculate(formula, symbols)
                found[name].add(judge_number(each, value, **case).name)
                assert f"{symbols['truth']:g}" not in each.says[name]
    for name, said in found.items():
        assert name in said
        assert each.cases or said == {name}


def test_every_page_has_the_headings_and_exercises_of_its_lesson() -> None:
    found = (ROOT / "docs/learn").glob("[0-9]*-*.md")
    pages = {int(page.name.partition("-")[0]): page.read_text(encoding="utf-8") for page in found}
    assert pages.keys() == lessons().keys()
    headings = ["The picture", "Try it", "The formula", "Worked numbers", "When it stops paying"]
    headings += ["Predicted and measured", "The same in PyTorch", "Exercises", "Takeaway", "Reading on"]
    for lesson, page in pages.items():
        assert page.startswith(f"# Lesson {lesson}: ")
        prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"^## (.*)$", prose, re.MULTILINE) == headings, lesson
        for each in lessons()[lesson].exercises:
            assert f"paceline learn check {each.number}" in page
            assert f'learn.check("{each.number}"' in page


WITHOUT_TORCH = """
import sys
from paceline_course.course import find, hint_text, judge
from paceline_course.exercise import lessons

for each in [each for lesson in lessons().values() for each in lesson.exercises]:
    hint_text(each, 1)
    if each.answer != "function":
        judge(each, 7) if each.answer == "number" else judge(each, "ddp")
judge(find("7.2"), lambda _s, p, m, rank: m)
judge(find("8.2"), lambda weight, update: update > weight / 100)
judge(find("9.3"), lambda save_s, *_: save_s)
sys.exit("torch" in sys.modules)
"""


def test_hints_and_answers_that_need_no_torch_import_none() -> None:
    assert subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=False).returncode == 0


# Answers.


@pytest.mark.usefixtures("lesson")
@pytest.mark.parametrize("answer", ["96000", "96_000", "96,000", "9.6e4", " 192000/2 ", 96000, 96000.0])
def test_a_number_is_read_however_it_is_written(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert paceline.learn.check("1.1", answer)
    assert capsys.readouterr().out == "1.1: right. So many.\n"


@pytest.mark.usefixtures("lesson")
def test_a_wrong_number_is_shown_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert not paceline.learn.check("1.1", "95,000")
    assert not paceline.learn.check("1.1", 0.5)
    assert capsys.readouterr().out == "1.1: not yet. 95000 is not it.\n1.1: not yet. 0.5 is not it.\n"


@pytest.mark.usefixtures("lesson")
@pytest.mark.parametrize("answer", ["many", "", "1,00", "nan", "inf", "1/0", True, None, [1], 1j])
def test_what_is_no_number_is_refused(answer: Any) -> None:
    with pytest.raises(UsageError, match="which is no number\n"):
        paceline.learn.check("1.1", answer)


@pytest.mark.usefixtures("lesson")
def test_a_word_counts_in_any_case() -> None:
    assert paceline.learn.check("1.2", " Ring ")
    assert not paceline.learn.check("1.2", "tree")
    with pytest.raises(UsageError, match="3, which is no word"):
        paceline.learn.check("1.2", 3)


@pytest.mark.usefixtures("lesson")
def test_three_dots_show_the_exercise(capsys: pytest.CaptureFixture[str]) -> None:
    assert not paceline.learn.check("1.1", ...)
    assert "How many?" in capsys.readouterr().out
    paceline.learn.ask("1.2")
    assert capsys.readouterr().out == "1.2 A word\nWhich?\n"


@pytest.mark.usefixtures("lesson")
def test_a_function_is_called_and_one_that_raises_is_reported_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(value: int) -> int:
        return value / 0  # type: ignore[return-value]  # on purpose

    assert paceline.learn.check("1.3", lambda value: 2 * value)
    assert not paceline.learn.check("1.3", broken)
    words = capsys.readouterr().out
    assert "your function double raised ZeroDivisionError: division by zero" in words
    line = broken.__code__.co_firstlineno + 1
    assert f"test_course.py, line {line}: return value / 0" in words
    with pytest.raises(UsageError, match="6, which cannot be called"):
        paceline.learn.check("1.3", 6)


@pytest.mark.usefixtures("lesson")
def test_ranks_that_fail_or_wait_forever_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(comm: Any) -> int:
        return [0, 1][comm.rank]

    def waits(comm: Any) -> int:
        if comm.rank:
            comm.barrier()
        return int(comm.rank)

    assert paceline.learn.check("1.4", lambda comm: comm.rank)
    capsys.readouterr()
    assert not paceline.learn.check("1.4", fails)
    words = capsys.readouterr().out
    assert "On rank 2, your function name raised IndexError" in words
    assert f"line {fails.__code__.co_firstlineno + 1}: return [0, 1][comm.rank]" in words
    assert not paceline.learn.check("1.4", waits)
    assert "stopped:\nno rank can go on: rank 0 is missing from barrier" in capsys.readouterr().out


@pytest.mark.usefixtures("lesson")
@pytest.mark.parametrize(
    ("number", "fix"),
    [("1.9", "did you mean 1.[1-4]?"), ("11", "did you mean 1.1?"), ("x", "the numbers are 1.1, 1.2")],
)
def test_an_unknown_number_is_refused_with_those_that_exist(number: str, fix: str) -> None:
    code, words = call("check", number, "3")
    assert code == 2
    assert re.search(f"no exercise '{number}'\n.*\n  {fix}", words)


# The command line.


@pytest.mark.usefixtures("lesson")
def test_the_verbs_are_those_of_paceline_learn() -> None:
    assert runner.invoke(whole_app, ["learn", "check", "1.2", "ring"]).output == "1.2: right. That one.\n"
    assert "A Python file is RUN" in runner.invoke(whole_app, ["learn", "check", "--help"]).output


@pytest.mark.usefixtures("lesson")
def test_right_wrong_and_unreadable_answers_have_exit_codes_of_their_own() -> None:
    assert call("check", "1.1", "96000") == (0, "1.1: right. So many.\n")
    assert call("check", "1.1", "-3") == (1, "1.1: not yet. -3 is not it.\nA hint: paceline learn hint 1.1\n")
    assert call("check", "1.1", "many")[0] == 2
    assert json.loads(call("check", "1.1", "7", "--json")[1]) == {
        "number": "1.1",
        "right": False,
        "words": "7 is not it.",
    }


def test_a_file_is_run_and_its_function_called(lesson: Path) -> None:
    (lesson / "beside.py").write_text("FACTOR = 2\n")
    answer = lesson / "mine.py"
    answer.write_text("from beside import FACTOR\ndef double(value):\n    return FACTOR * value\n")
    assert call("check", "1.3", "mine.py") == (0, "1.3: right. It doubles.\n")
    answer.write_text("def double(value):\n    return 3 * value\n")
    assert call("check", "1.3", str(answer))[0] == 1
    answer.write_text("def double(value):\n    return value + 'x'\n")
    code, words = call("check", "1.3", "mine.py")
    assert code == 1
    assert "mine.py, line 2: return value + 'x'" in words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no file 'mine.py'\n  exercise 1.3 asks for a Python file that defines double"),
        ("def dubble(value): ...\n", "defines no function double\n.*\n  did you mean it by dubble\\? Rename that"),
        ("double = 2\n", "defines no function double\n.*\n  define it: def double"),
        ("x = 1\ny = x / 0\n", "mine.py raised ZeroDivisionError: division by zero\n  mine.py, line 2: y = x / 0"),
        ("def double(:\n", "mine.py raised SyntaxError.*\n  mine.py, line 1: def double"),
        ("raise SystemExit(3)\n", "mine.py raised SystemExit: 3\n  mine.py, line 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(lesson: Path, text: str | None, words: str) -> None:
    if text is not None:
        (lesson / "mine.py").write_text(text)
    code, said = call("check", "1.3", "mine.py")
    assert code == 2
    assert re.search(words, said), said


@pytest.mark.usefixtures("lesson")
def test_an_exercise_without_an_answer_is_shown() -> None:
    code, words = call("check", "1.3")
    assert code == 0
    assert words == "1.3 A function\nWrite it.\n\npaceline learn check 1.3 FILE.py\n"
    assert json.loads(call("check", "1.1", "--json")[1])["hints"] == 2


@pytest.mark.usefixtures("lesson")
def test_progress_is_kept_and_listed() -> None:
    assert "0 of 4 exercises passed" in call("check")[1]
    call("check", "1.1", "95")
    call("check", "1.2", "ring")
    code, words = call("check")
    assert code == 0
    assert words.splitlines() == [
        "Lesson 1: The first",
        "  1.1 -       A number",
        "  1.2 passed  A word",
        "  1.3 -       A function",
        "  1.4 -       A function of ranks",
        "",
        "1 of 4 exercises passed",
    ]
    call("hint", "1.1")
    listed = json.loads(call("check", "--json")[1])
    assert listed[0] == {"number": "1.1", "title": "A number", "passed": False, "hints_shown": 1}
    assert [each["number"] for each in listed if each["passed"]] == ["1.2"]


@pytest.mark.usefixtures("lesson")
def test_each_call_shows_the_next_hint(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [call("hint", "1.1") for _ in range(3)]
    assert shown == [
        (0, "1.1, hint 1 of 2: Think.\n"),
        (0, "1.1, hint 2 of 2: Count.\n"),
        (0, "1.1, hint 2 of 2: Count.\n"),
    ]
    paceline.learn.hint("1.1", 2)
    assert capsys.readouterr().out == "1.1, hint 2 of 2: Count.\n"
    assert call("hint", "1.7")[0] == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"passed": 3, "hints": [1]}', '{"passed": [1], "hints": {"1.1": -2}}']
)
def test_a_broken_file_counts_as_empty(lesson: Path, text: str) -> None:
    file = lesson / "state" / "paceline" / "learn.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert "0 of 4" in call("check")[1]
    assert call("check", "1.1", "96000")[0] == 0
    assert call("hint", "1.1") == (0, "1.1, hint 1 of 2: Think.\n")
    assert load_progress(file) == Progress(passed=frozenset({"1.1"}), hints={"1.1": 1})


def test_a_folder_that_cannot_be_written_stops_nothing(lesson: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = lesson / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    assert call("check", "1.1", "96000") == (0, "1.1: right. So many.\n")
    assert call("hint", "1.1") == (0, "1.1, hint 1 of 2: Think.\n1.1, hint 2 of 2: Count.\n")


def test_without_a_state_folder_of_its_own_the_file_is_in_the_home(
    lesson: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # the standard ignores a relative one
    monkeypatch.setenv("HOME", str(lesson))
    call("check", "1.2", "ring")
    assert parse_progress((lesson / ".local/state/paceline/learn.json").read_bytes()).passed == {"1.2"}


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "learn.json"
    assert save_progress(file, Progress(passed=frozenset({"1.1"})))

    def refuse(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", refuse)
    assert not save_progress(file, Progress())
    assert load_progress(file).passed == {"1.1"}
