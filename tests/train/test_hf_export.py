"""From a run to text, and to a folder that ``from_pretrained`` and a tokenizer load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.tools.outgoing import ExportOptions, export
from paceline.cli.app import app
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import config_from_dict
from paceline.errors import UsageError
from paceline.run.worker import make_hooks
from paceline.train.assemble import build_trainer
from paceline.train.sampling import SampleOptions, open_language_model, sample
from paceline.train.survive.recovery import StopRequest

CPU = torch.device("cpu")
TEXT = "to be or not to be, that is the question\n" * 20
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_llama(kv_heads: int = 1) -> Any:
    """Makes a model of the library, as a factory of the user's would."""
    import transformers  # here: to load it takes seconds

    config = transformers.LlamaConfig(
        **SIZES,
        num_key_value_heads=kv_heads,
        vocab_size=24,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a small Llama."""
    path = tmp_path_factory.mktemp("hf") / "llama"
    torch.manual_seed(0)
    make_llama().save_pretrained(path)
    return path


def save(tmp_path: Path, model: dict[str, Any], strategy: str = "fsdp") -> Path:
    """Trains two steps on two ranks; returns the checkpoint."""
    (tmp_path / "text.txt").write_text(TEXT)
    config = config_from_dict(
        {
            "name": "run",
            "model": model,
            "data": {"kind": "text", "path": str(tmp_path / "text.txt"), "tokens": "char", "context": 8},
            "train": {"steps": 2, "global_batch": 4},
            "optim": {"lr": 0.05},
            "parallel": {"ranks": 2, "strategy": strategy, "device": "cpu"},
            "comm": {"backend": "virtual"},
        }
    )

    def work(comm: VirtualCommunicator) -> None:
        build_trainer(config, comm, hooks=make_hooks(config, tmp_path, StopRequest())).run()

    run_virtual(work, 2)
    return tmp_path / "checkpoints" / "step-00000002"


@pytest.fixture(scope="module")
def gpt_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of a GPT, which tests only read."""
    return save(tmp_path_factory.mktemp("gpt"), MODELS["gpt"])


MODELS: dict[str, dict[str, Any]] = {
    "adapters": {"kind": "hf", "lora": {"rank": 2, "targets": ["q_proj", "o_proj"]}},
    "factory": {"kind": "factory", "factory": f"{__name__.rpartition('.')[2]}:make_llama"},
    "gpt": {"kind": "gpt", "layers": 2, "heads": 2, "width": 16, "context": 8},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_exported_loaded_and_sampled(
    name: str, folder: Path, gpt_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model = MODELS[name]
    own = tmp_path / "model"
    if model["kind"] == "hf":
        shutil.copytree(folder, own)
        model = {**model, "path": str(own)}
    path = gpt_checkpoint if name == "gpt" else save(tmp_path, model)
    shutil.rmtree(own, ignore_errors=True)  # the checkpoint has all that it takes
    checkpoint = open_checkpoint(path)
    language = open_language_model(checkpoint, CPU)
    found = sample(language, "to be", SampleOptions(tokens=4, temperature=0))
    out = export(checkpoint, tmp_path / "out", ExportOptions(is_hugging_face=True))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokens = tokenizer("to be")["input_ids"]
    assert tokens == language.tokenizer.encode("to be")
    assert tokenizer.decode(tokens) == "to be"
    logits = [m(torch.tensor([tokens])) for m in (language.model, theirs.eval())]
    first, second = (getattr(each, "logits", each) for each in logits)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert found[0] == int(second[0, -1].argmax())
    assert not any("lora" in name for name in theirs.state_dict())
    # The prompt has 5 tokens, and the context 8 or 16: the window moves in the middle.
    drawn = [SampleOptions(tokens=15, seed=3, uses_cache=uses) for uses in (True, False)]
    lengths: list[int] = []
    language.model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    assert sample(language, "to be", drawn[0]) == sample(language, "to be", drawn[1])
    assert lengths[: language.context - 4] == [5] + [1] * (language.context - 5)
    assert lengths[15 : 15 + language.context - 4] == list(range(5, language.context + 1))


def test_the_same_seed_writes_the_same_text(gpt_checkpoint: Path) -> None:
    language = open_language_model(open_checkpoint(gpt_checkpoint), CPU)
    one, two, other = (sample(language, "to ", SampleOptions(tokens=12, seed=seed)) for seed in (1, 1, 2))
    assert one == two != other
    assert len(one) == 12
    likely = sample(language, "to ", SampleOptions(tokens=12, top_k=1))
    assert likely == sample(language, "to ", SampleOptions(tokens=12, temperature=0))
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        sample(language, "", SampleOptions())


@pytest.mark.some(1)
@pytest.mark.parametrize("spread", ["fsdp", "tensor"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_ranks_that_hold_parts_write_the_same_text(
    name: str, spread: Any, gpt_checkpoint: Path, tmp_path: Path
) -> None:
    path = gpt_checkpoint
    if name == "llama":
        make_llama(kv_heads=2).save_pretrained(tmp_path / "llama")
        path = save(tmp_path, {"kind": "hf", "path": str(tmp_path / "llama")})
    options = SampleOptions(tokens=8, seed=1)  # behind a prompt of 3: the GPT's context of 8 moves
    alone = sample(open_language_model(open_checkpoint(path), CPU), "to ", options)
    held: list[int] = []

    def work(comm: VirtualCommunicator) -> list[int]:
        language = open_language_model(open_checkpoint(path), CPU, comm, spread)
        assert language.engine is not None
        held.append(sum(shard.region.size for shard in language.engine.shards()))
        return sample(language, "to ", options)

    assert run_virtual(work, 2) == [alone, alone]
    whole = sum(each.numel() for each in open_language_model(open_checkpoint(path), CPU).model.parameters())
    assert max(held) < 0.8 * whole


def test_a_run_without_a_vocabulary_writes_no_text(gpt_checkpoint: Path) -> None:
    manifest = json.loads((gpt_checkpoint / "manifest.json").read_text())
    names = manifest["tensors"]
    assert any("files/tokenizer" in str(name) for name in names)
    checkpoint = open_checkpoint(gpt_checkpoint)
    tensors = {name: each for name, each in checkpoint.manifest.tensors.items() if not name.startswith("files/")}
    object.__setattr__(checkpoint.manifest, "tensors", tensors)
    with pytest.raises(UsageError, match="does not say what its tokens stand for"):
        open_language_model(checkpoint, CPU)


def test_the_command_writes_text(gpt_checkpoint: Path) -> None:
    command = ["sample", str(gpt_checkpoint.parents[1]), "--prompt", "to be", "--tokens", "6", "--seed", "3"]
    plain = CliRunner().invoke(app, command)
    assert plain.exit_code == 0, plain.output
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert len(found["tokens"]) == 6
    assert plain.output == f"to be{found['text']}\n"


@pytest.mark.exhaustive
def test_the_command_writes_with_processes(gpt_checkpoint: Path) -> None:
    call = ["sample", str(gpt_checkpoint), "--prompt", "to ", "--tokens", "6", "--json"]
    alone, together = (
        json.loads(CliRunner().invoke(app, [*call, *more], catch_exceptions=False).stdout)
        for more in ([], ["--ranks", "2", "--device", "cpu"])
    )
    assert alone == together
