"""Cut anew for any world, a checkpoint is the same to the last bit; and differences are told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from trained_gpt import LLAMA, Save, change_manifest, make_model

from paceline.checkpoint.find import read_manifest, verify_checkpoint
from paceline.checkpoint.manifest import SavedPiece, SavedTensor, State
from paceline.checkpoint.read import open_checkpoint
from paceline.checkpoint.tensors import Stream
from paceline.checkpoint.tools.audit import audit, coverage_problems
from paceline.checkpoint.tools.listing import compare
from paceline.checkpoint.tools.stream import Cut, cut_regions, reshard, write_checkpoint
from paceline.checkpoint.write import own_shares
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.errors import CheckpointError, UsageError
from paceline.plan.layout import Layout, Strategy
from paceline.plan.rules import check_layout
from paceline.rehearse.dryrun.parts import cut_of_training
from paceline.shards import Region, whole_region


def of(ranks: int, strategy: Strategy = "fsdp", **axes: int) -> Layout:
    return check_layout(Layout(strategy=strategy, **axes), ranks)  # type: ignore[arg-type]


def cut(layout: Layout, model: dict[str, object] = LLAMA) -> Cut | None:
    """What training would write, where only the model knows it."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return make_model(model)

    return cut_of_training(make, layout) if layout.is_split else None


WORLDS = [of(1), of(3), of(5, "ddp"), of(8, pipeline=2, tensor=2), of(4, "ddp", pipeline=4), of(2, "ddp", tensor=2)]
MESHES = [
    (pipeline, data, tensor)
    for pipeline in (1, 2, 4)
    for data in range(1, 17)
    for tensor in (1, 2, 4)
    if pipeline * data * tensor <= 16 and pipeline * tensor > 1
]


@pytest.mark.some(2)
@pytest.mark.parametrize(("pipeline", "data", "tensor"), MESHES)
def test_ranks_stand_where_they_do_in_training(pipeline: int, data: int, tensor: int) -> None:
    ranks = pipeline * data * tensor
    layout = of(ranks, "fsdp" if data > 1 else "ddp", pipeline=pipeline, tensor=tensor)

    def held(comm: Communicator) -> dict[str, Region]:
        engine = parallelize(make_model(LLAMA), comm, layout=layout)
        return {share.name: share.region for share in own_shares(engine.shards())}

    assert cut(layout) == run_virtual(held, ranks)


@pytest.mark.parametrize("world", [WORLDS[3], pytest.param(WORLDS[5], marks=pytest.mark.exhaustive)], ids=str)
def test_every_world_has_the_same_state_and_goes_back(saved: Save, tmp_path: Path, world: Layout) -> None:
    source = open_checkpoint(saved())
    made = reshard(source, tmp_path / "there", world, cut(world))
    assert audit(made).is_good
    assert read_manifest(made).world == world.ranks
    found = compare(source, open_checkpoint(made))
    assert found.is_same_state
    assert found.num_compared == len(source.manifest.tensors)
    back = reshard(open_checkpoint(made), tmp_path / "back", of(2))
    assert compare(source, open_checkpoint(back)).is_same_state


def test_ranks_have_parts_of_about_one_size(saved: Save) -> None:
    manifest = read_manifest(saved())
    for world in (of(4), of(4, tensor=2), of(7)):
        sizes = [sum(region.size for _, region in held) for held in cut_regions(manifest.tensors, world, cut(world))]
        assert max(sizes) < 1.2 * min(sizes), world


def test_tensor_ranks_cut_matrices_along_the_dim_of_training(saved: Save) -> None:
    manifest = read_manifest(saved())
    held = cut_regions(manifest.tensors, of(2, tensor=2), cut(of(2, tensor=2)))
    first = dict(held[0])
    assert first["model/layers.0.attention.query.weight"].cuts[0][0] == 0
    assert first["model/layers.0.attention.output.weight"].cuts[0][0] == 1
    assert first["optimizer/layers.0.mlp.down.weight/exp_avg"].cuts[0][0] == 1


def test_random_states_stay_where_the_number_of_ranks_does(saved: Save, tmp_path: Path) -> None:
    source = open_checkpoint(saved())
    same = open_checkpoint(reshard(source, tmp_path / "same", of(2, "ddp")))
    assert same.own(1)["random"][0] == 1
    other = open_checkpoint(reshard(source, tmp_path / "other", of(3)))
    assert other.own(1) == {}


def test_a_channels_last_tensor_and_odd_shapes_survive(tmp_path: Path) -> None:
    weight = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
    order = (0, 2, 3, 1)
    tensors = {
        "model/conv": (weight, order),
        "model/none": (torch.empty(0, 3), None),
        "model/one": (torch.ones(()), None),
    }
    pieces = []
    for name, (tensor, dims) in tensors.items():
        laid = tensor if dims is None else tensor.permute(dims)
        read = Stream.made(name, laid.shape, laid.dtype, lambda laid=laid: laid).read
        pieces.append(Stream(name=name, region=whole_region(tensor.shape, dims), dtype=tensor.dtype, read=read))
    plain = State(step=1, position=0)
    source = open_checkpoint(write_checkpoint(tmp_path / "a", [pieces], plain))
    made = open_checkpoint(reshard(source, tmp_path / "b", of(3)))
    assert torch.equal(made.read("model/conv"), weight)
    assert compare(source, made).is_same_state
    assert audit(made.path).is_good


