"""Adapters alone: from a run, or from a loop of one's own, to a folder that PEFT loads, and back into a run; merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import paceline
from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.tools.outgoing import ExportOptions, export
from paceline.cli.app import app
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import config_from_dict
from paceline.errors import ConfigError, RankFailedError, UsageError
from paceline.run.worker import make_hooks
from paceline.train.assemble import build_trainer
from paceline.train.survive.recovery import StopRequest

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# PEFT reads a name that transformers deprecates from 5.23 on.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**SIZES, "num_key_value_heads": 1, "vocab_size": 24, "max_position_embeddings": 16, "eos_token_id": None}
GPT2 = {"vocab_size": 24, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "eos_token_id": None}
BERT = {**SIZES, "vocab_size": 24, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0}
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, {"lora": {"rank": 3, "dropout": 0.1, "targets": ["0.*.c_proj"]}}),
    "bert": (
        "BertForSequenceClassification",
        "BertConfig",
        {**BERT, "num_labels": 3},
        {"lora": {"rank": 2}, "fresh": ["classifier"]},
    ),
}
TOKENS = torch.tensor([[1, 5, 2, 9, 20, 7]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Path:
        if not (root / kind).exists():
            model, config, sizes, _ = KINDS[kind]
            torch.manual_seed(0)
            getattr(transformers, model)(getattr(transformers, config)(**sizes)).double().save_pretrained(root / kind)
        return root / kind

    return make


def make_texts(samples: int = 16) -> Any:
    """Tokens with a class each, as the data of a user's own."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(24, (samples, 6), generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs[:, 0] % 3)


def config_of(kind: str, folder: Path, ranks: int = 2, strategy: str = "fsdp", **model: Any) -> Any:
    tokens = {"kind": "synthetic_tokens", "samples": 16, "vocab_size": 24, "context": 6}
    texts = {"kind": "factory", "factory": f"{__name__.rpartition('.')[2]}:make_texts", "eval_fraction": 0.0}
    values = {
        "name": "run",
        "model": {"kind": "hf", "path": str(folder), **KINDS[kind][3], **model},
        "data": texts if kind == "bert" else tokens,
        "train": {"steps": 2, "global_batch": 6, "dtype": "float64", "seed": 3},
        "optim": {"lr": 0.05},
        "parallel": {"ranks": ranks, "strategy": strategy, "device": "cpu"},
        "comm": {"backend": "virtual"},
    }
    return config_from_dict(values)


def run(config: Any, folder: Path) -> Path:
    """Trains two steps; returns the checkpoint."""

    def work(comm: VirtualCommunicator) -> None:
        build_trainer(config, comm, hooks=make_hooks(config, folder, StopRequest())).run()

    run_virtual(work, config.parallel.ranks)
    return folder / "checkpoints" / "step-00000002"


def begun(config: Any) -> dict[str, torch.Tensor]:
    """Returns what a run begins with."""
    return run_virtual(
        lambda comm: dict(build_trainer(config, comm).parts.engine.full_state_dict()), config.parallel.ranks
    )[0]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.double().eval()(TOKENS).logits
    return found


