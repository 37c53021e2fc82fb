"""``shard()`` of Hugging Face's data sets and of webdataset's, on virtual and on real ranks; skipped without them."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import paceline
from paceline.errors import DataError

NUMBERS = [100 * part + place for part in range(3) for place in range(9)]
WARNED = "ignore:a batch of an epoch has"


def hugging_face(folder: Path, **options: Any) -> Any:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    datasets.disable_progress_bars()
    for part in range(3):
        rows = [json.dumps({"x": number}) + "\n" for number in NUMBERS[9 * part : 9 * part + 9]]
        (folder / f"part-{part}.jsonl").write_text("".join(rows))
    files = sorted(map(str, folder.glob("*.jsonl")))
    return datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "cache"), **options)


def tar_files(folder: Path) -> list[str]:
    for part in range(3):
        with tarfile.open(folder / f"part-{part}.tar", "w") as tar:
            for number in NUMBERS[9 * part : 9 * part + 9]:
                about = tarfile.TarInfo(f"{number:06d}.cls")
                about.size = len(str(number))
                tar.addfile(about, io.BytesIO(str(number).encode()))
    return sorted(map(str, folder.glob("*.tar")))


def _named(sample: tuple[int]) -> dict[str, int]:
    return {"x": sample[0]}


def web(folder: Path, *, shuffles: bool = False, **options: Any) -> Any:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    kept = {"shardshuffle": 3 if shuffles else False, "nodesplitter": iter, **options}
    found = wds.WebDataset(tar_files(folder), **kept)
    return (found.shuffle(10, seed=options.get("seed")) if shuffles else found).decode().to_tuple("cls").map(_named)


STREAMS: dict[str, Callable[[Path], Any]] = {
    "streaming": lambda folder: hugging_face(folder, streaming=True),
    "streaming, shuffled": lambda folder: hugging_face(folder, streaming=True).shuffle(buffer_size=10, seed=3),
    "map style": hugging_face,
    "webdataset": web,
    "webdataset, shuffled": lambda folder: web(folder, shuffles=True, seed=5),
}


def read(dataset: Any, comm: Any, state: Any = None, stop: int | None = None) -> Any:
    loader = paceline.shard(DataLoader(dataset, batch_size=5), comm, seed=4)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    while loader.epoch < 2:
        for batch in loader:
            found.append(batch["x"].tolist())
            if len(found) == stop:
                return loader.state_dict()
    return found


def joined(parts: list[list[list[int]]]) -> list[list[int]]:
    return [[each for piece in pieces for each in piece] for pieces in zip(*parts, strict=True)]


@pytest.mark.filterwarnings(WARNED, "ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", STREAMS)
def test_every_sample_comes_once_and_a_loop_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    dataset = STREAMS[name](tmp_path)
    alone = paceline.run_virtual(lambda comm: read(dataset, comm), ranks=1)[0]
    for epoch in (alone[:6], alone[6:]):
        assert sorted(each for batch in epoch for each in batch) == NUMBERS
    for ranks in (2, 3):
        found = paceline.run_virtual(lambda comm: read(STREAMS[name](tmp_path), comm), ranks=ranks)
        assert joined(found) == alone
    state = paceline.run_virtual(lambda comm: read(STREAMS[name](tmp_path), comm, stop=8), ranks=2)[0]
    rest = paceline.run_virtual(lambda comm: read(STREAMS[name](tmp_path), comm, state), ranks=3)
    assert joined(rest) == alone[8:]


@pytest.mark.filterwarnings(WARNED, "ignore::ResourceWarning")
def test_a_shuffle_of_webdataset_without_a_seed_does_not_go_on(tmp_path: Path) -> None:
    """It draws from the time and the process."""
    comm = paceline.connect()
    state = read(web(tmp_path, shuffles=True), comm, stop=5)
    with pytest.raises(DataError, match="gives other samples before sample 25"):
        read(web(tmp_path, shuffles=True), comm, state)


RANK = """
import sys
from pathlib import Path
import torch
import test_other_streams as streams
import paceline
comm = paceline.connect()
dataset = streams.web(Path(sys.argv[1]), **eval(sys.argv[2]))
found = streams.read(dataset, comm)
everything = paceline.gather(torch.tensor([each for batch in found for each in batch]), comm)
assert sorted(everything.tolist()) == sorted(2 * streams.NUMBERS), everything
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("{'shuffles': True, 'seed': 5}", ""),
        ("{'shuffles': True}", "gives ranks different samples"),
        ("{'nodesplitter': __import__('webdataset').split_by_node}", "gives ranks different samples"),
        ("{'nodesplitter': __import__('webdataset').single_node_only}", "explicit nodesplitter"),
    ],
)
def test_real_ranks_read_one_stream_or_are_told(tmp_path: Path, options: str, told: str) -> None:
    web(tmp_path)  # makes the files, or skips
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK, str(tmp_path), options]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **names, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parent,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in ranks]
    assert [code for _, code in ends] == ([1, 1] if told else [0, 0]), ends
    assert all(told in text for text, _ in ends), ends
