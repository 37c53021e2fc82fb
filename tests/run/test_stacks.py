"""Where a process stands, asked from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import paceline
from paceline.run.seen_ranks import Frame, ask_for_stacks, line_of_thread, parse_stacks, telling_line

DUMP = """Thread 0x0000ffff00000002 (most recent call first):
  File "{library}/threading.py", line 320 in wait
  File "{torch}/utils/data/loader.py", line 11 in get

Current thread 0x0000ffff00000001 (most recent call first):
  File "{torch}/nn/functional.py", line 5 in relu
  File "/home/me/my model/net.py", line 8 in forward <locals>
  File "/home/me/venv/lib/python3.11/site-packages/other/lib.py", line 9 in call
  File "{ours}/train/step.py", line 170 in accumulate
"""


def dump() -> str:
    places = {"torch": Path(torch.__file__).parent, "ours": Path(paceline.__file__).parent}
    return DUMP.format(library=sysconfig.get_path("stdlib"), **places)


def test_threads_and_frames_are_read() -> None:
    stacks = parse_stacks(dump())
    assert list(stacks) == [0xFFFF00000002, 0xFFFF00000001]
    assert stacks[0xFFFF00000001][1] == Frame("/home/me/my model/net.py", 8, "forward <locals>")
    assert parse_stacks("") == {}


def test_the_telling_line_is_the_users_then_a_librarys_then_ours() -> None:
    user, library, ours = parse_stacks(dump())[0xFFFF00000001][1:]
    assert telling_line([ours, library, user]) == "/home/me/my model/net.py:8 in forward <locals>"
    assert telling_line([library, ours]).endswith("other/lib.py:9 in call")
    assert telling_line([ours, library]) == "paceline/train/step.py:170 in accumulate"
    assert telling_line([ours]) == "paceline/train/step.py:170 in accumulate"
    assert telling_line([]) == ""


def test_the_thread_of_the_rank_is_the_one_that_counts() -> None:
    assert line_of_thread(dump(), 0xFFFF00000001).endswith("net.py:8 in forward <locals>")
    assert line_of_thread(dump(), 0xFFFF00000002).endswith("threading.py:320 in wait")
    assert line_of_thread(dump(), 7).endswith("net.py:8 in forward <locals>")
    assert line_of_thread("", 7) == ""


SLEEPER = """
import sys, time
from pathlib import Path
from paceline.run.seen_ranks import dump_stacks_into
dump_stacks_into(Path(sys.argv[1]))
time.sleep(print("ready", flush=True) or 600)
"""


def test_a_process_that_sleeps_tells_where(tmp_path: Path) -> None:
    path = tmp_path / "health" / "x.stack"
    program = tmp_path / "sleeper.py"
    program.write_text(SLEEPER)
    with subprocess.Popen([sys.executable, program, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        texts = [ask_for_stacks([(process.pid, path)], patience_s=60.0)[process.pid] for _ in range(2)]
        assert process.poll() is None
        process.kill()
    assert [line_of_thread(text, -1) for text in texts] == [f"{program}:6 in <module>"] * 2


def test_a_process_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert ask_for_stacks([(process.pid, tmp_path / "x.stack")]) == {}
    assert os.getpid() != process.pid
