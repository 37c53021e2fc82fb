"""A rank's place in its group, as communicators keep it that ask nobody else."""

from __future__ import annotations


class GroupMember:
    """What communicators have in common: who this rank is, and who the others are."""

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self._rank = rank
        self._ranks = ranks

    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members by their rank in the world."""
        return self._ranks
