"""What a save and a load cost: nothing is gathered, nothing is copied twice, and only what is needed is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from gloo_pool import GlooPool
from torch import nn

from paceline import checkpoint
from paceline.checkpoint import CheckpointWriter, State, open_checkpoint
from paceline.checkpoint.manifest import MODEL, prefixed
from paceline.checkpoint.storage import LocalFiles
from paceline.checkpoint.tensors import CHUNK_BYTES, Stream, file_chunks, tensor_chunks
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.shards import Region, Shard, whole_region

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def test_chunks_are_views_of_the_tensors() -> None:
    """Beside the tensors a save on the host takes no memory."""
    flat = torch.zeros(CHUNK_BYTES // 4 + 1000)
    stream = Stream(name="w", region=whole_region((len(flat),)), dtype=flat.dtype, read=lambda: tensor_chunks(flat))
    header, *chunks = file_chunks([stream])
    assert len(bytes(header)) < 200
    places = [np.frombuffer(chunk, dtype=np.uint8).ctypes.data - flat.data_ptr() for chunk in chunks]
    assert places == [0, CHUNK_BYTES]
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, 4000]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("in_background", [False, True])
def test_ranks_exchange_no_tensors(tmp_path: Path, strategy: str, in_background: bool) -> None:
    """A token at the start, and a word whether it worked: some hundred bytes."""

    def work(comm: Communicator) -> tuple[int, int]:
        trace = Trace(CPU)
        traced = TracedCommunicator(comm, trace)
        engine = parallelize(make_model(), traced, strategy)
        number, size = trace.num_operations.total(), trace.num_bytes.total()
        writer = CheckpointWriter(tmp_path, traced)
        writer.save(State(step=1, position=0, shards=prefixed(MODEL, engine.shards())), in_background=in_background)
        writer.finish()
        return trace.num_operations.total() - number, trace.num_bytes.total() - size

    for number, num_bytes in run_virtual(work, 2):
        assert 0 < number <= 10
        assert num_bytes < 2000


def test_a_rank_reads_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a tensor in flat pieces, and half of its columns."""
    values = torch.arange(512.0 * 1024).view(512, 1024)
    comm = SoloCommunicator(CPU)
    shard = Shard(name="w", region=whole_region(values.shape), tensor=values)
    path = CheckpointWriter(tmp_path, comm).save(State(step=1, position=0, shards=[shard]))
    found = open_checkpoint(path)
    found.read("w", whole_region(values.shape).narrow(0, 1))  # the header is read once
    read: list[int] = []
    read_into = LocalFiles.read_into

    def counted(self: LocalFiles, path: Path, spans: Iterable[tuple[int, memoryview]]) -> None:
        kept = list(spans)
        read.extend(len(buffer) for _, buffer in kept)
        read_into(self, path, kept)

    monkeypatch.setattr(LocalFiles, "read_into", counted)
    quarter = whole_region(values.shape).narrow(1000, 1000 + values.numel() // 4)
    assert torch.equal(found.read("w", quarter), values.view(-1)[1000 : 1000 + values.numel() // 4])
    assert sum(read) == values.nbytes // 4
    read.clear()
    columns = Region(shape=(512, 1024), cuts=((1, ((256, 768),)),), begin=0, end=512 * 512)
    assert torch.equal(found.read("w", columns).view(512, 512), values[:, 256:768])
    assert sum(read) < values.nbytes  # gaps of a few KB are read with what is around them


def test_a_tensor_of_another_dtype_or_order_is_filled_too(tmp_path: Path) -> None:
    values = torch.randn(4, 6, 5, 3)
    shard = Shard(name="w", region=whole_region(values.shape), tensor=values)
    path = CheckpointWriter(tmp_path, SoloCommunicator(CPU)).save(State(step=1, position=0, shards=[shard]))
    last = torch.empty(4, 6, 5, 3).to(memory_format=torch.channels_last)
    half = torch.empty(4, 6, 5, 3, dtype=torch.float64)
    holed = torch.empty(4, 6, 5, 6)[..., ::2]
    for target, order in ((last, (0, 2, 3, 1)), (half, None), (holed, None)):
        region = whole_region(values.shape, order)
        open_checkpoint(path).fill(Shard(name="w", region=region, tensor=target), "w")
        assert torch.equal(target.to(values.dtype), values)


def save_on_real_ranks(comm: Communicator, folder: str) -> dict[str, torch.Tensor]:
    engine = parallelize(make_model(), comm, "fsdp")
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1)
    engine(torch.ones(2, 64) * comm.rank).sum().backward()
    optimizer.step()
    checkpoint.save(folder, engine, optimizer, step=5, extra={"epoch": 2})
    return engine.full_state_dict()


def load_on_real_ranks(comm: Communicator, folder: str) -> tuple[dict[str, torch.Tensor], int, object]:
    engine = parallelize(make_model(), comm, "zero2")
    found = checkpoint.load(folder, engine, torch.optim.AdamW(engine.parameters(), lr=0.1))
    return engine.full_state_dict(), found.step, found.extra


@pytest.mark.exhaustive
def test_real_ranks_save_and_others_load(gloo_pool: GlooPool, tmp_path: Path) -> None:
    saved = gloo_pool.run(save_on_real_ranks, str(tmp_path), ranks=2)[0]
    for loaded, step, extra in gloo_pool.run(load_on_real_ranks, str(tmp_path), ranks=3):
        assert (step, extra) == (5, {"epoch": 2})
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
