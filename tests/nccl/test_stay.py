"""A rank is killed on one of two hosts: the other's process stays, aborts its communicator, and frees its memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nccl_cases import NCCL
from nccl_launchers import LAUNCHER_BACKENDS, Launchers, Left, until_left

from paceline.health.exit_codes import DONE
from paceline.records.records import EventRecord, RunRecord, StepRecord, read_records

STEPS = 10
CONFIG = f"""
name: gpt
model: {{kind: gpt, layers: 2, heads: 2, width: 64, context: 16, dropout: 0.1}}
data: {{kind: synthetic_tokens, samples: 64, vocab_size: 32, context: 16}}
train: {{steps: {STEPS}, global_batch: 4, deterministic: true, hooks: ["user_code:act"]}}
optim: {{kind: adamw, lr: 0.01, clip_norm: 1.0}}
checkpoint: {{every_steps: 2, asynchronous: false}}
monitor: {{tensorboard: false, console: false}}
recovery: {{max_restarts: 4}}
"""
CODE = """
import os, signal
from pathlib import Path
import torch

first = [0]

def act(trainer, result):
    if not first[0] and torch.cuda.is_initialized():
        first[0] = 1
        with Path("memory-" + os.environ["RANK"]).open("a") as file:
            file.write(f"{torch.cuda.memory_allocated()} {torch.cuda.mem_get_info()[0]}\\n")
    for step in (5, 7):
        mark = Path(f"killed-{step}")
        if os.environ["FAULT"] == "killed" and os.environ["RANK"] == "1" and result.step == step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Left]]:
    backend, folder = request.param, tmp_path_factory.mktemp("stay")
    started = {
        name: Launchers(folder / name, backend, CONFIG, hosts=2, code=CODE, fault=name) for name in ("whole", "killed")
    }
    with until_left(started, backend) as left:
        yield left


@pytest.mark.parametrize("runs", LAUNCHER_BACKENDS, indirect=True, scope="module")
def test_the_process_of_the_other_host_stays_and_losses_are_the_same(runs: dict[str, Left]) -> None:
    found: dict[str, list[object]] = {}
    for name, left in runs.items():
        assert left.codes == [DONE, DONE], left.told()
        found[name] = list(read_records(left.run / "records" / "rank-0.jsonl"))
    losses = {
        name: {each.step: each.loss for each in told if isinstance(each, StepRecord)} for name, told in found.items()
    }
    assert sorted(losses["whole"]) == list(range(1, STEPS + 1))
    assert losses["killed"] == losses["whole"]
    restarts = [each for each in found["killed"] if isinstance(each, EventRecord) and each.name == "restart"]
    assert [each.detail["process"] for each in restarts] == ["kept", "kept"], runs["killed"].told()
    assert len({each.pid for each in found["killed"] if isinstance(each, RunRecord)}) == 1


@pytest.mark.parametrize("runs", [NCCL], indirect=True, scope="module")
def test_a_communicator_that_was_aborted_leaves_no_memory(runs: dict[str, Left]) -> None:
    lines = [list(map(int, line.split())) for line in (runs["killed"].folder / "memory-0").read_text().splitlines()]
    assert len(lines) == 3  # attempts, each after its first step
    allocated = [each[0] for each in lines]
    assert max(allocated) - min(allocated) <= 2**20
