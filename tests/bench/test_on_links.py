"""Engines of ours and of torch beside one another, as one of many ranks whose links are emulated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.cluster.devices import load_cluster
from paceline.comm.emulated.communicator import EmulatedWorld, Fabric
from paceline_bench.arms import BenchWorkload, arms_on_links
from paceline_bench.emulated_group import emulated_group
from paceline_bench.on_links import bench_on_links
from paceline_bench.timing import Turns

CPU = torch.device("cpu")
SMALL = BenchWorkload(model="gpt-nano", batch=1, context=8)


def test_arms_send_what_their_strategy_says() -> None:
    words = ("torch ddp", "paceline zero2", "torch fsdp2 bf16_master, kept", "paceline fsdp")
    turns = Turns(rounds=2, steps_per_turn=1, warm_up=2)
    rows = bench_on_links(SMALL, turns, load_cluster("1x dgx-h100"), 8, CPU, words, compiled=False)
    found = {row["arm"]: row for row in rows}
    assert {
        "torch ddp bf16",
        "torch fsdp2 bf16_master",
        *(name for name in found if "paceline" in name),
    } <= found.keys()
    params = sum(each.numel() for each in SMALL.make_model(CPU).parameters())
    # DDP reduces gradients of fp32; ZeRO scatters them and gathers bf16; FSDP2 gathers once where it keeps what it has.
    assert found["torch ddp bf16"]["bytes"] == pytest.approx(4 * params, rel=0.01)
    assert found["paceline zero2 bf16_master"]["bytes"] == pytest.approx(6 * params, rel=0.02)
    assert found["torch fsdp2 bf16_master, kept"]["bytes"] == pytest.approx(6 * params, rel=0.02)
    for row in rows:
        assert (row["ranks"], row["backend"], row["loss"]) == (8, "emulated", None)
        assert row["ratio"] > 0
        assert row["on_wires_ms"] > 0
        assert (row["group_host_ms"] > 0) == ("torch" in row["arm"])  # ours have no process group
    assert not dist.is_initialized()


def test_every_arm_has_a_peer_of_its_set() -> None:
    sets = {arm.name: arm.set for arm in arms_on_links()}
    assert all(sets[arm.peer] == arm.set for arm in arms_on_links())


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names that torch 2.11 does not have otherwise
def test_the_group_of_torch_answers_as_equal_ranks_would() -> None:
    comm = EmulatedWorld(4, Fabric(lambda *_: 0.0, CPU, node_ranks=4)).rank(0)
    with emulated_group(comm):
        tensor = torch.tensor([2.0])
        dist.all_reduce(tensor)
        assert tensor.item() == 8.0
        pieces = [torch.empty(1) for _ in range(4)]
        dist.all_gather(pieces, tensor)
        assert torch.cat(pieces).tolist() == [8.0] * 4
        whole, piece = torch.empty(8), torch.empty(2)
        dist.all_gather_into_tensor(whole, torch.tensor([1.0, 2.0]))
        dist.reduce_scatter_tensor(piece, whole, op=dist.ReduceOp.AVG)
        assert piece.tolist() == [1.0, 2.0]
        dist.broadcast(tensor, 3)
        dist.barrier()
        assert dist.get_world_size() == 4
