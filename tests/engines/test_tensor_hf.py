"""Tensor parallelism of Hugging Face models, unchanged, against one plain process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import assert_near
from torch import nn

from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines.tensor.apply import apply_tensor_parallel
from paceline.engines.tensor.layers import SplitLogits
from paceline.engines.tensor.plans import plan_for, ready_plans
from paceline.errors import UsageError

TOLERANCE = 1e-10
STEPS = 3
VOCABULARY = 37
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
LLAMA = {
    **TOKENS,
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
GPT2 = {
    **TOKENS,
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
Values = dict[str, torch.Tensor]


def build(kind: str, config: str, **options: Any) -> nn.Module:
    import transformers as library  # here: to load it takes seconds, which every worker would pay

    model: nn.Module = getattr(library, kind)(getattr(library, config)(**options))
    return model


def llama(**options: Any) -> nn.Module:
    return build("LlamaForCausalLM", "LlamaConfig", **{**LLAMA, **options})


def gpt2(**options: Any) -> nn.Module:
    return build("GPT2LMHeadModel", "GPT2Config", **{**GPT2, **options})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama, tied, biases": lambda: llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama, a key head a query head": lambda: llama(num_key_value_heads=4),
    "qwen3": lambda: build("Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=8),
    "qwen2": lambda: build("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
    "mistral": lambda: build("MistralForCausalLM", "MistralConfig", **LLAMA),
    "gemma": lambda: build("GemmaForCausalLM", "GemmaConfig", **LLAMA, head_dim=8),
    "gpt_neox": lambda: build("GPTNeoXForCausalLM", "GPTNeoXConfig", **LLAMA),
    "phi": lambda: build("PhiForCausalLM", "PhiConfig", **{**LLAMA, "num_key_value_heads": 4}),
    "starcoder2": lambda: build("Starcoder2ForCausalLM", "Starcoder2Config", **LLAMA),
    "cohere": lambda: build("CohereForCausalLM", "CohereConfig", **LLAMA),
    "gpt2": gpt2,
    "gpt2, untied": lambda: gpt2(tie_word_embeddings=False),
}


EXPERTS = {**LLAMA, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
# Those that no plan of ours fits: the library's own says what to split.
BY_THE_LIBRARY: dict[str, Callable[[], nn.Module]] = {
    "phi3": lambda: build("Phi3ForCausalLM", "Phi3Config", **{**LLAMA, "pad_token_id": 0}),
    "olmo2": lambda: build("Olmo2ForCausalLM", "Olmo2Config", **LLAMA),
    "olmoe": lambda: build("OlmoeForCausalLM", "OlmoeConfig", **EXPERTS),
    "qwen2_moe": lambda: build("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **EXPERTS, mlp_only_layers=[1]),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(5)
    model = {**MODELS, **BY_THE_LIBRARY}[name]().double().train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the library's grouped products are not made for float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (3, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module) -> tuple[list[float], Values]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    losses, gradients = [], {}
    for step in range(STEPS):
        tokens, targets = batch(step)
        logits = model(input_ids=tokens).logits
        if isinstance(logits, SplitLogits):
            loss = logits.cross_entropy(targets)
        else:
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients


RANKS = {name: 4 if name in ("llama, a key head a query head", "gpt_neox", "gpt2") else 2 for name in MODELS}
# By default each plan, and of Llama's also what has norms of its own; other names share the code of these.
RANKS.update(dict.fromkeys(BY_THE_LIBRARY, 2))
BY_DEFAULT = {
    ("olmo2", False),
    ("qwen2_moe", False),
    ("phi", True),
    ("llama, tied, biases", True),
    ("qwen3", False),
    ("gpt_neox", True),
    ("gpt2, untied", False),
}


@pytest.mark.parametrize(
    ("name", "ranks", "is_sequence"),
    [
        pytest.param(name, ranks, each, marks=() if (name, each) in BY_DEFAULT else pytest.mark.exhaustive)
        for name, ranks in RANKS.items()
        for each in (False, True)
        if not (each and name in BY_THE_LIBRARY)
    ],
)
def test_a_model_trains_as_on_one_process(name: str, ranks: int, is_sequence: bool) -> None:
    plain = make(name)
    config = plain.config.to_dict()
    losses, gradients = train(plain)
    expected = plain.state_dict()

    def work(comm: VirtualCommunicator) -> tuple[list[float], Values, Values]:
        model = make(name)
        layout = apply_tensor_parallel(model, comm, sequence=is_sequence, gathers_logits=name == "gpt2, untied")
        found, own = train(model)
        assert model.config.to_dict() == config  # a config may belong to other models too
        whole = {key: layout.full(key, value, comm) for key, value in model.state_dict().items()}
        return found, whole, {key: layout.full(key, value, comm) for key, value in own.items()}

    # These cast to fp32 inside: norms, in which the gradients of parts of a sequence are added up, and routers.
    tolerance = 1e-6 if name in ("gemma", "cohere", "qwen2_moe", "olmoe") else TOLERANCE
    for found, whole, own in run_virtual(work, ranks):
        torch.testing.assert_close(found, losses, rtol=0, atol=tolerance)
        assert list(whole) == list(expected)
        assert list(own) == list(gradients)
        for values, others in ((whole, expected), (own, gradients)):
            for key, value in values.items():
                assert_near(value, others[key], tolerance, key)


def test_a_model_computes_its_own_loss_from_gathered_logits() -> None:
    tokens, _ = batch(0)
    plain = make("llama")
    expected = plain(input_ids=tokens, labels=tokens).loss

    def work(comm: VirtualCommunicator) -> torch.Tensor:
        model = make("llama")
        apply_tensor_parallel(model, comm, gathers_logits=True)
        return model(input_ids=tokens, labels=tokens).loss

    for loss in run_virtual(work, 2):
        torch.testing.assert_close(loss, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama, tied, biases", "gpt2"])
def test_a_model_computes_its_own_loss_from_split_logits(name: str) -> None:
    tokens, _ = batch(0)
    labels = tokens.clone()
    labels[0, :3] = -100

    def losses(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, Any]:
        mean = model(input_ids=tokens, labels=labels)
        total = model(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(7))
        return mean.loss, total.loss, mean.logits

    plain = make(name)
    mean, total, logits = losses(plain)
    exact = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())  # the library's is in fp32
    torch.testing.assert_close(exact.float(), mean)
    exact.backward()
    expected = {key: parameter.grad for key, parameter in plain.named_parameters()}

    def work(comm: VirtualCommunicator) -> None:
        model = make(name)
        layout = apply_tensor_parallel(model, comm)
        found, summed, split = losses(model)
        found.backward()
        assert isinstance(split, SplitLogits)
        torch.testing.assert_close(found, exact, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(summed.float(), total)
        for key, parameter in model.named_parameters():
            whole = layout.full(key, parameter.grad, comm)
            torch.testing.assert_close(whole, expected[key], rtol=0, atol=TOLERANCE)

    run_virtual(work, 2)


def test_the_ready_plans_are_found() -> None:
    assert plan_for(make("qwen3")) is ready_plans()["Llama"]
    assert plan_for(make("gpt2")) is ready_plans()["GPT-2"]


def test_fused_heads_that_do_not_divide() -> None:
    models = [make("gpt_neox") for _ in range(3)]

    def work(comm: VirtualCommunicator) -> None:
        with pytest.raises(UsageError, match=r"query_key_value has 4 heads of 12 features, which do not divide"):
            apply_tensor_parallel(models[comm.rank], comm)

    run_virtual(work, 3)


def test_heads_that_do_not_divide() -> None:
    models = [make("gpt2") for _ in range(3)]

    def work(comm: VirtualCommunicator) -> None:
        with pytest.raises(
            UsageError,
            match=r"h\.0\.attn\.c_attn has 4 heads of 4 features, which do not divide by the tensor degree 3",
        ):
            apply_tensor_parallel(models[comm.rank], comm)

    run_virtual(work, 3)


def test_what_the_librarys_plan_does_not_make_sure_stays_whole_and_is_told() -> None:
    """Of a plan that leaves out the row layer, and of one with a style that nobody knows."""

    def work(comm: VirtualCommunicator, key: str, style: str | None) -> list[str]:
        model: Any = make("phi3")
        model._tp_plan = {name: kept for name, kept in model._tp_plan.items() if key not in name}
        model._tp_plan |= {} if style is None else {f"model.layers.*.{key}": style}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layout = apply_tensor_parallel(model, comm, gathers_logits=True)
        assert layout.splits["model.layers.0.self_attn.qkv_proj.weight"].dim is None
        assert layout.splits["model.layers.0.mlp.down_proj.weight"].dim == 1
        return [str(each.message).splitlines()[0] for each in caught]

    (missing, _), (unknown, _) = (
        run_virtual(lambda comm, style=style: work(comm, "self_attn.o_proj", style), 2) for style in (None, "spread")
    )
    what = "model.layers.*.self_attn stays whole on every tensor rank: "
    assert missing == [what + "column and row layers in it do not belong together"]
    assert unknown == [what + "it has a layer of the style 'spread'"]


def test_a_norm_over_all_heads_is_no_norm_of_each_head() -> None:
    def work(comm: VirtualCommunicator) -> None:
        model: Any = make("qwen3")
        model.config.base_model_tp_plan = model._tp_plan = None
        model.model.layers[1].self_attn.q_norm.weight = nn.Parameter(torch.ones(32, dtype=torch.float64))
        with pytest.raises(UsageError, match=r"layers\.1\.self_attn\.q_norm works on all heads together"):
            apply_tensor_parallel(model, comm)

    run_virtual(work, 2)


def test_the_librarys_plan_splits_no_sequence() -> None:
    def work(comm: VirtualCommunicator) -> None:
        with pytest.raises(UsageError, match=r"lies between the split layers: set parallel\.sequence_parallel = false"):
            apply_tensor_parallel(make("olmo2"), comm, sequence=True)

    run_virtual(work, 2)


def test_split_logits_are_scaled_and_refuse_what_needs_them_whole() -> None:
    tokens, _ = batch(0)
    plain: Any = make("cohere")
    expected = plain(input_ids=tokens).logits
    assert plain.logit_scale != 1

    def work(comm: VirtualCommunicator) -> None:
        model = make("cohere")
        apply_tensor_parallel(model, comm)
        logits = model(input_ids=tokens).logits
        torch.testing.assert_close(logits.gather(), expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close((logits / 4).gather(), expected / 4, rtol=0, atol=TOLERANCE)
        with pytest.raises(UsageError, match=r"torch\.tanh of split logits"):
            torch.tanh(logits)

    run_virtual(work, 2)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # the compiler looks at gradients that are not there
@pytest.mark.parametrize("name", ["olmo2", "qwen2_moe"])
def test_compiled_blocks_of_the_librarys_plan_compute_the_same(name: str) -> None:
    tokens, targets = batch(0)

    def loss_of(model: Any) -> torch.Tensor:
        logits = model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    plain = make(name)
    loss_of(plain).backward()

    def work(comm: VirtualCommunicator) -> None:
        model: Any = make(name)
        layout = apply_tensor_parallel(model, comm, gathers_logits=True)
        for block in model.model.layers:
            block.compile(backend="eager")
        loss_of(model).backward()
        for key, parameter in model.named_parameters():
            whole = layout.full(key, parameter.grad, comm)
            assert_near(whole, plain.get_parameter(key).grad, 1e-6, key)

    run_virtual(work, 2)
