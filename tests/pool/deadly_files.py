"""Files in the middle of which a process dies."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path

from paceline.checkpoint.manifest import SavedFile
from paceline.checkpoint.storage import LocalFiles


class DeadlyFiles(LocalFiles):
    """Files whose n-th operation is the last thing that the process does, half done or just done; None: none is."""

    def __init__(self, draw: random.Random, last: int | None) -> None:
        self.count = 0
        self._random = draw
        self._last = last

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> SavedFile:
        """Writes, and may die after some bytes of a chunk."""
        return super().write(path, self._watched(path, chunks))

    def _watched(self, path: Path, chunks: Iterable[memoryview | bytes]) -> Iterable[memoryview | bytes]:
        for chunk in chunks:
            if self._is_over():
                with path.open("ab") as file:
                    file.write(memoryview(chunk)[: self._random.randrange(len(chunk) + 1)])
                die()
            yield chunk
        self._pass()

    def rename(self, path: Path, to: Path) -> None:
        """Renames, and may die before or after."""
        self._pass()
        super().rename(path, to)
        self._pass()

    def sync_folder(self, path: Path) -> None:
        """Syncs a folder, and may die after it."""
        super().sync_folder(path)
        self._pass()

    def make_folder(self, path: Path) -> None:
        """Makes a folder, and may die after it."""
        super().make_folder(path)
        self._pass()

    def remove(self, path: Path) -> None:
        """Removes a folder, and may die when some of it is gone."""
        for name in self.names(path):
            self._pass()
            (path / name).unlink()
        super().remove(path)

    def _is_over(self) -> bool:
        self.count += 1
        return self._last is not None and self.count > self._last

    def _pass(self) -> None:
        if self._is_over():
            die()


def die() -> None:
    """Ends this process as nothing else does."""
    os.kill(os.getpid(), signal.SIGKILL)
