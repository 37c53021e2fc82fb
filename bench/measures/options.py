"""What the verbs of ``python bench`` share beyond those of ``paceline bench``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from measures.tables import show_table
from paceline.cli.bench import tell
from paceline.errors import UsageError
from paceline.run.folder import find_write_error
from paceline_bench.output import show_record as show_record_as

show_record = partial(show_record_as, program="python bench", show=show_table)


def announced(names: Iterable[str]) -> Iterator[str]:
    """Iterates over what is to be measured, and tells each before its turn."""
    for name in names:
        tell(f"{name} ...")
        yield name


def check_scratch(folder: str | None) -> str | None:
    """Returns a folder for files that come and go. Raises UsageError where there is none, or nothing can be written."""
    if folder is None:
        return None
    error = find_write_error(Path(folder))
    if Path(folder).is_dir() and error is None:
        return folder
    why = "it is not there" if error is None else error.strerror or str(error)
    raise UsageError(
        f"--folder {folder} cannot be used: {why}\n  files are written into it, and go again\n"
        "  name a folder that is there and can be written"
    )
