"""The sections "The same in PyTorch" of the lessons: their programs run on two Gloo ranks, and print what is shown."""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch.distributed as dist

from paceline.comm.base import Communicator

if TYPE_CHECKING:
    from gloo_pool import GlooPool

PAGES = sorted(
    (Path(__file__).parents[2] / "docs/learn").glob("[0-9]*-*.md"), key=lambda page: int(page.name.partition("-")[0])
)
PROGRAM = re.compile(r"^```py\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_program(comm: Communicator, source: str, folder: str) -> str:
    """Runs a program in this process, which has a group already: its own would be made by torchrun."""
    assert dist.is_initialized()
    assert comm.size == dist.get_world_size()
    printed = io.StringIO()
    keep = mock.Mock()
    with (
        contextlib.chdir(folder),
        mock.patch.multiple(dist, init_process_group=keep, destroy_process_group=keep),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, by its own modules
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # DCP of torch 2.10 reads it
        exec(compile(source, "same.py", "exec"), {"__name__": "__main__"})
    assert [each.args for each in keep.mock_calls] == [("gloo",), ()]
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_same_in_pytorch_prints_what_the_lesson_shows(page: Path, gloo_pool: GlooPool, tmp_path: Path) -> None:
    ((source, printed),) = PROGRAM.findall(page.read_text(encoding="utf-8"))
    assert gloo_pool.run(run_program, source, os.fspath(tmp_path), ranks=2) == [printed, ""]
