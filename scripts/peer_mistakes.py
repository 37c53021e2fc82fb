"""What torch FSDP2 and Accelerate do with ordinary mistakes in training loops, on two Gloo ranks of this CPU.

    python scripts/peer_mistakes.py                    # FSDP2, and Accelerate where it is installed
    python scripts/peer_mistakes.py fsdp2 clip         # one of them

Each mistake runs in two processes of its own; what does not end within 20 s is a hang. One line each:
``peer mistake: outcome (what was seen)``. docs/mistakes.md keeps the outcomes.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LIMIT_S = 20.0


class Net(nn.Module):
    """Two linear layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.second(self.first(inputs).tanh())


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    inputs = torch.randn(samples, 6)
    return inputs, torch.arange(samples) % 3


def mine() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch()
    rank = dist.get_rank()
    return inputs[rank * 4 : rank * 4 + 4], targets[rank * 4 : rank * 4 + 4]


def loss_of(model: Any) -> torch.Tensor:
    inputs, targets = mine()
    return F.cross_entropy(model(inputs), targets)


class Fsdp2:
    """torch's fully_shard."""

    def wrap(self, model: nn.Module, optimizer: Any = None) -> tuple[Any, Any]:
        """Returns the sharded model; FSDP2 has no way to take an optimizer over."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for module in (*model.children(), model):  # block by block, as its tutorial does
            fully_shard(module, mesh=mesh)
        return model, optimizer

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Accelerated:
    """Accelerate with its default, torch DDP on CPUs."""

    def __init__(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)

    def wrap(self, model: nn.Module, optimizer: Any = None) -> tuple[Any, Any]:
        """Returns what ``prepare`` makes of both."""
        if optimizer is None:
            return self.accelerator.prepare(model), None
        return tuple(self.accelerator.prepare(model, optimizer))  # type: ignore[return-value]

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)


def whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach()


def truth() -> nn.Module:
    model = Net()
    inputs, targets = batch()
    F.cross_entropy(model(inputs), targets).backward()
    return model


def optimizer_before(peer: Any) -> str:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped, _ = peer.wrap(model)
    before = [whole(p).clone() for p in wrapped.parameters()]
    peer.backward(loss_of(wrapped))
    optimizer.step()
    has_moved = any(not torch.equal(a, whole(b)) for a, b in zip(before, wrapped.parameters(), strict=True))
    return f"{'right' if has_moved else 'silent'} (parameters {'moved' if has_moved else 'stay as they are'})"


def clip(peer: Any) -> str:
    wrapped, _ = peer.wrap(Net())
    peer.backward(loss_of(wrapped))
    norm = float(whole(nn.utils.clip_grad_norm_(wrapped.parameters(), 1e9)))
    true = float(nn.utils.get_total_norm([p.grad for p in truth().parameters() if p.grad is not None]))
    return f"{'right' if math.isclose(norm, true, rel_tol=1e-5) else 'silent'} (norm {norm:.4f}, true {true:.4f})"


def run_twice(peer: Any) -> str:
    """One module is run twice before one backward pass."""
    wrapped, _ = peer.wrap(Net())
    inputs, targets = mine()
    peer.backward(F.cross_entropy(wrapped(inputs) + wrapped(-inputs), targets))
    model = Net()
    everything, labels = batch()
    F.cross_entropy(model(everything) + model(-everything), labels).backward()
    return same_gradients(wrapped, model)


def same_gradients(wrapped: Any, model: nn.Module) -> str:
    pairs = list(zip(wrapped.parameters(), model.parameters(), strict=True))
    error = max(float((whole(a.grad) - b.grad).abs().max()) for a, b in pairs if b.grad is not None)
    return f"{'right' if error < 1e-5 else 'silent'} (gradients differ by {error:.1e})"


def accumulation(peer: Any) -> str:
    """Two microbatches of three samples and one, each with its mean loss divided by two, as docs show it."""
    wrapped, _ = peer.wrap(Net())
    inputs, targets = mine()
    for part in (slice(0, 3), slice(3, 4)):
        peer.backward(F.cross_entropy(wrapped(inputs[part]), targets[part]) / 2)
    return same_gradients(wrapped, truth())


def validates_alone(peer: Any) -> str:
    wrapped, _ = peer.wrap(Net())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(3):
        peer.backward(loss_of(wrapped))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with torch.no_grad():
                wrapped(batch()[0])
    return "right (all steps done)"


def breaks_early(peer: Any) -> str:
    wrapped, _ = peer.wrap(Net())
    for step in range(4):
        if dist.get_rank() == 1 and step == 2:
            break
        peer.backward(loss_of(wrapped))
    return "right (all steps done)"


def saves_alone(peer: Any) -> str:
    wrapped, _ = peer.wrap(Net())
    peer.backward(loss_of(wrapped))
    sizes = 0
    if dist.get_rank() == 0:
        state = wrapped.state_dict()
        sizes = sum(v.to_local().numel() if hasattr(v, "to_local") else v.numel() for v in state.values())
    peer.backward(loss_of(wrapped))
    total = sum(p.numel() for p in Net().parameters())
    is_whole = sizes == total or dist.get_rank() == 1
    return f"{'right' if is_whole else 'silent'} (rank 0 has {sizes} of {total} numbers)"


def other_seeds(peer: Any) -> str:
    wrapped, _ = peer.wrap(Net(seed=dist.get_rank()))
    values = torch.cat([whole(p).flatten() for p in wrapped.parameters()])
    first = torch.cat([p.detach().flatten() for p in Net().parameters()])
    is_first = torch.equal(values, first)
    return f"{'right' if is_first else 'silent'} (parameters are{'' if is_first else ' not'} rank 0's)"


def average(peer: Any) -> str:
    wrapped, _ = peer.wrap(Net())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(wrapped)
    for _ in range(2):
        peer.backward(loss_of(wrapped))
        optimizer.step()
        averaged.update_parameters(wrapped)
    return "right (updated)"


def scaler(peer: Any) -> str:
    """One rank's gradient is not finite: either all ranks skip the step, or none."""
    wrapped, _ = peer.wrap(Net())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scale = torch.amp.GradScaler("cpu", init_scale=4.0)
    scale.scale(loss_of(wrapped)).backward()
    first = next(wrapped.parameters()).grad
    local = first.to_local() if hasattr(first, "to_local") else first
    if dist.get_rank() == 1 and hasattr(first, "to_local"):
        local.view(-1)[0] = math.inf
    scale.step(optimizer)
    scale.update()
    scales = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(scales, torch.tensor([scale.get_scale()]))
    is_same = bool(scales[0] == scales[1])
    return f"{'right' if is_same else 'silent'} (scales {scales[0].item():g} and {scales[1].item():g})"


