"""Exercises with broken code: the code of the page fails, mended code passes, and half-mended code gets its words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judged import words_of_wrong

from paceline_course.course import find, judge

PAGES = Path(__file__).parents[2] / "docs/learn"


def shift(comm: Any, tensor: torch.Tensor, how: str = "") -> torch.Tensor:
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if how == "other way":
        to, source = source, to
    received = torch.empty_like(tensor)
    sending, receiving = comm.send(tensor, to=to), comm.recv(received, source=source)
    if how != "no wait":
        receiving.wait()
    sending.wait()
    return tensor if how == "own" else received


def mean_loss(comm: Any, losses: torch.Tensor, how: str = "") -> torch.Tensor:
    both = torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
    if how == "guarded":  # no nan, and still a mean of means
        both = torch.stack([both[0] / both[1].clamp(min=1), torch.tensor(1.0)])
    if how != "alone":
        comm.all_reduce(both).wait()
    return both[0] if how == "sum" else both[0] / (comm.size if how == "by ranks" else both[1])


def step_means(comm: Any, losses: list[torch.Tensor], how: str = "") -> torch.Tensor:
    steps = torch.tensor(len(losses))
    comm.all_reduce(steps, "max").wait()
    means = []
    for step in range(int(steps)):
        has_one = step < len(losses)
        both = torch.stack([losses[step] if has_one else torch.tensor(0.0), torch.tensor(float(has_one))])
        comm.all_reduce(both).wait()
        means.append(both[0] / (comm.size if how == "by ranks" else both[1]))
    return torch.stack(means[:-1] if how == "one less" else means)


def step(comm: Any, weight: torch.Tensor, gradient: torch.Tensor, how: str = "") -> torch.Tensor:
    is_finite = bool(gradient.isfinite().all())
    comm.all_reduce(gradient, "sum" if how == "sum" else "avg").wait()
    if how != "own gradient":
        is_finite = bool(gradient.isfinite().all()) or how == "never"
    return weight - 0.1 * gradient if is_finite else weight


def global_norm(
    comm: Any, shared: torch.Tensor, own: torch.Tensor, expert_ranks: int
) -> torch.Tensor:  # more in test_lesson_11.py
    experts = own.square().sum()
    comm.all_reduce(experts).wait()
    return (shared.square().sum() + experts * expert_ranks / comm.size).sqrt()


def average(comm: Any, gradients: list[torch.Tensor]) -> torch.Tensor:  # more in test_capstone.py
    for work in [comm.all_reduce(each, "avg") for each in gradients]:
        work.wait()
    return torch.stack(gradients)


MENDED: dict[str, Callable[..., Any]] = {
    "1.4": shift,
    "3.4": mean_loss,
    "3.5": step_means,
    "3.6": average,
    "8.4": step,
    "11.4": global_norm,
}


@pytest.mark.parametrize("number", MENDED)
def test_mended_code_passes(number: str) -> None:
    verdict = judge(find(number), MENDED[number])
    assert verdict.is_right, verdict.words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("1.4", "The ranks that ran your function shift stopped"),
        ("3.4", "the mean of the ranks' means"),
        ("3.5", "The ranks that ran your function step_means stopped"),
        ("3.6", "changes a tensor that is under way (all_reduce), before wait()"),
        ("8.4", "The ranks that ran your function step stopped"),
        ("11.4", "the mean of the ranks' norms"),
    ],
)
def test_the_code_of_the_page_and_of_the_exercise_fails(number: str, words: str) -> None:
    exercise = find(number)
    (page,) = PAGES.glob(f"{number.partition('.')[0]}-*.md")
    (source,) = re.findall(rf"^```py\n(def {exercise.function}\(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    defined: dict[str, Any] = {"torch": torch}
    exec(source, defined)
    verdict = judge(exercise, defined[exercise.function])
    assert not verdict.is_right
    assert words in verdict.words
    statements = [" ".join(line.split()).rstrip(":") for line in source.splitlines()]
    asked = exercise.asks
    for statement in statements:  # the same lines, in one paragraph
        place = asked.find(statement)
        assert place >= 0, statement
        asked = asked[place + len(statement) :]


@pytest.mark.parametrize(
    ("number", "how", "words"),
    [
        ("1.4", "other way", "of the rank after it"),
        ("1.4", "own", "its own tensor"),
        ("1.4", "no wait", "never waits for 1 x recv"),
        ("3.4", "guarded", "the mean of the ranks' means"),
        ("3.4", "sum", "the sum over all samples"),
        ("3.4", "by ranks", "by the number of ranks"),
        ("3.4", "alone", "return different numbers"),
        ("3.5", "by ranks", "divided by all ranks"),
        ("3.5", "one less", "one mean for each step, 3 in all"),
        ("8.4", "sum", "N times too far"),
        ("8.4", "own gradient", "return different weights"),
        ("8.4", "never", "all ranks take the step"),
    ],
)
def test_half_mended_code_gets_words_that_help(number: str, how: str, words: str) -> None:
    assert words in words_of_wrong(number, lambda *given: MENDED[number](*given, how=how))
