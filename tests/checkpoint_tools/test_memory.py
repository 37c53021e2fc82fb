"""Tools stay within a few windows of memory, on a checkpoint of many times that size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CEILING_BYTES = 40 * 2**20
MODEL_BYTES = 128 * 2**20

# In a process of its own, whose largest resident memory the system knows.
SCRIPT = """
import sys
from functools import partial
from pathlib import Path
import torch
from paceline.checkpoint.read import open_checkpoint
from paceline.checkpoint.write import PlainState
from paceline.checkpoint_tools import audit, difference, incoming, outgoing, reshard
from paceline.checkpoint_tools.rewrite import Part, Piece, write_checkpoint
from paceline.checkpoint_tools.stream import stream_made
from paceline.layout import whole_region

torch.set_num_threads(1)
folder, total = Path(sys.argv[1]), int(sys.argv[2])
rows = total // (2 * 4 * 1024)
window = torch.zeros(2**22, dtype=torch.uint8)
parts = total // 2 // window.numel()

def read():
    for part in range(parts):
        yield memoryview(window.numpy())

pieces = [Piece(name=f"model/{n}", region=whole_region((rows, 1024)), dtype=torch.float32, read=read) for n in "ab"]
plain = PlainState(step=1, position=0, values={}, own={"dict": []}, found={}, about={})

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

before = peak()
path = write_checkpoint(folder / "a", [Part(pieces=pieces)], plain)
source = open_checkpoint(path)
assert audit.audit(path, "fast").is_good
made = reshard.reshard(source, folder / "b", reshard.World(ranks=3, tensor=3, strategy="ddp"))
assert difference.compare(source, open_checkpoint(made)).is_same_state
outgoing.export(source, folder / "m.safetensors", outgoing.ExportOptions())
incoming.take_in(incoming.open_incoming(folder / "m.safetensors", "safetensors"), folder / "c", "m")
outgoing.export(source, folder / "m.pt", outgoing.ExportOptions(format="torch"))
growth = peak() - before
whole = torch.ones(total, dtype=torch.uint8)  # what it would be with all of it in memory
print(growth, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the gauge is that of Linux")
def test_a_checkpoint_of_three_times_the_ceiling_goes_through_every_tool(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(MODEL_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    growth, growth_with_all = map(int, done.stdout.split())
    assert growth < CEILING_BYTES
    assert growth_with_all > 2 * CEILING_BYTES  # the gauge would have seen it
