"""What a plain run listens on, read from the system while it trains, and where its secret is."""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    # torch leaves the files of redirected output to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="this system does not tell who listens"),
]
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def listening(pid: int) -> list[str]:
    """Returns the addresses at which a process listens, as the system writes them; none where it is gone."""
    try:
        tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        paths = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # a helper of the launcher, such as a dry run, may end at any moment
        return []
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    by_inode = {f"socket:[{row[9]}]": row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    targets = []
    for path in paths:
        try:
            targets.append(str(path.readlink()))
        except OSError:  # closed since
            continue
    return [by_inode[target] for target in targets if target in by_inode]


# Of the second rank, which looks in its first step: at itself, the launcher, and all that these two belong to.
LOOK = f"""
import json, os, stat
from pathlib import Path
import psutil, torch

{inspect.getsource(listening)}

class Looking(torch.nn.Linear):
    def forward(self, inputs):
        if os.environ["RANK"] == "1" and not Path("seen.json").exists():
            launcher, server = (psutil.Process(pid) for pid in (int(os.environ["LAUNCHER"]), os.getppid()))
            others = {{os.getpid(), server.pid, *(each.pid for each in launcher.children() + server.children())}}
            secret = Path(os.environ["PACELINE_SECRET_FILE"])
            lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
            seen = {{
                "launcher": listening(launcher.pid),
                "others": [address for pid in others for address in listening(pid)],
                "address": os.environ["MASTER_ADDR"],
                "modes": [stat.S_IMODE(path.stat().st_mode) for path in (secret, secret.parent)],
                "is_secret_shown": any(secret.read_text() in line for line in lines),
            }}
            Path("seen.json").write_text(json.dumps(seen))
        return super().forward(inputs)

def net():
    return Looking(8, 4)
"""


@pytest.mark.parametrize("backend", ["auto", pytest.param("gloo", marks=pytest.mark.exhaustive)])
def test_a_run_on_one_host_listens_on_the_loopback_alone(
    project: Path, call: Callable[..., Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    monkeypatch.setenv("PACELINE_SECRET", "of another job, and not used here")
    (project / "user_code.py").write_text((project / "user_code.py").read_text() + LOOK)
    before = Counter(listening(os.getpid()))  # of other tests
    called = call("train", "tiny.yaml", f"comm.backend={backend}", "train.steps=2", "monitor.console=false")
    assert (called.code, called.err) == (0, "")
    seen = json.loads((project / "seen.json").read_text())
    assert len(seen["others"]) >= 2  # Gloo, on both ranks
    assert {*seen["others"], *(Counter(seen["launcher"]) - before)} <= LOOPBACK
    assert seen["address"].startswith("unix:/")
    assert seen["modes"] == [0o600, 0o700]
    assert not seen["is_secret_shown"]
