"""A loop as users write it, on ranks that some launcher started, in which rank 1 goes wrong in a way that is asked for.

    python -m own_loop STRATEGY FAULT BACKEND TIMEOUT STEP_S

"late update" is the fault "update" near the end of the loop, "first leave" is "leave" on rank 0, and "unwatched hang"
is "hang" where no thread watches the ranks, as on a machine that is too busy to let it. Lines that a verdict is to name
end in ``# stands here: <fault>``.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.nn.functional as F

import paceline

STEPS, BAD_STEP, GUILTY = 40, 12, 1


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1000 * step + rank)
    inputs = torch.randn(4, 8)
    return inputs, inputs.argmax(1) % 4


def train(comm: paceline.Communicator, engine: paceline.Engine, fault: str, step_s: float) -> None:
    """Trains plainly, but for the fault; for 20 s if steps take a while."""
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    when, _, fault = fault.rpartition(" ")
    if when == "unwatched":
        comm.loop._watch.end_thread()  # type: ignore[attr-defined]
    bad_step, guilty = STEPS - 2 if when == "late" else BAD_STEP, 0 if when == "first" else GUILTY
    for step in range(int(20 / step_s) if step_s else STEPS):
        time.sleep(step_s)
        inputs, targets = batch(step, comm.rank)
        is_bad = comm.rank == guilty and step == bad_step
        if is_bad and fault == "step":
            continue
        if is_bad and fault == "leave":
            break
        if is_bad and fault == "validate":
            with torch.no_grad():
                engine(inputs)
        if is_bad and fault == "save":
            engine.state_dict()
        loss = F.cross_entropy(engine(inputs), targets)
        if is_bad and fault == "hang":
            time.sleep(600)  # stands here: hang
        if is_bad and fault == "error":
            raise ValueError("my own mistake")
        if is_bad and fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_bad and fault == "extra":
            comm.broadcast(inputs).wait()  # stands here: extra
        if not (is_bad and fault == "backward"):
            loss.backward()  # stands here: step
        if not (is_bad and fault == "update"):
            optimizer.step()
        optimizer.zero_grad()


def train_unevenly(comm: paceline.Communicator, engine: paceline.Engine, step_s: float) -> None:
    """Does what ranks may do differently: accumulate, skip batches, evaluate, end epochs, sit out, train beside."""
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    other = paceline.parallelize(paceline.MLPClassifier(8, 8, 4), comm, strategy="ddp")
    others = torch.optim.SGD(other.parameters(), lr=1e-3)
    is_gathered = any(engine.flat_groups)  # then all ranks run the module equally often
    alone = torch.nn.Linear(2, 2)
    own = torch.optim.SGD(alone.parameters(), lr=1e-3)
    step = samples = 0
    time.sleep(0.1 * comm.rank * bool(step_s))
    while step < STEPS:
        time.sleep(step_s)
        for index in range(5 + comm.rank):  # epochs of different lengths
            if comm.rank == GUILTY and index == 3:
                continue  # a batch that cannot be read: it is left out, and the step is made with the next one
            for _ in range(1 if is_gathered else comm.rank):  # more microbatches on one rank
                with engine.no_sync():
                    inputs, targets = batch(step, comm.rank)
                    F.cross_entropy(engine(inputs), targets).backward()
            if comm.rank == GUILTY and step == STEPS - 1:
                engine.join_pass()
            else:
                inputs, targets = batch(step, comm.rank)
                F.cross_entropy(engine(inputs), targets).backward()
                samples += len(inputs) - (step == STEPS - 2 and comm.rank)
            optimizer.step()
            optimizer.zero_grad()
            other(inputs).sum().backward()
            others.step()
            if comm.rank == 0:
                own.step()
            if comm.rank == 0 and not is_gathered:
                engine(inputs)  # looks at something, with gradients that nobody needs
            step += 1
            if step % 10 == 0:
                with torch.no_grad():
                    engine(inputs)
            if step == STEPS:
                break


def main() -> None:
    """Runs a rank."""
    strategy, fault, backend, timeout, seconds = sys.argv[1:]
    comm = paceline.connect(backend, timeout_s=float(timeout))  # type: ignore[arg-type]
    torch.manual_seed(0)
    engine = paceline.parallelize(paceline.MLPClassifier(8, 8, 4), comm, strategy=strategy)
    if fault == "none":
        train_unevenly(comm, engine, float(seconds))
    else:
        train(comm, engine, fault, float(seconds))


if __name__ == "__main__":
    main()
