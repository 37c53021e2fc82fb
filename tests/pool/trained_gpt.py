"""A small GPT that ranks have trained for a step, saved with all that a run has; and how to change a manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import MODEL, State, prefixed
from paceline.checkpoint.optimizer import optimizer_shards
from paceline.checkpoint.writer import CheckpointWriter
from paceline.comm.base import Communicator
from paceline.data.order import ConsumedIds, DataOrder
from paceline.engines.apply import parallelize
from paceline.models.gpt import GPT, gpt_config

LLAMA = {"kind": "gpt", "size": "gpt-nano", "tied": False}
CLASSIC = {
    "kind": "gpt",
    "layers": 2,
    "heads": 4,
    "width": 32,
    "context": 16,
    "norm": "layer",
    "mlp": "gelu",
    "positions": "learned",
    "tied": True,
}
VOCABULARY = 50
ORDER = DataOrder(length=40, global_batch=8, seed=3)

Save = Callable[..., Path]


def make_model(model: dict[str, object]) -> GPT:
    torch.manual_seed(5)
    return GPT(gpt_config(**{name: value for name, value in model.items() if name != "kind"}, vocab_size=VOCABULARY))


def save_trained(comm: Communicator, folder: Path, strategy: str, model: dict[str, object], step: int = 7) -> None:
    """Trains for a step, and saves with all that a run has."""
    engine = parallelize(make_model(model), comm, strategy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, 16))
    logits = engine(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    held = list(engine.shards())
    tensors, found = optimizer_shards(optimizer, held)
    ids, batches = ConsumedIds(ORDER), ORDER.batches(0)
    for _ in range(step):
        batch = next(batches)
        ids.note(batch.position, batch.next_position, batch.indices)
    config = {"model": model, "data": {"seed": None, "shuffle": True}, "train": {"seed": 3}, "checkpoint": {"keep": 2}}
    state = State(
        step=step,
        position=batch.next_position,
        shards=[*prefixed(MODEL, held), *tensors],
        values={
            "consumed": ids.state_dict(),
            "data": {"length": ORDER.length, "global_batch": ORDER.global_batch},
            "metrics": {"step": step, "eval_loss": 0.5},
        },
        own={"random": [comm.rank, torch.arange(3)]},
        found=found,
        about={"strategy": strategy, "mesh": {"pipeline": 1, "tensor": 1}, "config": config, "reason": "steps"},
    )
    CheckpointWriter(folder, comm).save(state)


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a checkpoint's manifest, and signs it as if it had been meant so; whatever ``change`` makes of it."""
    file = path / "manifest.json"
    found = json.loads(file.read_text())
    found.pop("sha256")
    change(found)
    body = json.dumps(found)[:-1]
    file.unlink()  # it may be a link to the bytes of another one
    file.write_text(body + f',\n  "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n')


def rehash(path: Path, name: str) -> None:
    """Makes the manifest agree with a file that was changed."""
    content = (path / name).read_bytes()
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change_manifest(path, lambda found: found["files"].update({name: entry}))
