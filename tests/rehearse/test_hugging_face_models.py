"""Architectures of transformers, small and with random values: each is predicted, or by a stand-in that is told of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cluster.detect import Machine
from paceline.config import Config, config_from_dict
from paceline.errors import UsageError
from paceline.models.measured import KnownValues, answering
from paceline.rehearse.dryrun.expected import expect_by_dry_run
from paceline.rehearse.dryrun.parts import with_stand_in
from paceline.rehearse.prediction import predict
from paceline.train.assemble import build_workload
from paceline.train.resolve import sample_flops
from paceline.units import GIB

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "rotary_dim"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_inner"), 64),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_head"), 8),
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TRACED = (
    *("llama", "gpt2", "mixtral", "gpt_neox", "opt", "biogpt", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi"),
    *("phi3", "bloom", "falcon", "mpt", "gptj", "codegen", "gpt_bigcode", "starcoder2", "stablelm", "persimmon"),
    *("cohere", "olmo", "olmo2", "granite", "glm", "nemotron", "helium", "smollm3", "ministral", "qwen2_moe"),
    *("qwen3_moe", "olmoe", "granitemoe", "xglm", "mamba", "rwkv", "rembert", "roformer", "bert", "ernie"),
)
# A mixture that reads how many tokens each expert got, and two whose float32 buffers meet bf16 weights.
STANDS_IN = {"jetmoe": "it reads a value", "minimax": "scalar type", "openai-gpt": "scalar type"}
Folder = Callable[..., Config]


@pytest.fixture
def made(tmp_path: Path) -> Folder:
    """Makes the folder of a small model, and a config that trains it."""

    def make(kind: str, task: str = "causal_lm", data: Any = None, **more: Any) -> Config:
        import transformers  # here: to load it takes seconds

        known = transformers.AutoConfig.for_model(kind).to_dict()
        sizes = {name: size for name, size in {**SIZES, **more}.items() if name in known or name in more}
        transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
        tokens = {"kind": "synthetic_tokens", "vocab_size": 64, "context": 16, "samples": 32}
        values = {
            "name": kind,
            "model": {"kind": "hf", "path": str(tmp_path), "pretrained": False, "task": task},
            "data": data or tokens,
            "train": {"steps": 10, "global_batch": 4},
            "parallel": {"ranks": 2, "strategy": "ddp"},
        }
        return config_from_dict(values, "values")

    return make


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", TRACED)
@pytest.mark.filterwarnings("ignore")  # what the library thinks of tiny sizes
def test_an_architecture_is_predicted_kernel_by_kernel(made: Folder, kind: str) -> None:
    found = predict(made(kind), "2x h100-sxm")
    assert (found.rough, found.fits) == ("", True)
    assert found.seconds > 0
    assert 0 < found.mfu < 1


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", STANDS_IN)
@pytest.mark.filterwarnings("ignore")
def test_one_that_cannot_be_traced_is_predicted_by_a_gpt_and_the_output_says_so(made: Folder, kind: str) -> None:
    config = made(kind)
    found = predict(config, "2x h100-sxm")
    assert found.seconds > 0
    assert found.rough.startswith("a rough figure, of a GPT with 2 layers of width 32 and as many parameters")
    assert STANDS_IN[kind] in found.rough
    assert found.rough in found.to_json()["outside_calibration"]
    parameters = sum(each.numel() for each in build_workload(config).model.parameters())
    fp32_states = 14 if found.program.dtype == "bf16" else 16  # bf16 weights, fp32 masters and two moments
    held = found.memory["parameters"] + found.memory["optimizer"]
    assert held == pytest.approx(fp32_states * parameters, rel=0.1)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_mlp_of_a_stand_in_is_so_wide_that_both_have_as_many_parameters(made: Folder, is_tied: bool) -> None:
    from paceline.rehearse.dryrun.recorder import no_answer

    config = made("llama", tie_word_embeddings=is_tied)

    def work(asked: Config) -> Config:
        if asked is config:
            raise no_answer("it reads a value", "at model.py:1")
        return asked

    found: Any = with_stand_in(config, work)[0].model
    parameters = sum(each.numel() for each in build_workload(config).model.parameters())
    products = found.layers * found.width * (4 * found.width + 2 * found.mlp_width)
    ends = found.vocab_size * found.width * (1 if is_tied else 2)
    assert (found.layers, found.width, found.heads, found.vocab_size, found.tied) == (2, 32, 4, 64, is_tied)
    assert abs(products + ends - parameters) <= found.layers * found.width  # rounded to a whole feature


def test_a_model_of_images_is_predicted_too(made: Folder) -> None:
    images = {"kind": "synthetic_images", "samples": 32, "classes": 4, "size": 8}
    config = made("vit", "image_classification", images, image_size=8, patch_size=4)
    assert predict(config, "2x h100-sxm").rough == ""


def test_one_without_a_stand_in_is_refused_without_advice_to_edit_the_library(made: Folder) -> None:
    from paceline.rehearse.dryrun.recorder import no_answer

    images = {"kind": "synthetic_images", "samples": 32, "classes": 4, "size": 8}
    config = made("vit", "image_classification", images, image_size=8, patch_size=4)

    def refuse(_: Config) -> None:
        raise no_answer("it reads a value", "at vit.py:1")

    with pytest.raises(UsageError, match=r"it reads a value, at vit.py:1\n.*transformers.*\n  paceline simulate"):
        with_stand_in(config, refuse)


def test_a_run_has_a_prediction(made: Folder) -> None:
    host = Machine(processor="a processor", cores=2, memory_bytes=8.0 * GIB)
    found = expect_by_dry_run(made("llama").with_values("parallel", device="cpu"), host)
    assert (found.reason, found.fitted) == ("", True)
    assert found.step_s is not None


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_flops_of_a_sample_are_counted(made: Folder, kind: str) -> None:
    config = made(kind)
    work = build_workload(config)
    flops = sample_flops(config, work.data, work.model)
    weights = sum(each.numel() for name, each in work.model.named_parameters() if "embed" not in name)
    assert flops is not None
    assert 0.8 < flops / (6 * weights * 16) < 1.4  # attention comes on top


class Asks(nn.Module):
    """Reads what follows from shapes, then what somebody has written to, or what a layer computes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> bool:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape)
        if self.how == "positions":
            return bool((positions.diff() != 1).any()) or 7 in positions[:, [-1, 0]]
        if self.how == "written":
            hidden = torch.zeros(4, dtype=torch.int64, device=x.device)
            hidden[1:].fill_(3)
            return bool(hidden.any())
        if self.how == "random":
            return bool(torch.randint(2, (1,), device=x.device))
        return bool((x > 0).any())


def test_positions_have_values_on_the_meta_device_and_nothing_else_has() -> None:
    x = torch.empty(2, 8, device="meta")
    with answering(KnownValues()):
        assert Asks("positions")(x) is True
        assert Asks("positions")(x[:, :5]) is False
        for how in ("written", "random", "computed"):
            with pytest.raises(RuntimeError, match="meta"):
                Asks(how)(x)
