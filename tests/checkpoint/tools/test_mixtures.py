"""Mixtures of experts go to folders of Hugging Face and come back; what has no counterpart is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.manifest import MODEL, State, prefixed
from paceline.checkpoint.tools.audit import audit
from paceline.checkpoint.tools.incoming import open_incoming, save_incoming
from paceline.checkpoint.tools.outgoing import ExportOptions, export
from paceline.checkpoint.writer import CheckpointWriter
from paceline.cli.app import app
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config.sections import GPTModelConfig, gpt_shape
from paceline.engines.apply import parallelize
from paceline.errors import CheckpointError, UsageError
from paceline.models.gpt import GPT

EXPERTS = 12  # more than ten: sorted as texts, expert 10 would come before expert 2
PLAIN: dict[str, Any] = {
    "kind": "gpt",
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "width": 16,
    "mlp_width": 12,
    "context": 16,
    "vocab_size": 24,
    "experts": EXPERTS,
    "active": 2,
}
SIX = {"expert_width": 6}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("mixtral", {}),
    "tied": ("mixtral", {"tied": True, "kv_heads": 4}),
    "as the router weighs": ("qwen2_moe", {"expert_width": 12, "router": {"renormalise": False}}),
    "shared": ("qwen2_moe", {"shared_experts": 2, "expert_width": 6}),
    "norms of heads": ("qwen3_moe", {"qk_norm": "head", "expert_width": 6, "dense_layers": 1}),
    "wide heads": ("qwen3_moe", {"qk_norm": "head", "head_dim": 6, "rotary_base": 1e6, "norm_eps": 1e-3, **SIX}),
    "norms over heads": ("olmoe", {"qk_norm": "whole", "router": {"renormalise": False}}),
    "norms over heads, tied": ("olmoe", {"qk_norm": "whole", "tied": True, "kv_heads": 4}),
    "dense, norms of heads": ("qwen3", {"qk_norm": "head", "experts": None, "active": None}),
    "dense first": ("qwen2_moe", {"dense_layers": 1, "expert_width": 6, "router": {"renormalise": False}}),
}
CLASSIC: dict[str, Any] = {"norm": "layer", "mlp": "gelu", "positions": "learned", "tied": True, "kv_heads": 4}
TOKENS = torch.randint(24, (2, 16), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.filterwarnings("ignore")  # what the library thinks of tiny sizes


def make_model(**model: Any) -> GPT:
    shape = gpt_shape(GPTModelConfig.model_validate({**PLAIN, **model}))
    assert shape is not None
    torch.manual_seed(5)
    gpt = GPT(shape).double()
    with torch.no_grad():  # as if trained: all experts and routers far from one another
        for parameter in gpt.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return gpt


def saved(folder: Path, **model: Any) -> Path:
    """Returns the checkpoint of a mixture, as two ranks write it."""

    def work(comm: Communicator) -> None:
        engine = parallelize(make_model(**model), comm, "fsdp")
        about = {"config": {"model": {**PLAIN, **model}}}
        state = State(step=1, position=0, shards=prefixed(MODEL, engine.shards()), about=about)
        CheckpointWriter(folder, comm).save(state)

    run_virtual(work, 2)
    return folder / "step-00000001"


def exported(path: Path, out: Path) -> Path:
    return export(open_checkpoint(path), out, ExportOptions(is_hugging_face=True))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model.eval()(TOKENS)
    return found if isinstance(found, torch.Tensor) else found.logits


def theirs(folder: Path) -> Any:
    import transformers  # here: to load it takes seconds

    options = {"dtype": torch.float64, "experts_implementation": "eager", "output_loading_info": True}
    model, odd = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(odd.values()), odd
    return model


def taken_in(folder: Path, into: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns what an import says of the model, and its tensors."""
    incoming = open_incoming(folder, "safetensors")
    made = open_checkpoint(save_incoming(incoming, into, "hf"))
    return dict(incoming.keys), {name: made.read(MODEL + name) for name in made.shapes(MODEL)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_computes_the_same_there_and_comes_back(kind: str, tmp_path: Path) -> None:
    family, model = KINDS[kind]
    out = exported(saved(tmp_path, **model), tmp_path / "hf")
    ours = make_model(**model)
    library = theirs(out)
    assert library.config.model_type == family
    torch.testing.assert_close(logits(library), logits(ours), rtol=1e-6, atol=1e-6)  # its norms compute in float32
    keys, state = taken_in(out, tmp_path / "start")
    assert_same(state, dict(ours.state_dict()))
    assert gpt_shape(GPTModelConfig.model_validate(keys)) == ours.config
    # As the library saves it, one by one and as it has it in memory.
    for stacked in (False, True):
        path = tmp_path / f"again-{stacked}"
        library.save_pretrained(path, save_original_format=not stacked)
        again, state = taken_in(path, tmp_path / f"start-{stacked}")
        assert_same(state, dict(ours.state_dict()))
        assert again == keys


@pytest.mark.parametrize("kind", ["norms of heads", "wide heads", "norms over heads", "dense, norms of heads"])
def test_gradients_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    """The library's gradients come in as a folder of weights would, and so have our names."""
    _, model = KINDS[kind]
    out = exported(saved(tmp_path, **model), tmp_path / "hf")
    ours, library = make_model(**model).eval(), theirs(out).eval()
    targets = TOKENS.roll(-1, 1).flatten()
    for each in (ours, library):
        found = each(TOKENS)
        found = found if isinstance(found, torch.Tensor) else found.logits
        torch.nn.functional.cross_entropy(found.flatten(0, 1), targets, reduction="sum").backward()
    save_file({name: each.grad for name, each in library.named_parameters()}, out / "model.safetensors")
    _, gradients = taken_in(out, tmp_path / "gradients")
    expected = {name: each.grad for name, each in ours.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, value in gradients.items():  # the library's norms and routers compute in float32
        torch.testing.assert_close(
            value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}"
        )


@pytest.mark.parametrize(
    "model",
    [
        {"qk_norm": "head", "shared_experts": 1},
        {"qk_norm": "whole", "dense_layers": 1},
        {"qk_norm": "whole", "head_dim": 6},
        {"qk_norm": "whole", "experts": None, "active": None},
    ],
    ids=lambda model: ", ".join(model),
)
def test_norms_without_a_counterpart_are_refused(model: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="head: Qwen 3, without shared experts; whole: OLMoE") as told:
        exported(saved(tmp_path, **model), tmp_path / "hf")
    assert f"qk_norm = {model['qk_norm']}" in str(told.value)


def test_a_classic_gpt_with_norms_of_heads_is_no_gpt2(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="qk_norm head, 4 features of a head"):
        exported(saved(tmp_path, **NO_EXPERTS, **CLASSIC, qk_norm="head"), tmp_path / "hf")


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("norms of heads", "model.layers.1.mlp.gate.weight", "mlp.gate.weight is [8, 16], and config.json says 12"),
        ("norms over heads", "model.layers.1.mlp.gate.weight", "mlp.gate.weight is [8, 16], and config.json says 12"),
    ],
)
def test_a_router_of_another_shape_is_refused(kind: str, name: str, words: str, tmp_path: Path) -> None:
    out = exported(saved(tmp_path, **KINDS[kind][1]), tmp_path / "hf")
    with pytest.raises(CheckpointError) as told:
        open_incoming(changed(out, lambda t: t.update({name: torch.zeros(8, 16)})), "safetensors")
    assert words in str(told.value)


