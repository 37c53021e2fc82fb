"""Mixtures of experts in folders of Hugging Face, trained as they are: experts one by one or stacked in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import config_from_dict
from paceline.errors import MisfitError, RankFailedError
from paceline.train.assemble import build_trainer

transformers = pytest.importorskip("transformers")

EXPERTS = 12  # more than ten: sorted as texts, expert 10 would come before expert 2
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 24),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"intermediate_size": 12, "num_local_experts": EXPERTS}),
    "qwen3_moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 12, "num_experts": EXPERTS, "mlp_only_layers": [0]}),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 12, "num_experts": EXPERTS}),
    "qwen2_moe": ("Qwen2MoeConfig", {"moe_intermediate_size": 12, "num_experts": EXPERTS}),
}
Folder = Callable[..., Path]

pytestmark = pytest.mark.filterwarnings("ignore")  # what the library thinks of tiny sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Returns the folder of a small mixture, with a tensor for each expert, or with stacked ones."""
    root = tmp_path_factory.mktemp("mixtures")

    def make(kind: str, *, is_stacked: bool = False) -> Path:
        path = root / f"{kind}-{is_stacked}"
        if not path.exists():
            config, sizes = KINDS[kind]
            torch.manual_seed(3)
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES, **sizes))
            model.save_pretrained(path, save_original_format=not is_stacked)
        return path

    return make


def begun(folder: Path, strategy: str, ranks: int = 2, steps: int = 1, **model: Any) -> tuple[Any, list[float]]:
    """Returns what a run begins with, and the mean loss of each step over all ranks."""
    values = {
        "name": "run",
        "model": {"kind": "hf", "path": str(folder), **model},
        "data": {"kind": "synthetic_tokens", "samples": 8, "vocab_size": 24, "context": 8},
        "train": {"steps": steps, "global_batch": 4},
        "parallel": {"ranks": ranks, "strategy": strategy, "device": "cpu"},
        "comm": {"backend": "virtual"},
    }
    config = config_from_dict(values)

    def work(comm: VirtualCommunicator) -> tuple[Any, list[float]]:
        trainer = build_trainer(config, comm)
        state = {name: value.clone() for name, value in trainer.parts.engine.full_state_dict().items()}
        return state, [float(result.loss) for result in trainer.steps()]

    found = run_virtual(work, ranks)
    return found[0][0], [sum(each) / ranks for each in zip(*(losses for _, losses in found), strict=True)]


@pytest.mark.some(5)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2"])
@pytest.mark.parametrize("is_stacked", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_reads_the_experts_of_a_folder(folder: Folder, kind: str, is_stacked: bool, strategy: str) -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder(kind)).state_dict()
    found, losses = begun(folder(kind, is_stacked=is_stacked), strategy)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert losses == pytest.approx(begun(folder(kind), "ddp", ranks=1)[1], rel=1e-6)


def damaged(folder: Path, into: Path, change: Callable[[dict[str, torch.Tensor]], Any], **settings: Any) -> Path:
    """Returns a copy of a folder whose tensors were changed."""
    into.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, **settings}))
    return into


EXPERT = "model.layers.1.mlp.experts"
GATE = "model.layers.1.mlp.gate.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        # transformers 4 left what it did not find at random values, with a warning.
        (lambda t: t.pop(f"{EXPERT}.3.up_proj.weight"), f"missing: {EXPERT}.3.up_proj.weight [12, 16]"),
        (
            lambda t: [t.pop(f"{EXPERT}.11.{name}_proj.weight") for name in ("gate", "up", "down")],
            f"missing: {EXPERT}.11.down_proj.weight [16, 12]",
        ),
        (
            lambda t: [t.pop(f"{EXPERT}.{number}.up_proj.weight") for number in range(EXPERTS)],
            f"missing: a matrix of each expert of {EXPERT}.gate_up_proj",
        ),
        (
            lambda t: t.update({f"{EXPERT}.5.down_proj.weight": torch.zeros(16, 13)}),
            f"shape: {EXPERT}.5.down_proj.weight is [16, 13], and those beside it [16, 12]",
        ),
        (lambda t: t.update({GATE: torch.zeros(8, 16)}), f"shape: {GATE} is [8, 16], and {GATE} of the model [12, 16]"),
        (
            lambda t: t.update({f"{EXPERT}.12.down_proj.weight": torch.zeros(16, 12)}),
            f"{EXPERT}.down_proj is [13, 16, 12], and {EXPERT}.down_proj of the model [12, 16, 12]",
        ),
    ],
)
def test_experts_that_a_folder_lacks_are_named(folder: Folder, tmp_path: Path, change: Any, problem: str) -> None:
    path = damaged(folder("qwen3_moe"), tmp_path / "changed", change)
    with pytest.raises(RankFailedError) as told:
        begun(path, "ddp", ranks=1)
    assert isinstance(told.value.__cause__, MisfitError)
    assert problem in str(told.value)


def test_a_folder_of_fewer_experts_than_its_config_says_is_refused(folder: Folder, tmp_path: Path) -> None:
    path = damaged(folder("mixtral", is_stacked=True), tmp_path / "changed", lambda _: None, num_local_experts=8)
    with pytest.raises(RankFailedError, match=r"gate_up_proj is \[12, 24, 16\], and .* of the model \[8, 24, 16\]"):
        begun(path, "fsdp")
