"""What real engines hand over in a step, to be compared with what a dry run says that they do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from paceline.comm.algorithms.communicator import AlgorithmCommunicator
from paceline.comm.algorithms.rounds import state_topology
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import Config, config_batch, layout_of
from paceline.data.loader import StepBatch
from paceline.engines.apply import parallelize
from paceline.train.assemble import build_policy, build_workload
from paceline.train.loss import build_loss
from paceline.train.optim import build_optimizer
from paceline.train.step import train_step


def issued_by_real_ranks(
    config: Config, ranks: int, node_ranks: int | None = None
) -> list[tuple[Counter[str], Counter[str]]]:
    """Trains two steps on virtual ranks, on samples of 16 tokens; returns operations and bytes of the second, by rank.

    ``node_ranks`` is how many ranks share a host; None: all.
    """

    def work(comm: VirtualCommunicator) -> tuple[Counter[str], Counter[str]]:
        made = build_workload(config)
        trace = Trace(comm.device)
        traced: Any = TracedCommunicator(comm, trace)
        if config.comm.algorithm != "native":
            topology = state_topology(ranks, node_ranks or ranks)
            traced = TracedCommunicator(
                AlgorithmCommunicator(traced, config.comm.algorithm, topology), trace, counts=False
            )
        layout = layout_of(config, comm.size, node_ranks)
        engine = parallelize(made.model, traced, layout=layout)
        optimizer = build_optimizer(config.optim, engine.named_parameters())
        batch = config_batch(config, ranks)
        tokens = torch.zeros(batch.microbatch, 16, dtype=torch.long)
        step = StepBatch(
            position=0,
            next_position=0,
            epoch=0,
            global_samples=batch.global_batch,
            microbatches=[(tokens, tokens)] * batch.accumulate,
            local_samples=[batch.microbatch] * batch.accumulate,
        )
        loss = build_loss("auto", made.data.shape)
        for _ in range(2):
            trace.num_operations.clear()
            trace.num_bytes.clear()
            train_step(engine, optimizer, step, loss, build_policy(config))
        return Counter(trace.num_operations), Counter(trace.num_bytes)

    return run_virtual(work, ranks)
