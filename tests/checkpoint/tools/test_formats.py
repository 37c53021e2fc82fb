"""Exports that the other libraries' own loaders read, and imports that give the same model back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict
from trained_gpt import CLASSIC, LLAMA, VOCABULARY, Save, make_model

from paceline.checkpoint import load, save
from paceline.checkpoint.find import find_checkpoint
from paceline.checkpoint.read import Checkpoint, fill_model, open_checkpoint
from paceline.checkpoint.tools.incoming import Incoming, format_of, open_incoming, save_incoming
from paceline.checkpoint.tools.listing import compare
from paceline.checkpoint.tools.outgoing import ExportOptions, Format, export, format_by_name
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config.schema import Config
from paceline.engines.apply import parallelize
from paceline.errors import CheckpointError, UsageError
from paceline.train.assemble import build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # DCP of torch 2.10 reads it
]


def state_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(f"model/{name}") for name in checkpoint.shapes("model/")}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def take_in(path: Path, kind: Format, prefix: str = "") -> Incoming:
    return open_incoming(path, kind, prefix, allows_pickle=True)


def out_of(saved: Path, out: Path, **options: object) -> Path:
    return export(open_checkpoint(saved), out, ExportOptions(**options))  # type: ignore[arg-type]


def test_safetensors_own_loader_reads_the_export(saved: Save, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = out_of(saved(), tmp_path / "m.safetensors")
    assert_same(safetensors.load_file(path), state_of(open_checkpoint(saved())))


def test_torch_load_reads_the_export(saved: Save, tmp_path: Path) -> None:
    path = out_of(saved(), tmp_path / "m.pt", format="torch")
    state = torch.load(path, weights_only=True)
    assert_same(state, state_of(open_checkpoint(saved())))
    make_model(LLAMA).load_state_dict(state)


def test_a_torch_file_with_the_optimizer_goes_on_as_the_run_would(saved: Save, tmp_path: Path) -> None:
    path = out_of(saved(), tmp_path / "m.pt", format="torch", with_optimizer=True)
    content = torch.load(path, weights_only=True)
    assert content["optim"]["state"]["norm.weight"]["step"] == 1
    assert content["optim"]["param_groups"][0]["lr"] == 1e-2
    assert content["optim"]["state"]["norm.weight"]["exp_avg"].shape == (64,)


def test_dcp_own_loader_reads_the_export(saved: Save, tmp_path: Path) -> None:
    path = out_of(saved(), tmp_path / "dcp", format="dcp", with_optimizer=True)
    model = make_model(LLAMA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    wanted = state_of(open_checkpoint(saved()))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert_same(state["model"], wanted)
    shapes = {
        name: {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")} for name, p in model.named_parameters()
    }
    inner = {"state": {name: {**each, "step": torch.tensor(0.0)} for name, each in shapes.items()}}
    dcp.load({"optim": inner}, checkpoint_id=path, no_dist=True)
    rows = [{**{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}, "params": list(shapes)}]
    set_optimizer_state_dict(model, optimizer, {"state": inner["state"], "param_groups": rows})
    found = optimizer.state[model.norm.weight]
    assert torch.equal(found["exp_avg"], open_checkpoint(saved()).read("optimizer/norm.weight/exp_avg"))
    assert found["step"] == 1


def test_torch_own_dcp_is_taken_in_with_its_optimizer(tmp_path: Path) -> None:
    model = make_model(LLAMA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    path = save_incoming(take_in(tmp_path / "theirs", format_of(tmp_path / "theirs")), tmp_path / "start", "theirs")
    made = open_checkpoint(path)
    assert_same(state_of(made), dict(model.state_dict()))
    exp_avg = made.read("optimizer/norm.weight/exp_avg")
    assert torch.equal(exp_avg, optimizer.state[model.norm.weight]["exp_avg"])
    assert made.found["optimizer/norm.weight"]["values"]["step"] == 1


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m.safetensors", {"format": "safetensors", "with_optimizer": True}),
        ("m.pt", {"format": "torch", "with_optimizer": True}),
        ("m", {"format": "dcp", "with_optimizer": True}),
        ("m.safetensors", {"format": "safetensors"}),
        ("m.pt", {"format": "torch"}),
        ("hf", {"is_hugging_face": True}),
    ],
)
@pytest.mark.parametrize("model", [LLAMA, CLASSIC], ids=["llama", "classic"])
def test_out_and_in_again_is_the_same(
    saved: Save, tmp_path: Path, name: str, options: dict[str, object], model: dict[str, object]
) -> None:
    source = open_checkpoint(saved("fsdp", 2, model))
    out = out_of(source.path, tmp_path / name, **options)
    made = open_checkpoint(save_incoming(take_in(out, format_of(out)), tmp_path / "start", str(out)))
    found = compare(source, made)
    assert not found.tensors
    assert not found.only_right
    has_optimizer = bool(options.get("with_optimizer"))
    assert bool(found.only_left) != has_optimizer
    assert made.manifest.about["weights_only"] != has_optimizer
    if has_optimizer:
        assert made.found["optimizer/norm.weight"]["values"]["step"] == 1


def test_what_was_taken_in_fills_ranks_of_any_strategy(saved: Save, tmp_path: Path) -> None:
    out = out_of(saved(), tmp_path / "m.safetensors")
    path = save_incoming(take_in(out, "safetensors"), tmp_path / "start", str(out))
    wanted = state_of(open_checkpoint(saved()))

    def fill(comm: object) -> dict[str, torch.Tensor]:
        engine = parallelize(make_model(LLAMA), comm, "fsdp")  # type: ignore[arg-type]
        fill_model(open_checkpoint(path), engine)
        return dict(engine.full_state_dict())

    for state in run_virtual(fill, 3):
        assert_same(state, wanted)


def test_a_trainer_starts_from_weights_with_an_optimizer_of_its_own(saved: Save, tmp_path: Path) -> None:
    out = out_of(saved(), tmp_path / "m.pt", format="torch")
    path = save_incoming(take_in(out, "torch"), tmp_path / "start", str(out))
    config = Config.model_validate(
        {
            "model": LLAMA,
            "data": {"kind": "synthetic_tokens", "vocab_size": VOCABULARY, "samples": 16, "context": 64},
            "train": {"steps": 1, "global_batch": 4, "seed": 9},
            "parallel": {"ranks": 1, "device": "cpu"},
        }
    )
    trainer = build_trainer(config, SoloCommunicator(torch.device("cpu")))
    trainer.load_state(open_checkpoint(find_checkpoint(str(tmp_path / "start"), tmp_path)))
    assert (trainer.step, trainer.position) == (0, 0)
    assert not trainer.parts.optimizer.state
    assert_same(dict(trainer.parts.engine.full_state_dict()), state_of(open_checkpoint(path)))
    trainer.run()
    assert trainer.step == 1


@pytest.mark.parametrize(("model", "architecture"), [(LLAMA, "llama"), (CLASSIC, "gpt2")], ids=["llama", "classic"])
def test_hugging_faces_folder_names_its_architecture(
    saved: Save, tmp_path: Path, model: dict[str, object], architecture: str
) -> None:
    path = out_of(saved("fsdp", 2, model), tmp_path / "hf", is_hugging_face=True)
    assert json.loads((path / "config.json").read_text())["model_type"] == architecture


@pytest.mark.parametrize("model", [LLAMA, CLASSIC], ids=["llama", "classic"])
@pytest.mark.exhaustive
def test_hugging_faces_model_computes_the_same(saved: Save, tmp_path: Path, model: dict[str, object]) -> None:
    import transformers  # here: to load it takes seconds, which every worker would pay

    path = out_of(saved("fsdp", 2, model), tmp_path / "hf", is_hugging_face=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    ours = make_model(model).eval()
    ours.load_state_dict(state_of(open_checkpoint(saved("fsdp", 2, model))))
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.some(1)  # both ways of the other formats have tests above
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m"])
def test_a_round_trip_fills_other_ranks_with_the_same_optimizer(
    saved: Save, tmp_path: Path, name: str, ranks: int
) -> None:
    kind = {"m.safetensors": "safetensors", "m.pt": "torch", "m": "dcp"}[name]
    out = out_of(saved(), tmp_path / name, format=kind, with_optimizer=True)
    path = save_incoming(take_in(out, format_of(out)), tmp_path / "start", str(out))

    def save_again(comm: Communicator) -> None:
        engine = parallelize(make_model(LLAMA), comm, "fsdp")
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
        load(path, engine, optimizer)
        save(tmp_path / "again", engine, optimizer, step=1)

    run_virtual(save_again, ranks)
    found = compare(open_checkpoint(saved()), open_checkpoint(find_checkpoint("auto", tmp_path / "again")))
    assert not [*found.tensors, *found.only_left, *found.only_right, *found.other_shape]


def test_the_name_and_the_content_tell_the_format(saved: Save, tmp_path: Path) -> None:
    assert [format_by_name(Path(name)) for name in ("a.pt", "a.pth", "a.safetensors", "a")] == [
        "torch",
        "torch",
        "safetensors",
        "safetensors",
    ]
    assert format_of(out_of(saved(), tmp_path / "odd.pt", format="safetensors")) == "safetensors"


def test_what_cannot_be_is_refused_in_words(saved: Save, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--hf is for --format safetensors"):
        ExportOptions(format="torch", is_hugging_face=True)
    (tmp_path / "there").write_text("mine")
    with pytest.raises(CheckpointError, match="is there already"):
        out_of(saved(), tmp_path / "there")
    mixed = {**CLASSIC, "mlp": "swiglu"}
    with pytest.raises(UsageError, match="Llama has rms, swiglu, rotary"):
        out_of(saved("ddp", 1, mixed), tmp_path / "hf", is_hugging_face=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.safetensors", b"\xff" * 100, "is not a safetensors file"),
        ("a.safetensors", b"", "is not a safetensors file: it has 0 bytes"),
        ("a.pt", b"nonsense", "cannot be read as a torch file"),
        ("none.pt", None, "is not there"),
    ],
)
def test_files_that_are_something_else_are_named(tmp_path: Path, name: str, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=told):
        take_in(tmp_path / name, format_of(tmp_path / name))


def test_files_that_are_cut_short_are_named(saved: Save, tmp_path: Path) -> None:
    for name in ("a.safetensors", "a.pt"):
        content = out_of(saved(), tmp_path / name, format=format_by_name(tmp_path / name)).read_bytes()
        (tmp_path / name).write_bytes(content[:-100])
        with pytest.raises(CheckpointError, match="is cut short"):
            take_in(tmp_path / name, format_of(tmp_path / name))


def test_a_torch_file_that_says_it_has_several_disks_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, path)
    content = bytearray(path.read_bytes())
    disks = content.rfind(b"PK\6\7") + 16  # in the last bytes of the archive
    content[disks : disks + 4] = (2).to_bytes(4, "little")
    path.write_bytes(content[: disks - 12] + b"\1" + content[disks - 11 :])
    with pytest.raises(CheckpointError, match="cannot be read as a torch file"):
        take_in(path, "torch")


@pytest.mark.parametrize(
    ("damage", "told"),
    [("gone", "__0_0.distcp is missing"), ("cut", "has 20 bytes, and more are needed"), ("metadata", "truncated")],
)
def test_a_distributed_checkpoint_that_lacks_something_is_named(
    saved: Save, tmp_path: Path, damage: str, told: str
) -> None:
    folder = out_of(saved(), tmp_path / "dcp", format="dcp")
    for path in [folder / ".metadata"] if damage == "metadata" else sorted(folder.glob("*.distcp")):
        path.write_bytes(path.read_bytes()[:20])
        if damage == "gone":
            path.unlink()
    with pytest.raises(CheckpointError, match=told):
        save_incoming(take_in(folder, "dcp"), tmp_path / "out", "dcp")
    assert not list((tmp_path / "out").glob("*"))


def test_a_folder_of_hugging_face_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"model-1.safetensors is missing"):
        take_in(tmp_path, format_of(tmp_path))
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"config.json is damaged"):
        take_in(tmp_path, format_of(tmp_path))


def test_code_in_a_torch_file_is_never_run(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "evil": Path("x")}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="never code"):
        take_in(tmp_path / "a.pt", "torch")


def test_a_prefix_is_taken_off_the_names(tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(2), "module.b": torch.ones(3)}, tmp_path / "a.pt")
    found = take_in(tmp_path / "a.pt", "torch", "module.")
    assert set(found.model) == {"a", "b"}
    with pytest.raises(UsageError, match="does not begin so"):
        take_in(tmp_path / "a.pt", "torch", "other.")
