"""``paceline train --nnodes 2``: two launchers on this machine that NCCL takes for two hosts, on one GPU.

A small GPT, whose losses are those of one rank; a rank that is killed, and one that hangs: what each launcher says, and
with which code it leaves. All runs go on at the same time, as most of their time is spent on starting.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from gone_processes import wait_until_gone
from nccl_launchers import LAUNCHER_BACKENDS, Launchers, Left, until_left

from paceline.health.exit_codes import DONE, FAILED, HUNG
from paceline.records.records import RunRecord, read_records

STEPS = 6
GPT = f"""
name: gpt
model: {{kind: gpt, layers: 2, heads: 2, width: 32, context: 16}}
data: {{kind: synthetic_tokens, samples: 64, vocab_size: 32, context: 16}}
train: {{steps: {STEPS}, global_batch: 6, dtype: float64, precision: fp32}}
optim: {{lr: 0.001, eps: 1.0e-4}}
checkpoint: {{every_steps: {STEPS}}}
monitor: {{tensorboard: false, console: false}}
"""
FAULTY = """
name: faulty
model: {kind: factory, factory: "user_code:Net"}
data: {kind: synthetic_classification, samples: 64, features: 4, classes: 2}
train: {steps: 1000000, global_batch: 8}
checkpoint: {every_steps: 1000}
monitor: {tensorboard: false, console: false, hang_s: 4}
recovery: {max_restarts: 0, on_hang: stop}
"""
USER_CODE = """
import os, signal, threading
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.calls = 0
    def forward(self, values):
        self.calls += self.training
        if self.calls == 20 and os.environ.get("RANK") == "1":
            getattr(self, os.environ["FAULT"])()
        return super().forward(values)
    def hang(self):
        threading.Event().wait()  # stands here
    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Left]]:
    """All runs of this file on one backend, until they have left."""
    backend, folder = request.param, tmp_path_factory.mktemp("launchers")
    started = {
        "alone": Launchers(folder / "alone", backend, GPT, hosts=1),
        "pair": Launchers(folder / "pair", backend, GPT, hosts=2),
        "kill": Launchers(folder / "kill", backend, FAULTY, hosts=2, code=USER_CODE, fault="kill"),
        "hang": Launchers(folder / "hang", backend, FAULTY, hosts=2, code=USER_CODE, fault="hang"),
    }
    with until_left(started, backend) as left:
        yield left


@pytest.mark.parametrize("runs", LAUNCHER_BACKENDS, indirect=True, scope="module")
def test_two_hosts_train_as_one_rank_does(runs: dict[str, Left], request: pytest.FixtureRequest) -> None:
    alone, pair = runs["alone"], runs["pair"]
    assert alone.codes == [DONE], alone.told()
    assert pair.codes == [DONE, DONE], pair.told()
    assert len(alone.losses()) == STEPS
    assert pair.losses() == pytest.approx(alone.losses(), rel=0, abs=1e-12)
    start = next(read_records(pair.run / "records" / "rank-0.jsonl"))
    assert isinstance(start, RunRecord)
    assert (start.backend == "nccl") == (request.node.callspec.params["runs"] == "nccl")


@pytest.mark.parametrize("runs", LAUNCHER_BACKENDS, indirect=True, scope="module")
def test_the_rank_that_was_killed_is_named(runs: dict[str, Left]) -> None:
    left = runs["kill"]
    assert None not in left.codes, left.told()
    own = next((said for said in left.said if "rank 1 was killed by SIGKILL" in said), None)
    assert own is not None, left.told()
    assert left.codes[left.said.index(own)] == FAILED, left.told()
    for code, said in zip(left.codes, left.said, strict=True):
        assert code in (FAILED, HUNG), left.told()
        assert "rank 1" in said, left.told()


@pytest.mark.parametrize("runs", LAUNCHER_BACKENDS, indirect=True, scope="module")
def test_the_rank_that_hangs_is_named_with_its_line(runs: dict[str, Left]) -> None:
    left = runs["hang"]
    assert left.codes == [HUNG, HUNG], left.told()
    told = json.loads((left.run / "verdict.json").read_text())
    assert (told["kind"], told["ranks"]) == ("missing", [1])
    (line,) = (at for at, text in enumerate(USER_CODE.splitlines(), start=1) if text.endswith("# stands here"))
    assert f"user_code.py:{line} in hang" in told["sentence"]
    for said in left.said:
        assert told["sentence"] in said
    found = [each for path in left.run.glob("records/*.jsonl") for each in read_records(path)]
    wait_until_gone([each.pid for each in found if isinstance(each, RunRecord)])
