"""What judges share: whether a case was refused in our words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from paceline.errors import RankFailedError, UsageError

T = TypeVar("T")


def outcome_of(work: Callable[[], T]) -> T:
    """Returns what some work returns; a refusal with rule and fix ends the test as refused, another error fails it."""
    try:
        return work()
    except (RankFailedError, UsageError) as error:
        cause = error.error if isinstance(error, RankFailedError) else error
        if not isinstance(cause, UsageError):
            raise
        pytest.skip(f"refused: {cause}")
