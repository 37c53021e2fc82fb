"""Where in a group's segment everything is: counters, failures, slots for collectives, rings for messages.

For N ranks: N areas of a few slots, and N x N rings of a few cells. Both shrink as groups grow: up to 25 ranks a
segment takes 40 MiB at most, and above that 1.25 MiB more with each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.comm.shared import board, letters
from paceline.comm.shared.progress import Fence
from paceline.comm.shared.segment import Segment

LINE_BYTES = 64  # bytes of a cache line
_SLOT_BYTES = (256 * 1024, 1024 * 1024)  # a chunk: large against the cost of a round, small against the cache
_ALL_SLOTS_BYTES = 32 * 2**20
_CELL_BYTES = (4 * 1024, 256 * 1024)
_ALL_CELLS_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where in a segment everything is, for a group of ``size`` ranks."""

    size: int
    is_quick: bool  # compiled code, and a core for each rank: rounds cost next to nothing

    @property
    def slot_bytes(self) -> int:
        """The slots of a rank's area: smaller in larger groups."""
        low, high = _SLOT_BYTES
        if self.is_quick:
            return low
        return min(high, max(low, _ALL_SLOTS_BYTES // (self.size * board.SLOTS) // LINE_BYTES * LINE_BYTES))

    @property
    def cell_bytes(self) -> int:
        """The cells of a ring: smaller in larger groups, which have a ring for each pair."""
        low, high = _CELL_BYTES
        return min(high, max(low, _ALL_CELLS_BYTES // (self.size**2 * letters.CELLS) // LINE_BYTES * LINE_BYTES))

    @property
    def counters(self) -> int:
        """Offset of the rings' counters, after the words of each rank for the board and a line for its failure."""
        return self._failures + self.size * LINE_BYTES

    @property
    def _failures(self) -> int:
        return 8 * board.WORDS * self.size

    @property
    def headers(self) -> int:
        """Offset of the headers of the cells."""
        return self.counters + 8 * letters.COUNTER_WORDS * self.size**2

    @property
    def areas(self) -> int:
        """Offset of the ranks' areas."""
        end = self.headers + 8 * letters.HEADER_WORDS * letters.CELLS * self.size**2
        return -(-end // 4096) * 4096

    @property
    def cells(self) -> int:
        """Offset of the cells."""
        return self.areas + self.size * board.SLOTS * self.slot_bytes

    @property
    def num_bytes(self) -> int:
        """What the whole segment takes."""
        return self.cells + self.size**2 * letters.CELLS * self.cell_bytes

    def make_board(self, segment: Segment, rank: int, fence: Fence) -> board.Board:
        """Returns the collectives' side of a segment."""
        starts = [
            [self.areas + (owner * board.SLOTS + slot) * self.slot_bytes for slot in range(board.SLOTS)]
            for owner in range(self.size)
        ]
        areas = [[segment.bytes(start, self.slot_bytes) for start in row] for row in starts]
        return board.Board(segment.words(0, board.WORDS * self.size), areas, rank, fence)

    def failures(self, segment: Segment) -> memoryview:
        """Returns a word for each rank, eight apart, that is set when it gives up."""
        return segment.words(self._failures, self.size * LINE_BYTES // 8)

    def make_ring(self, segment: Segment, source: int, to: int, fence: Fence) -> letters.Ring:
        """Returns the ring of a pair."""
        pair = source * self.size + to
        counters = segment.words(self.counters + 8 * letters.COUNTER_WORDS * pair, letters.COUNTER_WORDS)
        places = range(pair * letters.CELLS, (pair + 1) * letters.CELLS)
        words = letters.HEADER_WORDS
        headers = [segment.words(self.headers + 8 * words * place, words) for place in places]
        cells = [segment.bytes(self.cells + self.cell_bytes * place, self.cell_bytes) for place in places]
        return letters.Ring(counters, headers, cells, fence)