def copied(peer: Any) -> str:
    wrapped, _ = peer.wrap(Net())
    twin = copy.deepcopy(wrapped)
    with torch.no_grad():
        error = float((twin(batch()[0]) - Net()(batch()[0])).abs().max())
    return f"{'right' if error < 1e-5 else 'silent'} (outputs differ by {error:.1e})"


def matrixwise(peer: Any) -> str:
    wrapped, _ = peer.wrap(Net())
    model = truth()
    peer.backward(loss_of(wrapped))
    for parameters in (wrapped.parameters(), model.parameters()):
        torch.optim.Adafactor(parameters, lr=0.1).step()
    pairs = zip(wrapped.parameters(), model.parameters(), strict=True)
    error = max(float((whole(a) - b.detach()).abs().max()) for a, b in pairs)
    return f"{'right' if error < 1e-5 else 'silent'} (parameters differ by {error:.1e})"


MISTAKES: dict[str, Callable[[Any], str]] = {
    "optimizer_before": optimizer_before,
    "clip": clip,
    "run_twice": run_twice,
    "accumulation": accumulation,
    "validates_alone": validates_alone,
    "breaks_early": breaks_early,
    "saves_alone": saves_alone,
    "other_seeds": other_seeds,
    "average": average,
    "scaler": scaler,
    "copied": copied,
    "matrixwise": matrixwise,
}
PEERS: dict[str, Callable[[], Any]] = {"fsdp2": Fsdp2, "accelerate": Accelerated}


def run_rank(peer: str, mistake: str, rank: int, port: int, told: Connection) -> None:
    """Makes the mistake on this rank, and says what came of it."""
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**names, "MASTER_PORT": str(port)})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        said = MISTAKES[mistake](PEERS[peer]())
    except Exception as error:
        said = f"error ({type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''})"
    told.send(said)
    os._exit(0)


def outcome(peer: str, mistake: str) -> str:
    """Returns what both ranks said, or that they hang. They are forked, as loading torch takes longer than all else."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=run_rank, args=(peer, mistake, rank, port, pipe[1])) for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + LIMIT_S
    said = []
    for number, (process, (reader, _)) in enumerate(zip(ranks, pipes, strict=True)):
        while not reader.poll(0.05) and process.is_alive() and time.monotonic() < until:
            pass
        silence = f"hang (after {LIMIT_S:g} s)" if process.is_alive() else f"died (exit code {process.exitcode})"
        said.append(f"rank {number}: {reader.recv() if reader.poll() else silence}")
    for process in ranks:
        process.kill()
        process.join()
    return "; ".join(said)


def main() -> None:
    """Runs what is asked for."""
    installed = [name for name in PEERS if name == "fsdp2" or importlib.util.find_spec(name)]
    for peer in sys.argv[1:2] or installed:
        for mistake in sys.argv[2:] or MISTAKES:
            print(f"{peer} {mistake}: {outcome(peer, mistake)}", flush=True)


if __name__ == "__main__":
    main()
