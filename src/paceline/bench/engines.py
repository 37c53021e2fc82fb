"""Our data parallelism beside torch's, and beside the plain loop at world size 1.

Every arm trains the same model on the same batch with the same optimizer; the arms take turns in one run, over the same
process group. World size 1 is the cost of the engine itself; two ranks add bucketing, overlap and the wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.interleave import Timing, interleave
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.launch.processes import run_processes
from paceline.models.gpt import GPT, gpt_config
from paceline.models.mlp import MLPClassifier
from paceline.parallel.apply import parallelize

Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and a batch that all arms train on. ``tokens`` is a batch's tokens or samples, for throughput."""

    model: str
    batch: int
    context: int = 0

    @property
    def items(self) -> int:
        """Samples or tokens of a batch."""
        return self.batch * max(self.context, 1)

    def make_model(self, device: torch.device) -> nn.Module:
        """Builds the model with fixed weights."""
        torch.manual_seed(0)
        if self.model == "mlp":
            return MLPClassifier(784, 512, 10, dropout=0.0).to(device)
        with device:
            return GPT(gpt_config(self.model, dropout=0.0))

    def make_batch(self, device: torch.device, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes a rank's batch."""
        generator = torch.Generator().manual_seed(rank)
        if self.model == "mlp":
            inputs = torch.randn(self.batch, 784, generator=generator)
            return inputs.to(device), torch.randint(0, 10, (self.batch,), generator=generator).to(device)
        vocab = gpt_config(self.model).vocab_size
        tokens = torch.randint(0, vocab, (self.batch, self.context + 1), generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How long the arms take turns."""

    rounds: int
    steps_per_turn: int
    warm_up: int


CPU_WORKLOADS = {
    "mlp": (Workload(model="mlp", batch=64), Protocol(rounds=40, steps_per_turn=20, warm_up=10)),
    "gpt-11m": (Workload(model="gpt-11m", batch=4, context=128), Protocol(rounds=12, steps_per_turn=2, warm_up=3)),
}
CUDA_WORKLOADS = {
    "gpt-124m": (Workload(model="gpt-124m", batch=32, context=1024), Protocol(rounds=12, steps_per_turn=5, warm_up=6)),
    "gpt-1.1b": (Workload(model="gpt-1.1b", batch=8, context=2048), Protocol(rounds=12, steps_per_turn=4, warm_up=6)),
}


def bench_ranks(workload: Workload, protocol: Protocol, ranks: int) -> list[dict[str, Any]]:
    """Times ours against torch DDP on real Gloo ranks with one thread each."""
    timings = run_processes(_time_ranks, ranks, args=(workload, protocol), threads=1)[0]
    return [_row(workload, timing, ranks, "gloo") for timing in timings]


def bench_alone(workload: Workload, protocol: Protocol, device: torch.device) -> list[dict[str, Any]]:
    """Times ours against the plain loop at world size 1: in a process of its own with one thread on a CPU."""
    if device.type == "cuda":
        timings = _time_alone(SoloCommunicator(device), workload, protocol)
    else:
        timings = run_processes(_time_alone, 1, args=(workload, protocol), threads=1)[0]
    return [_row(workload, timing, 1, "none") for timing in timings]


def _time_ranks(comm: Communicator, workload: Workload, protocol: Protocol) -> list[Timing]:
    device = comm.device
    batch = workload.make_batch(device, comm.rank)
    engine = parallelize(workload.make_model(device), comm)
    torch_ddp = DistributedDataParallel(workload.make_model(device))
    torch_view = DistributedDataParallel(workload.make_model(device), gradient_as_bucket_view=True)
    arms = {
        "paceline ddp": _loop(engine, list(engine.parameters()), batch),
        "torch ddp": _loop(torch_ddp, list(torch_ddp.parameters()), batch),
        "torch ddp, gradient_as_bucket_view": _loop(torch_view, list(torch_view.parameters()), batch),
    }
    return interleave(arms, baseline="torch ddp", device=device, meet=comm.barrier, **dataclasses.asdict(protocol))


def _time_alone(comm: Communicator, workload: Workload, protocol: Protocol) -> list[Timing]:
    device = comm.device
    is_cuda = device.type == "cuda"
    batch = workload.make_batch(device, 0)
    plain = workload.make_model(device)
    if is_cuda:
        plain.compile()
    engine = parallelize(workload.make_model(device), comm, compile_blocks=is_cuda)
    arms = {
        "plain loop": _loop(plain, list(plain.parameters()), batch),
        "paceline ddp": _loop(engine, list(engine.parameters()), batch, clip=engine.clip_grad_norm_),
    }
    if is_cuda:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        peer = torch.compile(DistributedDataParallel(workload.make_model(device), device_ids=[device.index]))
        arms["torch ddp"] = _loop(peer, list(peer.parameters()), batch)  # type: ignore[attr-defined]
    timings = interleave(arms, baseline="plain loop", device=device, **dataclasses.asdict(protocol))
    if is_cuda:
        dist.destroy_process_group()
    return timings


def _loop(
    model: Callable[..., Any],
    parameters: list[nn.Parameter],
    batch: tuple[torch.Tensor, torch.Tensor],
    clip: Callable[[float], Any] | None = None,
) -> Step:
    """Returns one training step: forward, backward, clip, update; bf16 autocast on CUDA."""
    inputs, targets = batch
    is_cuda = inputs.device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    clip = clip or (lambda norm: nn.utils.clip_grad_norm_(parameters, norm))

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_cuda):
            logits = model(inputs)
            loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _row(workload: Workload, timing: Timing, ranks: int, backend: str) -> dict[str, Any]:
    row = dataclasses.asdict(timing)
    per_second = workload.items * ranks / (timing.median_ms / 1e3)
    return {
        "model": workload.model,
        "ranks": ranks,
        "backend": backend,
        "batch_per_rank": workload.batch,
        "context": workload.context,
        **{name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()},
        "items_per_s": round(per_second, 1),
    }