def test_stages_of_an_unknown_model_are_refused(saved: Save, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say which model it is of"):
        reshard(open_checkpoint(saved()), tmp_path, of(8, pipeline=8))


def test_what_is_there_is_replaced_only_when_asked(saved: Save, tmp_path: Path) -> None:
    source = open_checkpoint(saved())
    made = reshard(source, tmp_path, of(1))
    with pytest.raises(CheckpointError, match="is there already"):
        reshard(source, tmp_path, of(2))
    assert read_manifest(made).world == 1
    reshard(source, tmp_path, of(2), may_replace=True)
    assert read_manifest(made).world == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_failed_write_leaves_nothing(saved: Save, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(saved(), tmp_path / "broken" / "step-00000007"))
    (broken / "rank-00001.f32.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank-00001"):
        reshard(open_checkpoint(broken), tmp_path / "out", of(3))
    assert not (tmp_path / "out").exists()


def test_differences_are_told_by_tensor_value_and_setting(saved: Save, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved(), tmp_path / "step-00000007"))
    manifest = read_manifest(copy)
    name = "model/norm.weight"
    (piece, *_) = manifest.tensors[name].pieces
    header = json.loads((copy / piece.file).read_bytes()[8:].split(b"}}")[0] + b"}}")
    start = 8 + int.from_bytes((copy / piece.file).read_bytes()[:8], "little") + header[name]["data_offsets"][0]
    content = bytearray((copy / piece.file).read_bytes())
    old = torch.frombuffer(content, dtype=torch.float32, count=1, offset=start).item()
    content[start : start + 4] = torch.tensor([old + 0.5]).numpy().tobytes()
    (copy / piece.file).write_bytes(content)
    change_manifest(copy, lambda text: text.update(position=64))
    change_manifest(copy, lambda text: text["about"]["config"]["train"].update(seed=4))
    found = compare(open_checkpoint(saved()), open_checkpoint(copy))
    (tensor,) = found.tensors
    assert (tensor.name, tensor.num_different, tensor.num_elements) == (name, 1, 64)
    assert tensor.max_absolute == pytest.approx(0.5, rel=1e-5)
    assert tensor.max_relative == pytest.approx(0.5 / (old + 0.5), rel=1e-4)
    assert found.values == {"position": (56, 64)}
    assert found.settings == {"config.train.seed": (3, 4)}
    assert not found.is_same_state


def test_tensors_of_one_side_and_of_other_shapes_are_named(saved: Save) -> None:
    left, right = open_checkpoint(saved()), open_checkpoint(saved())
    tensors = dict(left.manifest.tensors)
    tensors["model/more"] = tensors.pop("model/norm.weight")
    tensors["model/head.weight"] = SavedTensor(shape=(1,), dtype="F32", pieces=())
    right.manifest = type(left.manifest)(
        **{name: getattr(left.manifest, name) for name in left.manifest.__slots__ if name != "tensors"}, tensors=tensors
    )
    found = compare(left, right)
    assert found.only_left == ("model/norm.weight",)
    assert found.only_right == ("model/more",)
    assert found.other_shape[0].startswith("model/head.weight: F32 [50, 64] and F32 [1]")


def test_regions_of_all_ranks_are_every_element_once(saved: Save) -> None:
    manifest = read_manifest(saved("ddp", 2))
    for world in WORLDS:
        pieces: dict[str, list[SavedPiece]] = {name: [] for name in manifest.tensors}
        for held in cut_regions(manifest.tensors, world, cut(world)):
            for name, region in held:
                pieces[name].append(SavedPiece(file="f", region=region))
        for name, tensor in manifest.tensors.items():
            made = SavedTensor(shape=tensor.shape, dtype=tensor.dtype, pieces=tuple(pieces[name]))
            assert coverage_problems(name, made) == [], (world, name)


def test_the_result_is_one_that_is_resumed_from(saved: Save, tmp_path: Path) -> None:
    made = reshard(open_checkpoint(saved()), tmp_path, of(3))
    assert verify_checkpoint(made).step == 7


def test_a_stream_that_ends_early_is_no_file(tmp_path: Path) -> None:
    short = Stream(
        name="model/a", region=whole_region((8,)), dtype=torch.float32, read=lambda: iter([memoryview(b"abcd")])
    )
    plain = State(step=1, position=0)
    with pytest.raises(CheckpointError, match="model/a gave 4 bytes, and its shape has 32"):
        write_checkpoint(tmp_path, [[short]], plain)
    assert list(tmp_path.iterdir()) == []
