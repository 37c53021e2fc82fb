"""Models that are planned: from a config, from a Hugging Face config.json, and back to a config that trains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_plans import plan_of
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.cluster.devices import load_cluster
from paceline.config import Config, config_from_dict, load_config
from paceline.config.data_sections import known_shape
from paceline.config.yaml_text import dump_values
from paceline.data.datasets import DataShape
from paceline.errors import ConfigError, UsageError
from paceline.models.registry import build_model
from paceline.plan.model_shape import ModelShape
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import EngineMemory
from paceline.search.request import (
    planned_values,
    read_hugging_face,
    request_for,
    request_for_hugging_face,
    task_of,
    why_no_config,
    workload_as_written,
)
from paceline.search.search import Search, search, smallest_changes
from paceline.train.resolve import measure_config

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_7b.yaml"
CLUSTER = load_cluster("4x dgx-h100")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
# As published: mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen1.5-MoE-A2.7B, Qwen/Qwen3-30B-A3B.
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
OLMOE: dict[str, Any] = {  # allenai/OLMoE-1B-7B-0924
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "n_positions": 1024,
    "n_inner": None,
    "vocab_size": 50257,
}


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(CONFIG)


@pytest.fixture(scope="module")
def found(config: Config) -> Search:
    return search(replace(task_of(config, 32), need=EngineMemory.of(config)), CLUSTER)


def read(folder: Path, values: object) -> tuple[ModelShape, dict[str, Any]]:
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return read_hugging_face(path)


# Configs.


def test_the_shape_of_a_config_is_that_of_its_size(config: Config) -> None:
    task = task_of(config, 32)
    assert task.model.params == pytest.approx(6.74e9, rel=0.01)
    assert (task.global_batch, task.seq_len, task.compute, task.framework) == (256, 4096, "bf16", "compiled")


@pytest.mark.parametrize("name", ["digits", "resnet_images"])
def test_models_that_are_no_transformers_have_data_parallel_plans(name: str) -> None:
    config = load_config(CONFIG.parent / f"{name}.yaml")
    task = task_of(config, 8)
    assert task.model.is_sampled
    found = search(replace(task, need=EngineMemory.of(config)), load_cluster("dgx-h100"))
    assert {each.layout.strategy for each in found.ranked} == {"ddp", "zero1", "zero2", "fsdp"}
    assert all(each.layout.data == 8 for each in found.ranked)
    recomputed = {each.workload.recompute for each in search(task, CLUSTER, order="memory").ranked}
    assert recomputed == ({"none"} if name == "digits" else {"none", "selective", "full"})


def test_what_a_sample_costs_is_what_the_model_computes() -> None:
    """Formulas beside a count on tensors without values."""
    config = load_config(CONFIG.parent / "resnet_images.yaml")
    described, measured = describe_model(config, "cpu"), measure_config(config, "cpu")
    assert described is not None
    assert described.work is not None
    assert measured.work is not None
    assert measured.work.flops == described.work.flops
    assert measured.work.activations == described.work.activations
    assert measured.work.params == described.work.params
    assert measured.work.kind == "convolution"


def test_a_model_whose_sizes_nobody_says_is_refused() -> None:
    values = {"model": {"kind": "factory", "factory": "a:b"}, "data": {"kind": "factory", "factory": "c:d"}}
    with pytest.raises(UsageError, match=r"model\.kind = factory: what a sample costs is not known"):
        task_of(config_from_dict(values), 8)


def test_a_context_that_nobody_says_is_asked_for() -> None:
    model = {"kind": "gpt", "layers": 2, "heads": 2, "width": 32}
    data = {"kind": "factory", "factory": "nothing:here"}
    with pytest.raises(UsageError, match=r"set model\.context, or data\.context"):
        task_of(config_from_dict({"model": model, "data": data}), 8)


@pytest.mark.exhaustive
def test_every_plan_is_a_config_with_that_mesh_and_batch(config: Config, found: Search, tmp_path: Path) -> None:
    kinds = {}
    for each in found.ranked:
        layout = each.layout
        schedule = layout.schedule_name if layout.pipeline > 1 else ""
        kind = (layout.strategy, layout.pipeline > 1, schedule, layout.tensor > 1)
        kinds.setdefault((*kind, layout.offload.parts, layout.reshard_after_forward, layout.bucket_mb), each)
    assert len(kinds) > 25
    assert {schedule for _, _, schedule, *_ in kinds} == {"", "1f1b", "interleaved"}  # it is compiled
    assert {offload for *_, offload, _, _ in kinds} > {(), ("optimizer",)}
    for each in kinds.values():
        path = tmp_path / "plan.yaml"
        path.write_text(dump_values(planned_values(config, each.workload, CLUSTER)))
        planned = load_config(path)
        plan = plan_of(planned, ranks=32, train_samples=65536, eval_samples=1, node_ranks=8)
        axes = plan.layout.axes
        layout = each.layout
        assert axes.get("pipeline", 1) == layout.pipeline
        assert axes.get("tensor", 1) == layout.tensor
        assert axes.get("shard", 1) == layout.shards
        assert (plan.batch.microbatch, plan.batch.accumulate) == (layout.microbatch, layout.accumulate)
        assert workload_as_written(planned, found.task, CLUSTER) == each.workload


def test_what_belongs_to_another_machine_is_left_out_of_a_plan(config: Config, found: Search) -> None:
    asked = load_config(
        CONFIG, ["parallel.threads=4", "parallel.strategy=fsdp", "parallel.prefetch=2", "memory.offload=[optimizer]"]
    )
    ranked = (each for each in found.ranked if not each.layout.offload.is_any)
    chosen = next(each for each in ranked if each.layout.strategy == "zero1")
    values = planned_values(asked, chosen.workload, CLUSTER)
    assert "threads" not in values["parallel"]
    assert "prefetch" not in values["parallel"]
    assert "offload" not in values["memory"]
    assert values["model"] == config.model_dump(mode="json", exclude_unset=True)["model"]


def test_a_plan_that_the_config_forbids_is_refused(found: Search) -> None:
    asked = load_config(CONFIG, ["comm.compression.policy=topk"])
    split = next(each.workload for each in found.ranked if each.layout.tensor > 1)
    with pytest.raises(ConfigError, match=r"comm\.compression\.policy = topk"):
        planned_values(asked, split, CLUSTER)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], ["train.microbatch"]),
        (["train.accumulate=2", "parallel.data=32"], ["train.microbatch", "train.accumulate", "parallel.data"]),
    ],
)
def test_changes_that_make_a_config_fit_do_so(given: list[str], named: list[str], found: Search) -> None:
    asked = workload_as_written(load_config(CONFIG, given), found.task, CLUSTER)
    assert asked is not None
    changes = smallest_changes(asked, found, named=named)
    assert changes
    for change in changes:
        keys = [f"{key}={str(value).lower()}" for key, value in change.keys.items()]
        assert change.ranked is not None
        assert workload_as_written(load_config(CONFIG, [*given, *keys]), found.task, CLUSTER) == change.ranked.workload


@pytest.mark.parametrize(
    "override",
    ["parallel.strategy=auto", "parallel={pipeline: 2, schedule: gpipe}", "train.microbatch=auto", "parallel.tensor=3"],
)
def test_what_a_config_leaves_open_is_not_judged(override: str) -> None:
    asked = load_config(CONFIG, [override, *(["model.heads=33", "model.width=4224"] if "tensor" in override else [])])
    assert workload_as_written(asked, task_of(asked, 32), CLUSTER) is None


# Hugging Face.


def test_llama_is_read(tmp_path: Path) -> None:
    shape, values = read(tmp_path, LLAMA)
    assert shape.params == pytest.approx(8.03e9, rel=0.01)
    assert why_no_config(shape) == ""
    config = config_from_dict(values)
    assert task_of(config, 8).model == shape
    assert config.train.global_batch == 1024
    told = "a step of 1024 sequences (train.global_batch), sequences of 4096 tokens (data.context), bf16_master"
    dgx, asked = load_cluster("dgx-h100"), ["train.global_batch=1024", "train.precision=bf16"]
    assert request_for_hugging_face(LLAMA, dgx).assumed[0].startswith(told)
    assert request_for_hugging_face(LLAMA, dgx, asked).assumed == ("sequences of 4096 tokens (data.context)",)
    assert config.data.eval_fraction * 65536 == pytest.approx(1024, rel=0.01)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_shapes_like_llama_are_read(kind: str, tmp_path: Path) -> None:
    expected = replace(read(tmp_path, LLAMA)[0], qk_norm="head" if kind == "qwen3" else "none")
    assert read(tmp_path, {**LLAMA, "model_type": kind})[0] == expected


@pytest.mark.parametrize(
    ("values", "billions"),
    [
        ({"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64, "tied": 1}, 1.236),
        ({"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}, 7.24),
        (
            {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
            | {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tied": 1},
            0.494,
        ),
        (
            {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
            | {"num_attention_heads": 16, "head_dim": 128, "vocab_size": 151936, "tied": 1},
            0.596,
        ),
    ],
    ids=["Llama-3.2-1B", "Mistral-7B-v0.1", "Qwen2.5-0.5B", "Qwen3-0.6B"],
)
def test_published_models_have_their_parameters(values: dict[str, Any], billions: float, tmp_path: Path) -> None:
    values = {**LLAMA, "tie_word_embeddings": bool(values.pop("tied", 0)), **values}
    assert read(tmp_path, values)[0].params == pytest.approx(billions * 1e9, rel=0.003)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("values", "billions", "active", "why"),
    [
        (MIXTRAL, 46.7, 12.8, ""),
        (QWEN2_MOE, 14.3, 2.4, "its 60 experts have dense layers between them, or a shared one with a gate"),
        (QWEN3_MOE, 30.5, 3.0, ""),
        (OLMOE, 6.9, 1.2, ""),
    ],
    ids=["Mixtral-8x7B", "Qwen1.5-MoE", "Qwen3-30B-A3B", "OLMoE-1B-7B"],
)
def test_mixtures_of_experts_have_their_published_parameters(
    values: dict[str, Any], billions: float, active: float, why: str, tmp_path: Path
) -> None:
    shape, made = read(tmp_path, values)
    assert shape.params == pytest.approx(billions * 1e9, rel=0.005)
    assert shape.active_matmul_params == pytest.approx(active * 1e9, rel=0.03)
    assert why_no_config(shape) == why
    config = config_from_dict(made, overrides=["train.global_batch=16"])
    found = search(task_of(config, 16, shape if why else None), load_cluster("2x dgx-h100"), host_memory=1e9)
    assert max(each.layout.expert for each in found.ranked) > 1


SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 48, "vocab_size": 96, "max_position_embeddings": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3},
        {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"head_dim": 16, "mlp_only_layers": [0], "norm_topk_prob": True},
        {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ],
    ids=lambda each: each["model_type"],
)
def test_a_mixture_has_the_same_parameters_as_a_folder_a_plan_and_a_config(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Beside transformers' own model of the same config.json, and the GPT that the plan's config makes."""
    shape, values = read(tmp_path, {**SMALL, "tie_word_embeddings": False, **changes})
    with torch.device("meta"):
        folder = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert shape.params == matrices_of(folder)
    if not why_no_config(shape):
        config = config_from_dict(values)
        assert task_of(config, 1).model == shape
        with torch.device("meta"):
            assert matrices_of(build_model(config.model, shape_of_tokens(config))) == shape.params
        facts = describe_model(config, "cpu")
        assert facts is not None
        assert facts.expert_parameters == shape.num_sparse * shape.experts * shape.expert_params