def base_of(kind: str, path: Path) -> Any:
    return getattr(transformers, KINDS[kind][0]).from_pretrained(path, dtype=torch.float64)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_go_to_peft_and_come_back(
    kind: str, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    checkpoint = open_checkpoint(run(config_of(kind, folder(kind)), tmp_path))
    out = export(checkpoint, tmp_path / "adapters", ExportOptions(is_peft=True))
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    theirs = logits(peft.PeftModel.from_pretrained(base_of(kind, folder(kind)), out))
    assert not torch.allclose(theirs, logits(base_of(kind, folder(kind))))
    merged = export(checkpoint, tmp_path / "merged", ExportOptions(is_hugging_face=True))
    torch.testing.assert_close(logits(base_of(kind, merged)), theirs, rtol=1e-10, atol=1e-10)
    # A run that begins with the folder has all values of the one that ended, at another number of ranks.
    again = begun(config_of(kind, folder(kind), ranks=3, strategy="zero2", lora={"path": str(out)}))
    for name in checkpoint.shapes("model/"):
        assert torch.equal(again[name], checkpoint.read(f"model/{name}")), name


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2"])
def test_a_loop_of_ones_own_loads_a_folder_and_leaves_adapters(strategy: str, folder: Any, tmp_path: Path) -> None:
    path = folder("gpt2")

    def work(comm: VirtualCommunicator) -> tuple[torch.Tensor, torch.Tensor, int]:
        torch.manual_seed(0)
        model = paceline.load(path, lora={"rank": 2}).double()
        assert all(each.is_meta for name, each in model.named_parameters() if "lora" not in name)
        engine = paceline.parallelize(model, comm, strategy)
        with torch.no_grad():
            first = engine.eval()(TOKENS).logits
        optimizer = torch.optim.SGD([each for each in engine.parameters() if each.requires_grad], lr=0.5)
        F.cross_entropy(engine.train()(TOKENS).logits[0, :-1], TOKENS[0, 1:]).backward()
        optimizer.step()
        paceline.save(tmp_path / "own", engine, step=1)
        with torch.no_grad():
            return first, engine.eval()(TOKENS).logits, sum(shard.region.size for shard in engine.shards())

    found = run_virtual(work, 2)
    torch.testing.assert_close(found[0][0], logits(base_of("gpt2", path)), rtol=1e-12, atol=1e-12)
    whole = sum(each.numel() for each in base_of("gpt2", path).parameters())
    assert (max(each[2] for each in found) < 0.7 * whole) == (strategy == "fsdp")
    out = tmp_path / "adapters"
    for call in (
        ["export", str(tmp_path / "own"), str(out), "--format", "peft"],
        ["merge", str(tmp_path / "own"), "m"],
    ):
        call[2] = str(tmp_path / call[2])
        result = CliRunner().invoke(app, ["checkpoint", *call])
        assert result.exit_code == 0, result.output
    for model in (peft.PeftModel.from_pretrained(base_of("gpt2", path), out), base_of("gpt2", tmp_path / "m")):
        torch.testing.assert_close(logits(model), found[0][1], rtol=1e-10, atol=1e-10)
    assert json.loads((out / "adapter_config.json").read_text())["target_modules"] == ["c_attn", "c_fc", "c_proj"]


def test_a_new_head_has_the_classes_of_the_call(folder: Any) -> None:
    def work(comm: VirtualCommunicator) -> Any:
        model = paceline.load(folder("bert"), fresh=["classifier"], classes=["no", "maybe", "yes", "always"])
        engine = paceline.parallelize(model, comm, "zero1")
        return engine(TOKENS).logits.shape, model.config.id2label[3]

    assert run_virtual(work, 2)[1] == ((1, 4), "always")


@pytest.fixture(scope="module")
def saved(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that PEFT itself has written."""
    path = tmp_path_factory.mktemp("theirs")
    settings = peft.LoraConfig(r=2, lora_alpha=6, use_rslora=True, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base_of("llama", folder("llama")), settings).save_pretrained(path)
    return path


def changed(saved: Path, to: Path, **values: Any) -> Path:
    shutil.copytree(saved, to)
    config = to / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **values}))
    return to


def test_a_folder_of_pefts_own_begins_a_run(folder: Any, saved: Path, tmp_path: Path) -> None:
    lora = {"path": str(saved)}
    config = config_of("llama", folder("llama"), lora=lora)
    theirs = peft.PeftModel.from_pretrained(base_of("llama", folder("llama")), saved)
    expected = logits(theirs)

    def work(comm: VirtualCommunicator) -> torch.Tensor:
        engine = build_trainer(config, comm).parts.engine
        with torch.no_grad():
            found: torch.Tensor = engine.eval()(TOKENS).logits
        return found

    torch.testing.assert_close(run_virtual(work, 2)[0], expected, rtol=1e-10, atol=1e-10)
    # The run needs the folder no more when it is exported or sampled.
    out = export(open_checkpoint(run(config, tmp_path)), tmp_path / "out", ExportOptions(is_peft=True))
    assert json.loads((out / "adapter_config.json").read_text())["lora_alpha"] == pytest.approx(6 * 2**0.5)


def test_what_cannot_be_begun_with_is_told(folder: Any, saved: Path, tmp_path: Path) -> None:
    llama = folder("llama")

    def told(**lora: Any) -> str:
        with pytest.raises(ConfigError) as problem:
            config_of("llama", llama, lora=lora)
        return str(problem.value)

    assert "No such file" in told(path=str(tmp_path / "nowhere"))
    assert "use_dora = True: plain LORA is read" in told(path=str(changed(saved, tmp_path / "dora", use_dora=True)))
    assert "peft_type = LOHA" in told(path=str(changed(saved, tmp_path / "loha", peft_type="LOHA")))
    assert "r = 0, lora_alpha = 6" in told(path=str(changed(saved, tmp_path / "rank", r=0)))
    assert "model.lora.rank = 4 with model.lora.path" in told(path=str(saved), rank=4)
    with pytest.raises(ConfigError, match="adapters belong to the weights"):
        config_of("llama", llama, lora={"path": str(saved)}, pretrained=False)
    with pytest.raises(RankFailedError, match="fits no linear layer"):  # of another model
        begun(config_of("gpt2", folder("gpt2"), lora={"path": str(saved)}))
    with pytest.raises(RankFailedError, match=r"is \[2, 16\], and .*q_proj.lora_a of the model \[3, 16\]"):
        begun(config_of("llama", llama, lora={"path": str(changed(saved, tmp_path / "other", r=3))}))
    headed = changed(saved, tmp_path / "headed")
    tensors = load_file(headed / "adapter_model.safetensors")
    save_file({**tensors, "base_model.model.lm_head.weight": torch.ones(24, 16)}, headed / "adapter_model.safetensors")
    with pytest.raises(RankFailedError, match=r"none that trains: name it in model.fresh"):
        begun(config_of("llama", llama, lora={"path": str(headed)}))


def test_what_cannot_be_loaded_or_merged_is_told(folder: Any, tmp_path: Path) -> None:
    checkpoint = run(config_of("llama", folder("llama"), ranks=1, lora={}), tmp_path)
    with pytest.raises(UsageError, match="is a checkpoint of Paceline"):
        paceline.load(checkpoint)
    with pytest.raises(ConfigError, match="has no config"):
        paceline.load(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match=r"did you mean model\.fresh"):
        paceline.load(folder("llama"), fesh=["lm_head"])

    def told(*call: str) -> str:
        result = CliRunner().invoke(app, ["checkpoint", *call])
        assert result.exit_code, result.output
        return str(result.exception)

    assert "has no adapters" in told("merge", str(checkpoint), str(tmp_path / "out"))
    assert "has no adapters" in told("export", str(checkpoint), str(tmp_path / "out"), "--format", "peft")
    assert "leave one of them out" in told("export", str(checkpoint), "out", "--format", "peft", "--optimizer")
    assert not (tmp_path / "out").exists()
