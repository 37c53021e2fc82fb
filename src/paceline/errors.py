"""The errors of Paceline, in one tree.

    PacelineError            everything we raise on purpose; the command line prints it without a traceback
    ├── ConfigError, RunFolderError, LaunchError
    ├── UsageError           UntraceableError, ForeignAttentionError
    ├── DataError            BadSampleError
    ├── CheckpointError      MisfitError
    ├── TrainingError        MemoryExhaustedError, PreemptedError
    └── CommunicationError   CollectiveMismatchError, LateRankError, LostRankError, StuckRankError, RankFailedError

A message says what is wrong, with the actual values and names; then the rule; then the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""

    @property
    def headline(self) -> str:
        """What is wrong, in one line; of several problems the first."""
        return str(self).partition("\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a config: what (with values), the rule that it breaks, and what to do."""

    what: str
    rule: str = ""
    fix: str = ""
    idle_key: str = ""  # the key that nothing reads, where that is all that is wrong

    def __str__(self) -> str:
        return "\n  ".join(part for part in (self.what, self.rule, self.fix) if part)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, cutoff: float = 0.6) -> str:
    """Returns the fix for a word that is not known: the known one that is most like it, or ``otherwise``."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


class ConfigError(PacelineError):
    """All problems of a config at once."""

    def __init__(self, problems: list[Problem], *, source: str = "config") -> None:
        self.problems = problems
        self.source = source
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{source}: {count}\n\n" + "\n\n".join(str(problem) for problem in problems))

    @property
    def headline(self) -> str:
        return self.problems[0].what.partition("\n")[0]

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ConfigError, source=self.source), (self.problems,)


class UsageError(PacelineError):
    """A call that breaks the contract of an API."""


class UntraceableError(UsageError):
    """A model that asks for values, or for an operator without a meta kernel, where it is run without values."""


class ForeignAttentionError(UsageError):
    """A model whose attention asks no other rank, where ranks share each sequence."""


class DataError(PacelineError):
    """A data set that cannot be read, is too small, or cannot be sent to loader workers."""


class BadSampleError(DataError):
    """What a source holds is wrong, however often it is read: a token beyond the vocabulary, a stream that is over."""


class CheckpointError(PacelineError):
    """A checkpoint that is missing, damaged, or belongs to another model."""


class MisfitError(CheckpointError):
    """A checkpoint that is whole, and belongs to another model or optimizer."""


class RunFolderError(PacelineError):
    """A run folder that exists already and was not to be overwritten, or that holds no readable records."""


class LaunchError(PacelineError):
    """Ranks that could not be started, or one that failed while running."""


class TrainingError(PacelineError):
    """A run that has to stop, such as one whose loss is not finite."""


class MemoryExhaustedError(TrainingError):
    """A rank that ran out of memory, whatever was tried."""


class PreemptedError(TrainingError):
    """A run that a signal asked to stop, on all ranks after the same step; its state is saved."""


class CommunicationError(PacelineError):
    """Ranks that cannot talk to one another."""


class CollectiveMismatchError(CommunicationError):
    """Ranks that called different operations, or the same one with other shapes or dtypes."""


class LateRankError(CommunicationError):
    """Another rank did not come to an operation within the time limit."""


class LostRankError(CommunicationError):
    """Another rank is gone: its process has ended, or its connection has closed."""


class StuckRankError(CommunicationError):
    """Ranks that wait for something that will not come; the message is the verdict."""


class RankFailedError(CommunicationError):
    """A rank raised; ``rank`` and ``traceback_text`` say which and where, ``__cause__`` is its exception."""

    def __init__(self, rank: int, error: BaseException, traceback_text: str) -> None:
        self.rank = rank
        self.error = error
        self.traceback_text = traceback_text
        super().__init__(f"rank {rank} failed: {type(error).__name__}: {error}\n\n{traceback_text}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.error, self.traceback_text)


def is_connection_lost(error: BaseException) -> bool:
    """Says whether an error means that another rank is gone; of those that torch raises, only the words tell."""
    if isinstance(error, PacelineError):
        return isinstance(error, LostRankError)
    signs = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")  # the last are NCCL's words
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