def test_every_plan_with_experts_over_ranks_is_a_config(tmp_path: Path) -> None:
    _, values = read(tmp_path, {**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    config = config_from_dict(values, overrides=["train.global_batch=64", "data.samples=256", "data.eval_fraction=0.0"])
    dgx = load_cluster("dgx-h100")
    task = task_of(config, 8)
    found = search(replace(task, need=EngineMemory.of(config)), dgx)
    kinds = {(p.layout.strategy, p.layout.expert, p.layout.pipeline, p.layout.tensor): p for p in found.ranked}
    assert {2, 4, 8} <= {expert for _, expert, _, _ in kinds}
    for each in kinds.values():
        planned = config_from_dict(planned_values(config, each.workload, dgx))
        assert workload_as_written(planned, task, dgx) == each.workload
        assert planned.parallel.expert == each.layout.expert


def matrices_of(model: torch.nn.Module) -> int:
    """Counts parameters but for norms and biases, which a shape leaves out."""
    return sum(p.numel() for name, p in model.named_parameters() if "norm" not in name and not name.endswith("bias"))


def shape_of_tokens(config: Config) -> DataShape:
    known = known_shape(config.data)
    return DataShape(kind="tokens", vocab_size=known.vocab_size, context=known.context)


def test_what_differs_from_the_model_is_said() -> None:
    near = {**LLAMA, "model_type": "mistral", "sliding_window": 8192}
    dgx = load_cluster("dgx-h100")
    assert len(request_for_hugging_face(near, dgx).assumed) == 1
    longer = request_for_hugging_face(near, dgx, ["data.context=16384"]).assumed
    assert "a step of 1024 sequences" in longer[0]
    assert "16384 tokens, where the model's looks back 8192" in longer[1]
    every = {**near, "use_sliding_window": False}
    assert len(request_for_hugging_face(every, dgx, ["data.context=16384"]).assumed) == 1


def test_processors_are_planned_in_fp32() -> None:
    found = request_for_hugging_face(LLAMA, load_cluster("cpu-host"))
    assert found.config.train.precision == "fp32"
    (task,) = request_for_hugging_face(LLAMA, load_cluster("cpu-host"), ["train.precision=bf16"]).tasks
    assert task.compute == "bf16"


def test_a_vocabulary_that_only_the_text_knows_is_assumed() -> None:
    words = ["model.kind=gpt", "model.size=gpt-nano", "data.kind=text", "data.context=64", "train.global_batch=8"]
    dgx = load_cluster("dgx-h100")
    assert "a vocabulary of 256" in request_for(load_config(None, words), dgx).assumed[0]
    assert request_for(load_config(None, [*words, "model.vocab_size=512"]), dgx).assumed == ()


def test_gpt2_is_read(tmp_path: Path) -> None:
    shape, values = read(tmp_path, GPT2)
    assert shape.params == pytest.approx(124e6, rel=0.02)
    assert task_of(config_from_dict(values), 8).model == shape


def test_what_a_config_cannot_say_is_known(tmp_path: Path) -> None:
    bert, _ = read(tmp_path, {**LLAMA, "model_type": "bert", "num_key_value_heads": None})
    assert not bert.causal
    assert "both directions" in why_no_config(bert)
    wide, _ = read(tmp_path, {**LLAMA, "head_dim": 256})
    assert wide.query_width == 32 * 256
    assert why_no_config(wide) == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "lacks num_hidden_layers, num_attention_heads, intermediate_size"),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size = '4096'"),
        ({**LLAMA, "num_attention_heads": True}, "num_attention_heads = True"),
        ({**LLAMA, "num_attention_heads": 33}, "33 heads do not divide a width of 4096"),
        ({**LLAMA, "model_type": "lama"}, "did you mean llama"),
        ({**LLAMA, "num_local_experts": 8}, "a llama has no mixture of experts"),
        ({**LLAMA, "model_type": "mixtral"}, "lacks num_local_experts, num_experts_per_tok"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 8 experts"),
        ({**LLAMA, "num_key_value_heads": 5}, "5 heads of keys and values do not divide 32 heads"),
        ({**LLAMA, "vocab_size": 0, "hidden_size": None}, r"lacks hidden_size; vocab_size = 0 is no whole number"),
        ({"model_type": "resnet"}, "plans are for transformers"),
        ({name: value for name, value in LLAMA.items() if name != "model_type"}, "lacks model_type"),
        ({"name": "other"}, "not the config.json"),
        ([1], "holds a list"),
        ("{", "is no JSON"),
    ],
)
def test_files_that_are_no_transformer_are_refused(values: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, values)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_hugging_face(tmp_path / "none.json")
