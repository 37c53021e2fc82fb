"""Models of Hugging Face, unchanged, on two ranks that share each sequence, against one plain process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.errors import RankFailedError
from paceline.train.loss import IGNORED

TOKENS, VOCABULARY = 19, 29
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gpt2": ("GPT2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "opt": ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "doge": ("Doge", {}),
    "gemma2": ("Gemma2", {"head_dim": 4, "sliding_window": 32}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "mamba": ("Mamba", {"state_size": 4}),
    "llama4": (
        "Llama4",
        {"attention_chunk_size": 8, "head_dim": 4, "num_local_experts": 2, "intermediate_size_mlp": 24},
    ),
}
Values = dict[str, Tensor]


class Exact(nn.RMSNorm):
    """The library's own computes in float32 whatever it is given."""


def build(family: str, **changes: Any) -> nn.Module:
    import transformers as library  # here: to load it takes seconds, which every worker would pay

    library.logging.set_verbosity(logging.ERROR)
    name, options = (FAMILIES | MIXTURES | OTHERS)[family]
    if family in MIXTURES:  # the usual way, a grouped product, takes no float64
        changes = {"experts_implementation": "eager", "num_experts_per_tok": 2, **changes}
    kind = getattr(library, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")
    settings = getattr(library, f"{name}{'Text' if name == 'Llama4' else ''}Config")
    torch.manual_seed(0)
    model: nn.Module = kind(settings(**{**SIZES, **options, **changes}))
    for above in list(model.modules()):
        for part, module in above.named_children():
            if type(module).__name__.endswith("RMSNorm"):
                setattr(above, part, Exact(module.weight.shape[0], eps=1e-6))
    return model.double().train()


def make_batch() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(3, VOCABULARY, (3, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    targets = drawn[:, 1:].clone()
    targets[0, :8] = IGNORED
    return drawn[:, :-1], targets


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    found = model(inputs)
    logits = getattr(found, "logits", found)
    if hasattr(logits, "cross_entropy"):  # split over tensor ranks
        return logits.cross_entropy(targets, IGNORED), (targets != IGNORED).sum()
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, (targets != IGNORED).sum()


def one_process(model: nn.Module) -> Values:
    total, count = loss_of(model, *make_batch())
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_ranks(engine: Engine[Any]) -> Values:
    batch, ranks = make_batch(), engine.groups.context.size
    scale = ranks / (batch[1] != IGNORED).sum().item()
    engine.run_microbatches([batch], lambda model, part: loss_of(model, *part), scale)
    return {name: value for name, value in engine.full_gradients().items() if value is not None}


SPREADS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "fsdp": (2, {"strategy": "fsdp", "checkpoint_activations": "full"}),
    "tensor": (4, {"tensor": 2}),
    "pipeline": (4, {"pipeline": 2}),
    "ulysses": (2, {"context_method": "ulysses"}),
}


def check_gradients(family: str, ranks: int, spread: dict[str, Any], **changes: Any) -> None:
    expected = one_process(build(family, **changes))

    def work(comm: Communicator) -> Values:
        return on_ranks(parallelize(build(family, **changes), comm, context_ranks=2, **spread))

    for found in run_virtual(work, ranks):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.some(4)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "opt"])
@pytest.mark.parametrize("spread", SPREADS)
def test_gradients_are_those_of_one_process(family: str, spread: str) -> None:
    check_gradients(family, *SPREADS[spread])


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("family", [*MIXTURES, "opt"])
def test_a_mixture_and_a_decoder_that_is_called_past_its_base_learn_as_one_process(family: str, method: str) -> None:
    """Each expert's gradient comes from the tokens of all ranks. OPT calls its decoder itself: it has places too."""
    check_gradients(family, 2, {"context_method": method})


def test_the_loss_of_the_library_takes_what_was_cut() -> None:
    inputs, targets = make_batch()
    plain = build("llama")
    expected = plain(input_ids=inputs, labels=targets, shift_labels=targets).loss

    def work(comm: Communicator) -> tuple[Tensor, bool]:
        model = build("llama")
        engine = parallelize(model, comm, context_ranks=2)
        own, labels = engine.cut(inputs, targets)
        per_rank = (targets != IGNORED).sum() / comm.size
        found = engine(input_ids=own, labels=labels, shift_labels=labels, num_items_in_batch=per_rank)
        found.loss.backward()
        comm.all_reduce(loss := found.loss.detach(), "avg").wait()
        with torch.no_grad(), engine.inside(None):  # whole rows, with the mask that belongs to them
            model.eval()
            mask = torch.ones_like(inputs)
            mask[0, :4] = 0
            alone = build("llama").eval()
            same = torch.equal(model(inputs, attention_mask=mask).logits, alone(inputs, attention_mask=mask).logits)
        return loss, same

    for loss, same in run_virtual(work, 2):
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-6)  # of logits in float32
        assert same


def padded(engine: Engine[Any]) -> None:
    inputs, mask = engine.cut(make_batch()[0], torch.ones(3, TOKENS))
    engine(inputs, attention_mask=mask)


def placed(engine: Engine[Any]) -> None:
    places = torch.arange(TOKENS).expand(3, -1) % 8  # three documents in each row, by the library's own convention
    inputs, places = engine.cut(make_batch()[0], places)
    engine(inputs, position_ids=places)


def balanced(engine: Engine[Any]) -> None:
    inputs, targets = engine.cut(*make_batch())
    engine(inputs, labels=targets, shift_labels=targets, output_router_logits=True)


@pytest.mark.parametrize(
    ("family", "changes", "use", "told"),
    [
        ("mistral", {"sliding_window": 8}, on_ranks, "with a sliding window of 8 tokens, in rows of 19"),
        ("llama", {}, padded, "LlamaModel with attention_mask, where ranks share each sequence"),
        ("llama", {}, placed, "LlamaModel with position_ids, where ranks share each sequence"),
        ("mixtral", {}, balanced, "MixtralModel with output_router_logits, where ranks share each sequence"),
        ("mixtral", {"output_router_logits": True}, on_ranks, "MixtralModel with output_router_logits"),
        ("mixtral", {"router_jitter_noise": 0.1}, on_ranks, "MixtralForCausalLM with jitter_noise"),
        ("bloom", {}, on_ranks, "BloomForCausalLM, which computes its attention itself"),
        ("doge", {}, on_ranks, "DogeAttention with a mask or bias of its own"),
        ("gemma2", {}, on_ranks, "Gemma2Attention with softcap"),
        ("lfm2", {}, on_ranks, "a Conv1d sees the tokens of its own rank alone"),
        ("mamba", {}, on_ranks, "a Conv1d sees the tokens of its own rank alone"),
        ("llama4", {}, on_ranks, "Llama4ForCausalLM with layers of chunked_attention"),
    ],
    ids=[
        *("window", "mask", "places", "router", "router's config", "noise", "ALiBi", "bias", "softcap", "convolution"),
        *("recurrence", "chunks"),
    ],
)
def test_what_cannot_be_is_told(family: str, changes: dict[str, Any], use: Any, told: str) -> None:
    with pytest.raises(RankFailedError, match=told):
        run_virtual(lambda comm: use(parallelize(build(family, **changes), comm, context_ranks=2)), 2)


def test_in_rows_that_fit_into_a_window_it_leaves_nothing_out() -> None:
    check_gradients("mistral", 2, {}, sliding_window=TOKENS)
