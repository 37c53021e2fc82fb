"""Mixtures of experts in folders of Hugging Face, trained as they are: experts one by one or stacked in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.tools.outgoing import ExportOptions, export
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import config_from_dict
from paceline.errors import MisfitError, RankFailedError, UsageError
from paceline.models.lora import add_lora
from paceline.run.worker import make_hooks
from paceline.train.assemble import build_trainer
from paceline.train.survive.recovery import StopRequest

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


def config_of(folder: Path, strategy: str, ranks: int, steps: int = 1, **model: Any) -> Any:
    values = {
        "name": "run",
        "model": {"kind": "hf", "path": str(folder), **model},
        "data": {"kind": "synthetic_tokens", "samples": 8, "vocab_size": 24, "context": 8},
        "train": {"steps": steps, "global_batch": 4},
        "optim": {"lr": 0.05},
        "parallel": {"ranks": ranks, "strategy": strategy, "device": "cpu"},
        "comm": {"backend": "virtual"},
    }
    return config_from_dict(values)


def begun(folder: Path, strategy: str, ranks: int = 2) -> tuple[Any, list[float]]:
    """Returns what a run begins with, and the mean loss of each step over all ranks."""
    config = config_of(folder, strategy, ranks)

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


# Adapters of experts


def tuned(folder: Path, into: Path, strategy: str, ranks: int, **lora: Any) -> Path:
    """Trains adapters for two steps; returns the checkpoint."""
    config = config_of(folder, strategy, ranks, steps=2, lora={"rank": 2, **lora})

    def work(comm: VirtualCommunicator) -> None:
        build_trainer(config, comm, hooks=make_hooks(config, into, StopRequest())).run()

    run_virtual(work, ranks)
    return into / "checkpoints" / "step-00000002"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(12).reshape(2, 6)).logits
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2"])
@pytest.mark.parametrize("targets", [["experts", "q_proj"], ["experts.down_proj"]], ids=["all", "one"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_adapters_of_experts_go_to_peft(
    folder: Folder, tmp_path: Path, kind: str, targets: list[str], strategy: str
) -> None:
    peft = pytest.importorskip("peft")
    checkpoint = open_checkpoint(tuned(folder(kind), tmp_path, strategy, 2, targets=targets))
    base = transformers.AutoModelForCausalLM.from_pretrained
    out = export(checkpoint, tmp_path / "adapters", ExportOptions(is_peft=True))
    theirs = logits(peft.PeftModel.from_pretrained(base(folder(kind)), out))
    assert float((theirs - logits(base(folder(kind)))).abs().max()) > 1e-5
    merged = export(checkpoint, tmp_path / "merged", ExportOptions(is_hugging_face=True))
    torch.testing.assert_close(logits(base(merged)), theirs, rtol=1e-4, atol=1e-6)


def test_adapters_of_experts_learn_as_peft_s_do(folder: Folder) -> None:
    """The gradients of both are compared, with the same A and B."""
    peft = pytest.importorskip("peft")
    ours, theirs = (transformers.AutoModelForCausalLM.from_pretrained(folder("mixtral")) for _ in range(2))
    add_lora(ours, rank=2, alpha=4.0, targets=["experts"])
    settings = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": []}
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=2, lora_alpha=4, **settings))
    place = "model.layers.1.mlp.experts"
    outer = theirs.get_submodule(f"base_model.model.{place}")
    pairs = [(f"{place}.down_proj_adapter", outer), (f"{place}.gate_up_proj_adapter", outer.base_layer)]
    generator = torch.Generator().manual_seed(0)
    for name, wrapper in pairs:
        adapter = ours.get_submodule(name)
        with torch.no_grad():
            adapter.lora_b.normal_(generator=generator)
            wrapper.lora_A["default"].weight.copy_(adapter.lora_a.flatten(0, 1))
            wrapper.lora_B["default"].weight.copy_(adapter.lora_b.permute(1, 2, 0).flatten(1))
    tokens = torch.arange(12).reshape(2, 6)
    for model in (ours, theirs):
        model(tokens, labels=tokens).loss.backward()
    for name, wrapper in pairs:
        adapter = ours.get_submodule(name)
        expected = wrapper.lora_A["default"].weight.grad
        assert float(expected.abs().max()) > 0
        torch.testing.assert_close(adapter.lora_a.grad.flatten(0, 1), expected, rtol=1e-4, atol=1e-7)
        expected = wrapper.lora_B["default"].weight.grad
        torch.testing.assert_close(adapter.lora_b.grad.permute(1, 2, 0).flatten(1), expected, rtol=1e-4, atol=1e-7)
    assert not any(p.requires_grad for name, p in ours.named_parameters() if "lora" not in name)


def test_dropout_of_adapters_of_experts_is_refused(folder: Folder) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("mixtral"))
    with pytest.raises(UsageError, match=r"lora\.dropout = 0\.1 with lora\.targets = \['experts'\]"):
        add_lora(model, targets=["experts"], dropout=0.1)
    with pytest.raises(UsageError, match="nothing fits no linear layer"):
        add_lora(model, targets=["experts", "nothing"])
