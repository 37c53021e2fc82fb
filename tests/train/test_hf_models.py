"""Models of Hugging Face folders: what ranks hold after loading, how they train, and what is told of odd folders."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import config_from_dict
from paceline.errors import ConfigError, MisfitError, PacelineError
from paceline.models.lora import add_lora
from paceline.train.assemble import build_trainer

STEPS, BATCH, CONTEXT, VOCABULARY = 2, 4, 8, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SIZES),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": None}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**SIZES, "head_dim": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
}
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Returns the folder of a small model, in the library's own files."""
    root = tmp_path_factory.mktemp("hf")

    def make(kind: str) -> Path:
        import transformers  # here: to load it takes seconds

        path = root / kind
        if not path.exists():
            model, config, sizes = KINDS[kind]
            torch.manual_seed(3)
            made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
            made.save_pretrained(path)
        return path

    return make


def their_model(path: Path) -> nn.Module:
    import transformers

    name = json.loads((path / "config.json").read_text())["architectures"][0]
    made: nn.Module = getattr(transformers, name).from_pretrained(path, dtype=torch.float64).train()
    return made


def config_of(path: Path, strategy: str = "ddp", ranks: int = 2, parallel: Any = None, **model: Any) -> Any:
    tokens = {"kind": "synthetic_tokens", "samples": 32, "vocab_size": VOCABULARY, "context": CONTEXT}
    images = {"kind": "synthetic_images", "samples": 32, "classes": 4, "size": 8}
    values = {
        "name": "hf",
        "model": {"kind": "hf", "path": str(path), **model},
        "data": images if "vit" in path.name else tokens,
        "optim": {
            "kind": "sgd",
            "lr": 0.05,
            "momentum": 0.0,
            "clip_norm": 1.0,
            "weight_decay": 0.0,
            "schedule": {"kind": "constant"},
        },
        "train": {"steps": STEPS, "global_batch": BATCH, "dtype": "float64", "seed": 5},
        "parallel": {"ranks": ranks, "strategy": strategy, "device": "cpu", **(parallel or {})},
        "comm": {"backend": "virtual"},
    }
    return config_from_dict(values)


def train(config: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    def work(comm: VirtualCommunicator) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer = build_trainer(config, comm)
        losses: list[float] = []
        trainer.hooks.append(lambda _, result: losses.append(float(result.loss)))
        trainer.run()
        return losses, dict(trainer.parts.engine.full_state_dict())

    results = run_virtual(work, config.parallel.ranks)
    losses = [sum(each) / len(each) for each in zip(*(found for found, _ in results), strict=True)]
    return losses, results[0][1]


def train_theirs(path: Path, adapt: Callable[[nn.Module], object] = lambda _: None) -> tuple[list[float], nn.Module]:
    """Trains the library's own model in a plain loop, on the batches that one rank gets."""
    config = config_of(path, ranks=1)
    model = their_model(path)
    adapt(model)

    def batches(comm: VirtualCommunicator) -> list[Any]:
        steps = build_trainer(config, comm).parts.loader.steps(num_steps=STEPS)
        return [microbatch for step in steps for microbatch in step.microbatches]

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.05), []
    for inputs, targets in run_virtual(batches, 1)[0]:
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        logits = model(inputs).logits
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@functools.cache
def trained_theirs(path: Path) -> tuple[list[float], nn.Module]:
    """The losses and the model of the library's own loop without adapters, which tests only read."""
    return train_theirs(path)


@pytest.mark.some(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "vit", "gpt_neox"])
def test_a_pretrained_model_trains_as_the_librarys_own(folder: Folder, kind: str, strategy: str) -> None:
    losses, model = trained_theirs(folder(kind))
    found, state = train(config_of(folder(kind), strategy))
    torch.testing.assert_close(found, losses, rtol=0, atol=1e-9)
    for name, value in model.state_dict().items():
        if name in state:
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("llama", {"pipeline": 2}),
        ("gpt2", {"pipeline": 2}),
        ("gpt_neox", {"pipeline": 2}),
        ("gemma", {"pipeline": 2}),
        ("mistral", {"pipeline": 2, "data": 2}),
        ("qwen2", {"pipeline": 2, "tensor": 2}),
        ("llama", {"tensor": 2}),
        ("gpt2", {"tensor": 2, "data": 2}),
    ],
)
def test_a_model_that_is_split_trains_as_the_librarys_own(folder: Folder, kind: str, split: dict[str, int]) -> None:
    losses, model = trained_theirs(folder(kind))
    ranks = split.get("pipeline", 1) * split.get("tensor", 1) * split.get("data", 1)
    strategy = "zero1" if "data" in split else "ddp"
    config = config_of(folder(kind), strategy, ranks, parallel=split).with_values("train", microbatch=1)
    _, state = train(config)
    assert losses
    for name, value in model.state_dict().items():
        if name in state:
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