def test_a_folder_that_clips_queries_is_refused(tmp_path: Path) -> None:
    out = exported(saved(tmp_path, **KINDS["norms over heads"][1]), tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"clip_qkv = 8\.0, not none"):
        open_incoming(changed(out, clip_qkv=8.0), "safetensors")


def changed(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None, **settings: object
) -> Path:
    """Changes the tensors and the config of a folder in place."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


SPARSE = "model.layers.1.block_sparse_moe"


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (lambda t: t.pop(f"{SPARSE}.experts.3.w1.weight"), {}, f"missing: {SPARSE}.experts.3.w1.weight [12, 16]"),
        (
            lambda t: t.update({f"{SPARSE}.experts.2.w2.weight": torch.zeros(16, 8)}),
            {},
            f"shape: {SPARSE}.experts.2.w2.weight is [16, 8], and those beside it [16, 12]",
        ),
        (
            lambda t: t.update({f"{SPARSE}.gate.weight": torch.zeros(8, 16)}),
            {},
            f"{SPARSE}.gate.weight is [8, 16], and config.json says 12 experts",
        ),
        (lambda _: None, {"num_local_experts": 16}, f"missing: {SPARSE}.experts.15.w2.weight [16, 12]"),
        (lambda _: None, {"num_local_experts": 8}, "experts.gate_up_proj is [12, 24, 16], and config.json says 8"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}),
            {},
            "model.layers.0.self_attn.q_proj.bias has no counterpart in the package's GPT",
        ),
        (lambda _: None, {"rms_norm_eps": -1.0}, "config.json is not that of a mixtral"),
        (lambda _: None, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = linear, not default"),
        (lambda _: None, {"sliding_window": 8}, "sliding_window = 8, not none"),
        (lambda _: None, {"hidden_act": "gelu"}, "hidden_act = gelu, not silu"),
        (
            lambda _: None,
            {"model_type": "gemma"},
            "llama, mixtral, qwen2_moe, qwen3, qwen3_moe, olmoe and gpt2 are known",
        ),
        (lambda _: None, {"num_hidden_layers": "two"}, "config.json is not that of a mixtral"),
    ],
)
def test_a_folder_that_is_not_what_its_config_says_is_refused(
    change: Any, settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder = changed(exported(saved(tmp_path), tmp_path / "hf"), change, **settings)
    with pytest.raises(CheckpointError) as told:
        open_incoming(folder, "safetensors")
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shared_expert_intermediate_size": 9}, "shared_expert_intermediate_size = 9, not 6"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers = [1], not [0]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2, not 1"),
    ],
)
def test_other_layers_of_a_mixture_are_refused(settings: dict[str, object], words: str, tmp_path: Path) -> None:
    out = exported(saved(tmp_path, **KINDS["shared"][1]), tmp_path / "hf")
    with pytest.raises(CheckpointError) as told:
        open_incoming(changed(out, **settings), "safetensors")
    assert words in str(told.value)


def test_a_gate_of_the_shared_expert_is_refused(tmp_path: Path) -> None:
    out = exported(saved(tmp_path, **KINDS["shared"][1]), tmp_path / "hf")
    gate = "model.layers.1.mlp.shared_expert_gate.weight"
    with pytest.raises(CheckpointError, match=f"{gate} is not zero"):
        open_incoming(changed(out, lambda t: t.update({gate: torch.ones(1, 16)})), "safetensors")


@pytest.mark.parametrize(
    "router",
    [{"scores": "sigmoid"}, {"scale": 2.5}, {"groups": 4, "active_groups": 2}],
    ids=lambda each: next(iter(each)),
)
def test_routers_without_a_counterpart_are_refused(router: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mixtures of Hugging Face have softmax, 1\.0 and 1"):
        exported(saved(tmp_path, router=router), tmp_path / "hf")


def test_classic_mixtures_have_no_counterpart(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="GPT-2 has layer, gelu, learned, tied, all heads"):
        exported(saved(tmp_path, **CLASSIC), tmp_path / "hf")


NO_EXPERTS: dict[str, Any] = {"experts": None, "active": None}
DENSE = {"current": NO_EXPERTS, "classic": {**NO_EXPERTS, **CLASSIC}}


def upcycle(source: Path, into: Path, *options: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns what the command says of the model, and the tensors of its checkpoint."""
    command = ["checkpoint", "upcycle", str(source), str(into), "--experts", "4", "--json", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    made = open_checkpoint(into / "step-00000000")
    assert audit(made.path).is_good
    return json.loads(result.output)["model"], {name: made.read(MODEL + name) for name in made.shapes(MODEL)}


@pytest.mark.parametrize("dense_layers", [0, 1])
@pytest.mark.parametrize("active", [2, 3])
@pytest.mark.parametrize("kind", DENSE)
def test_an_upcycled_mixture_computes_what_the_dense_model_did(
    kind: str, active: int, dense_layers: int, tmp_path: Path
) -> None:
    dense = make_model(**DENSE[kind])
    source = saved(tmp_path / "dense", **DENSE[kind])
    options = ("--active", str(active), "--dense-layers", str(dense_layers))
    keys, state = upcycle(source, tmp_path / "start", *options)
    shape = gpt_shape(GPTModelConfig.model_validate(keys))
    assert shape is not None
    mixture = GPT(shape).double()
    mixture.load_state_dict(state)
    torch.testing.assert_close(logits(mixture), logits(dense), rtol=1e-12, atol=1e-12)
    routers = [value for name, value in state.items() if "router" in name]
    assert len({float(router.sum()) for router in routers}) == len(routers) == 2 - dense_layers
    assert all(0.01 < float(router.std()) < 0.03 for router in routers)


def test_upcycling_tells_the_keys_that_are_not_the_default(tmp_path: Path) -> None:
    keys, _ = upcycle(saved(tmp_path, **NO_EXPERTS), tmp_path / "start")
    assert (keys["kind"], keys["experts"], keys["active"]) == ("gpt", 4, 2)
    assert not {"router", "compile", "dense_layers"} & set(keys)
    assert None not in keys.values()


def test_routers_follow_the_seed(tmp_path: Path) -> None:
    source = saved(tmp_path / "dense", **DENSE["current"])
    (_, first), (_, again), (_, other) = (
        upcycle(source, tmp_path / f"to-{place}", "--seed", seed) for place, seed in enumerate("778")
    )
    router = "layers.0.mlp.router.weight"
    assert torch.equal(first[router], again[router])
    assert not torch.equal(first[router], other[router])


def test_a_folder_of_llama_is_upcycled_and_goes_to_mixtral(tmp_path: Path) -> None:
    folder = exported(saved(tmp_path / "dense", **DENSE["current"]), tmp_path / "hf")
    upcycle(folder, tmp_path / "start", "--active", "2")
    mixtral = theirs(exported(tmp_path / "start" / "step-00000000", tmp_path / "mixtral"))
    torch.testing.assert_close(logits(mixtral), logits(make_model(**DENSE["current"])), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ({}, (), "of 2 layers, those from 0 on have no dense MLP"),
        (DENSE["current"], ("--dense-layers", "2"), "of 2 layers, those from 2 on have no dense MLP"),
        (DENSE["current"], ("--active", "5"), "--active 5 of --experts 4"),
    ],
)
def test_what_cannot_be_upcycled_is_refused(
    model: dict[str, Any], options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    command = ["checkpoint", "upcycle", str(saved(tmp_path, **model)), str(tmp_path / "start"), "--experts", "4"]
    result = CliRunner().invoke(app, [*command, *options])
    assert isinstance(result.exception, UsageError)
    assert words in str(result.exception)
    assert not (tmp_path / "start").exists()
