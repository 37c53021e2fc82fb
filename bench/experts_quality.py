"""A dense GPT beside mixtures of experts with as many active weights: python bench/experts_quality.py --output FILE.

All train on the same batches of text in one process with one thread, and take turns. A token of each is multiplied with
as many weights; the mixtures hold more of them. Losses are those of the evaluation set,

    after the same steps        of the dense model and of each mixture
    after the same time         the dense model goes on until it has had as long as each mixture

Time is the steps times what one took, in the median of turns: that of the processor, which other work on the machine
slows down less than the clock. On a GPU (``--device cuda``) it is the clock's, and the first turn of each model, in
which it is compiled, is not among those that are timed. Evaluations are not either. The rate is constant after its
warm-up, so that a loss does not depend on how long a run was meant to be.

An arm is ``dense``, a name of ``ROUTERS``, or keys of ``model.router``, such as ``scale=2 balance_weight=0.001``.

The text of the config, the topics of Python's help, is short: ``--modules`` adds what ``help()`` shows of each module
of the standard library, ten times as much.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import pydoc
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import torch
import yaml

from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, load_config
from paceline.models.balance import take_loads
from paceline.train.assemble import build_trainer
from paceline.train.trainer import Trainer
from paceline_bench.timing import BenchRecord

CONFIG = Path(__file__).parents[1] / "configs" / "gpt_moe.yaml"
_PLAIN = ("parallel.ranks=1", "parallel.expert=1", "train.eval_every=null", "optim.schedule.kind=constant")
DENSE = "dense"
_EXPERT_KEYS = ("experts", "active", "expert_width", "router")
ROUTERS = {
    "auxiliary loss": {},
    "bias": {"balance": "bias", "balance_weight": 0.001},
    "no balance": {"balance": "none"},
}


def _now(on_gpu: bool) -> float:
    """Returns the seconds of the processor, or of the clock when a GPU has done its work."""
    if not on_gpu:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(slots=True)
class Arm:
    """One model in training, with the losses of its evaluations by step."""

    trainer: Trainer
    losses: dict[int, float] = field(default_factory=dict)
    busiest: float = 0.0  # load of the busiest expert over the fair share, in the last turn; mean over layers
    paces: list[float] = field(default_factory=list)  # seconds of a step, of each turn

    @property
    def step_s(self) -> float:
        return median(self.paces) if self.paces else 0.0

    def run(self, steps: int) -> None:
        """Trains on, and evaluates, which is not timed."""
        take_loads(self.trainer.parts.engine.module)
        on_gpu = torch.cuda.is_initialized()
        start, going = _now(on_gpu), self.trainer.steps()
        for _ in range(steps):
            next(going)
        going.close()
        if self.losses or not on_gpu:
            self.paces.append((_now(on_gpu) - start) / steps)
        loads = [each.choices.double() for each in take_loads(self.trainer.parts.engine.module).values()]
        self.busiest = sum(float(each.max() / each.mean()) for each in loads) / max(1, len(loads))
        found = self.trainer.evaluate()
        assert found is not None
        self.losses[self.trainer.step] = found.loss
        done = f"step {self.trainer.step}, {1e3 * self.step_s:.2f} ms each: {found.loss:.4f}"
        print(f"{self.trainer.parts.engine.num_parameters:,} parameters, {done}", file=sys.stderr)


def make_arms(config: Config, names: list[str], device: str = "cpu") -> dict[str, Arm]:
    """Makes the models by name: ``dense`` has MLPs as wide as the active experts together."""
    shape = config.model
    made = {}
    for name in names:
        model: dict[str, Any] = shape.model_dump(exclude_unset=True)
        if name == DENSE:
            model["mlp_width"] = shape.active * shape.expert_width
            model = {key: value for key, value in model.items() if key not in _EXPERT_KEYS}
        else:
            model["router"] = ROUTERS[name] if name in ROUTERS else _keys(name)
        changed = Config.model_validate({**config.model_dump(exclude_unset=True), "model": model})
        made[name] = Arm(build_trainer(changed, SoloCommunicator(torch.device(device))))
    return made


def _keys(words: str) -> dict[str, Any]:
    """Returns the keys of ``model.router`` that an arm names."""
    pairs = (each.partition("=") for each in words.split())
    return {key: yaml.safe_load(value) for key, _, value in pairs}


def compare(arms: dict[str, Arm], steps: int, every: int) -> list[dict[str, Any]]:
    """Trains all for as many steps, in turns; the dense one for as long as each mixture besides."""
    for _ in range(0, steps, every):
        for arm in arms.values():
            arm.run(every)
    dense, plan = arms[DENSE], arms[DENSE].trainer.parts.plan
    paces = {name: arm.step_s for name, arm in arms.items()}  # of the turns that they took together
    in_same_time = {}
    for name in sorted(paces, key=lambda name: paces[name]):
        asked = math.ceil(steps * paces[name] / paces[DENSE])
        if asked > dense.trainer.step:
            dense.run(asked - dense.trainer.step)
        in_same_time[name] = dense.trainer.step
    rows = []
    for name, arm in arms.items():
        row = {
            "arm": name,
            "parameters": arm.trainer.parts.engine.num_parameters,
            "steps": steps,
            "epochs": round(steps * plan.batch.global_batch / plan.train_samples, 2),
            "loss": round(arm.losses[steps], 4),
            "step_ms": round(1e3 * paces[name], 3),
            "train_s": round(steps * paces[name], 1),
            "busiest_expert": round(arm.busiest, 3),
            "losses": {step: round(loss, 4) for step, loss in arm.losses.items()},
        }
        if arm is not dense:
            longer = in_same_time[name]
            row |= {"dense_steps_in_same_time": longer, "dense_loss_in_same_time": round(dense.losses[longer], 4)}
        rows.append(row)
    return rows


def documentation() -> str:
    """Returns the topics of Python's help, and what it shows of the modules of the standard library, in ASCII."""
    texts = [topics[name] for name in sorted(topics)]
    for name in sorted(sys.stdlib_module_names - {"antigravity", "idlelib", "this", "turtledemo"}):
        # Some are of other systems, some need a screen, and some print what they are.
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            texts.append(pydoc.plain(pydoc.render_doc(importlib.import_module(name))))
    return "\n\n".join(texts).encode("ascii", "replace").decode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a dense GPT with mixtures of experts.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=50, help="steps of a turn")
    parser.add_argument("--arms", default=",".join((DENSE, *ROUTERS)))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--modules", action="store_true", help="train on the documentation of all modules")
    parser.add_argument("--output", type=Path, help="else the record is printed alone")
    parser.add_argument("changes", nargs="*", help="of the config: key=value")
    asked = parser.parse_args()
    names = asked.arms.split(",")
    if DENSE not in names:
        parser.error(f"--arms {asked.arms}: the others are compared with {DENSE}; add it")
    if asked.steps % asked.every or (asked.device == "cuda" and asked.steps == asked.every):
        turns = "turns, and on a GPU the first is not timed" if asked.device == "cuda" else "turns"
        parser.error(f"--steps {asked.steps} with --every {asked.every}: a run has whole {turns}")
    torch.set_num_threads(1)
    if asked.device == "cuda":  # the models share their code, of which torch compiles so many versions and no more
        compiler: Any = torch._dynamo.config
        compiler.cache_size_limit = max(compiler.cache_size_limit, 4 * len(names))
    most = f"train.steps={100 * asked.steps}"
    with tempfile.TemporaryDirectory() as folder:
        texts = []
        if asked.modules:
            (Path(folder) / "documentation.txt").write_text(documentation())
            texts = [f"data.path={folder}/documentation.txt"]
        config = load_config(CONFIG, [*_PLAIN, most, *texts, *asked.changes])
        rows = compare(make_arms(config, names, asked.device), asked.steps, asked.every)
    given = {
        "config": CONFIG.name,
        "device": asked.device,
        "modules": asked.modules,
        "changes": asked.changes,
        "steps": asked.steps,
        "every": asked.every,
    }
    command = " ".join(["python", *sys.argv])
    record = BenchRecord(name="quality of experts", command=command, rows=rows, config=given)
    if asked.output is not None:
        record.write(asked.output)
    print(record.to_json())


if __name__ == "__main__":
    main()