LORA = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "down_proj", "c_attn"]}


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero1", "tensor"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_alone_are_trained(folder: Folder, kind: str, strategy: str) -> None:
    targets = LORA["targets"][:2] if kind == "llama" else LORA["targets"][2:]
    split = {"tensor": 2, "sequence_parallel": kind == "llama"} if strategy == "tensor" else {}
    sharded = "ddp" if split else strategy
    config = config_of(folder(kind), sharded, parallel=split, lora={**LORA, "targets": targets})
    seeded = {}

    def adapt(model: nn.Module) -> None:
        add_lora(model, rank=2, alpha=6.0, targets=targets)
        model.load_state_dict({n: v for n, v in seeded.items() if "lora" in n}, strict=False)

    def first(comm: VirtualCommunicator) -> dict[str, torch.Tensor]:
        trainer = build_trainer(config, comm)
        state = trainer.parts.optimizer.param_groups
        assert sum(p.numel() for group in state for p in group["params"]) < 1000
        return dict(trainer.parts.engine.full_state_dict())

    seeded = run_virtual(first, 2)[0]
    losses, model = train_theirs(folder(kind), adapt)
    found, state = train(config)
    torch.testing.assert_close(found, losses, rtol=0, atol=1e-9)
    changed = {name for name, value in state.items() if not torch.equal(value, seeded[name])}
    assert changed == {name for name in state if "lora" in name}
    for name in changed:
        torch.testing.assert_close(state[name], model.state_dict()[name], rtol=0, atol=1e-9)


def test_a_target_that_fits_no_layer() -> None:
    with pytest.raises(PacelineError, match=r"qproj fits no linear layer(.|\n)*the model has 0, 1"):
        add_lora(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), rank=2, targets=["qproj"])


def test_a_rank_reads_the_bytes_that_it_holds(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.checkpoint.storage import LocalFiles

    sizes: list[int] = []
    read = LocalFiles.read_into

    def counted(self: LocalFiles, path: Path, parts: Any) -> None:
        rows = list(parts)
        sizes.append(sum(len(part) for _, part in rows) if path.suffix == ".safetensors" else 0)
        read(self, path, rows)

    path = folder("llama")
    config = config_of(path, "fsdp", 2).with_values("train", dtype="float32")
    monkeypatch.setattr(LocalFiles, "read_into", counted)
    run_virtual(lambda comm: build_trainer(config, comm) and None, 2)
    whole = (path / "model.safetensors").stat().st_size
    assert sum(sizes) < 1.1 * whole + 2 * 5000  # two headers, which every rank reads


def test_weights_of_another_model_are_all_told(folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.mkdir()
    (path / "model.safetensors").write_bytes((folder("llama") / "model.safetensors").read_bytes())
    config = json.loads((folder("llama") / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "vocab_size": 44}))
    with pytest.raises(PacelineError) as raised:
        run_virtual(lambda comm: build_trainer(config_of(path), comm) and None, 2)
    assert isinstance(raised.value.__cause__, MisfitError)
    told = str(raised.value.__cause__)
    assert told.count("missing: model.layers.2.") == 9
    assert "shape: lm_head.weight is [40, 16], and lm_head.weight of the model [44, 16]" in told
    assert "shape: model.embed_tokens.weight" in told


def test_a_new_head_on_a_pretrained_body(folder: Folder) -> None:
    config = config_of(folder("vit"), fresh=["classifier"])
    shape = config.data.model_copy(update={"classes": 6})
    _, state = train(config.model_copy(update={"data": shape}))
    assert state["classifier.weight"].shape == (6, 16)
    assert state["classifier.weight"].abs().sum() > 0


def test_a_model_from_its_config_alone(folder: Folder) -> None:
    one, _ = train(config_of(folder("llama"), "ddp", 1, pretrained=False))
    two, _ = train(config_of(folder("llama"), "fsdp", 2, pretrained=False))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (lambda path: (path / "config.json").write_text("{"), r"config\.json cannot be read"),
        (lambda path: (path / "model.safetensors").unlink(), "has no weights in safetensors"),
        (lambda path: path.rename(path.with_name("gone")), "is no folder"),
    ],
)
def test_a_folder_that_lacks_something(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    change(path)
    with pytest.raises(ConfigError, match=message):
        config_of(path)
