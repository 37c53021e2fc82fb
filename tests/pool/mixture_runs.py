"""Small runs of a GPT with experts whose routers are made to choose as a test wants, and their real records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.models.experts import Mixture
from paceline.records.records import Record, read_records
from paceline.records.sinks import JsonlSink
from paceline.run.records import end_record, records_path, write_start
from paceline.train.assemble import build_trainer

EXPERTS = 8
Force = Callable[[nn.Module], None]


def mixture_config(ranks: int = 1, **changes: Mapping[str, Any]) -> Config:
    values: dict[str, Any] = {
        "name": "mixture",
        "model": {"kind": "gpt", "size": "gpt-nano", "layers": 2, "width": 32, "mlp_width": 32}
        | {"experts": EXPERTS, "active": 2},
        "data": {"kind": "synthetic_tokens", "vocab_size": 64, "context": 64, "samples": 64, "eval_fraction": 0.0},
        "train": {"steps": 20, "global_batch": 8},
        "optim": {"lr": 1e-3},
        "monitor": {"log_every": 2},
        "parallel": {"ranks": ranks},
    }
    for section, content in changes.items():
        values[section] = values.get(section, {}) | dict(content)
    return config_from_dict(values)


def train_mixture(
    folder: Path, config: Config | None = None, *, ranks: int = 1, force: Force | None = None
) -> list[list[Record]]:
    """Trains on virtual ranks; returns the records that each wrote into the folder of a run."""
    chosen = config or mixture_config(ranks)

    def run(comm: Communicator) -> list[Record]:
        path = records_path(folder, comm.rank)
        with contextlib.closing(JsonlSink(path)) as sink:
            trainer = build_trainer(chosen, comm, sink=sink)
            if force is not None:
                with torch.no_grad():
                    force(trainer.parts.engine.module)
            write_start(chosen, comm, trainer)
            trainer.run()
            sink.write(end_record("done", trainer.step, 1.0))
        return list(read_records(path))

    return run_virtual(run, ranks)


def prefer(*experts: int, by: float = 30.0, layer: int = 0) -> Force:
    """Has the router of a layer choose among these experts alone, by a feature of the stream that all tokens share."""

    def force(model: nn.Module) -> None:
        model.token_embedding.weight.mul_(50.0)
        model.token_embedding.weight[:, 0] = 2.0
        mixture = model.layers[layer].mlp
        assert isinstance(mixture, Mixture)
        mixture.router.weight.mul_(20.0)
        mixture.router.weight[:, 0] = -by
        mixture.router.weight[list(experts), 0] = by

    return force
