"""Virtual ranks that share one GPU: the values of the CPU, random streams of their own, and waits inside backward."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.errors import RankFailedError, StuckRankError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def every_verb(comm: VirtualCommunicator) -> list[list[float]]:
    device, size = comm.device, comm.size
    whole = torch.arange(2.0 * size, device=device) * (comm.rank + 1)
    piece, gathered, exchanged = (torch.empty(n, device=device) for n in (2, 2 * size, 2 * size))
    told, got = whole.clone(), torch.empty(2 * size, device=device)
    comm.reduce_scatter(piece, whole, "avg").wait()
    comm.all_gather(gathered, whole[:2]).wait()
    comm.all_to_all(exchanged, whole).wait()
    comm.broadcast(told, source=size - 1).wait()
    sent = comm.send(whole, to=(comm.rank + 1) % size)
    comm.recv(got, source=(comm.rank - 1) % size).wait()
    sent.wait()
    comm.all_reduce(whole, "max").wait()
    return [tensor.tolist() for tensor in (piece, gathered, exchanged, told, got, whole)]


def test_every_verb_gives_what_it_gives_on_the_cpu() -> None:
    assert run_virtual(every_verb, 3, device="cuda") == run_virtual(every_verb, 3, device="cpu")


def test_every_rank_draws_what_a_lone_process_draws() -> None:
    def work(comm: VirtualCommunicator) -> list[float]:
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(1, device=comm.device).item(), torch.rand(1).item()]
            comm.barrier()
        return drawn

    torch.manual_seed(1)
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    found = run_virtual(work, 3, device="cuda", seed=7)
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    torch.manual_seed(7)
    lone = []
    for _ in range(3):
        lone += [torch.rand(1, device="cuda").item(), torch.rand(1).item()]
    assert found == [lone] * 3


def test_a_rank_may_wait_inside_a_backward_hook() -> None:
    def work(comm: VirtualCommunicator) -> list[float]:
        layers = [torch.nn.Parameter(torch.full((2,), i + 1.0, device=comm.device)) for i in range(3)]
        for layer in layers:
            layer.register_post_accumulate_grad_hook(lambda p: comm.all_reduce(p.grad, "avg").wait())
        x = torch.ones(2, device=comm.device) * (comm.rank + 1)
        for layer in layers:
            x = x * layer
        x.sum().backward()
        return [value for layer in layers if layer.grad is not None for value in layer.grad.tolist()]

    assert run_virtual(work, 3, device="cuda") == [[12.0, 12.0, 6.0, 6.0, 4.0, 4.0]] * 3


@pytest.mark.parametrize(("fails", "error"), [(True, RankFailedError), (False, StuckRankError)])
def test_a_rank_that_never_comes_is_told_to_those_inside_backward(fails: bool, error: type[Exception]) -> None:
    def work(comm: VirtualCommunicator) -> None:
        parameter = torch.nn.Parameter(torch.ones(2, device=comm.device))

        def hook(p: torch.nn.Parameter) -> None:
            if comm.rank != 1:
                comm.all_reduce(p.grad).wait()
            elif fails:
                raise ValueError("in the hook")

        parameter.register_post_accumulate_grad_hook(hook)
        parameter.sum().backward()

    with pytest.raises(error):
        run_virtual(work, 3, device="cuda", timeout_s=10_000)
