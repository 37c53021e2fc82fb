"""Which layers of a model are split, and how: a plan of name patterns, as data.

A pattern is compared with the last parts of a module's name, part by part, and ``*`` stands for any text within one:
``layers.*.attention.query`` fits ``model.layers.3.attention.query``. A rule gives what it fits one of these roles:

    input      a split part begins here: the module's first argument is the whole stream
    column     a linear layer with some of the outputs       row        one with some of the inputs: a split part ends
    shared     whole parameters inside a split part, that work on some of the heads
    embedding  has some rows of the vocabulary               head       the output layer, with the same rows
    between    whole parameters between split parts, that work on a part of the sequence under sequence parallelism
    positions  an embedding of positions, between split parts
    begin      before this module the sequence is whole, under sequence parallelism      end   behind it again

A plan without begin and end splits the sequence from the embedding to the output layer. A model whose code between
looks at the sequence's length has them around its blocks, and pays one all-reduce and one all-gather more in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

from torch import nn

from paceline.errors import UsageError
from paceline.models.lora import matches

Role = Literal["input", "column", "row", "shared", "embedding", "head", "between", "positions", "begin", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """What becomes of the modules that a pattern fits."""

    pattern: str
    role: Role
    heads: str | None = None  # split between heads: the attribute of the module above that says how wide one is
    groups: int = 1  # matrices that lie side by side in the weight, each of them split
    head_parts: int = 1  # matrices of which each head has its rows side by side, so that heads are that much wider
    resized: tuple[str, ...] = ()  # attributes that count what is split: a rank's are its share
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Rules for a family of models. Of the rules for layers, the first that fits a module counts."""

    name: str
    rules: tuple[SplitRule, ...]

    def fitting(self, model: nn.Module, *roles: Role) -> Iterator[tuple[str, nn.Module, SplitRule]]:
        """Iterates over the modules of these roles, with their names and rules."""
        rules = [rule for rule in self.rules if rule.role in roles]
        for name, module in model.named_modules():
            found = next((rule for rule in rules if matches(name, rule.pattern)), None)
            if found is not None:
                yield name, module, found

    def missing(self, model: nn.Module) -> list[str]:
        """Returns the patterns that fit no module, and are not optional."""
        names = [name for name, _ in model.named_modules()]
        return [
            rule.pattern
            for rule in self.rules
            if not rule.is_optional and not any(matches(name, rule.pattern) for name in names)
        ]


def plan_for(model: nn.Module) -> TensorPlan:
    """Returns the ready plan that fits a model. Raises UsageError that says what the nearest lacks."""
    lacks = [(plan.missing(model), plan) for plan in READY_PLANS]
    missing, plan = min(lacks, key=lambda row: len(row[0]) / len(row[1].rules))
    if not missing:
        return plan
    known = ", ".join(plan.name for plan in READY_PLANS)
    raise UsageError(
        f"there is no tensor-parallel plan for {type(model).__name__}: the nearest is {plan.name!r}, and "
        f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''} fit none of its modules\n"
        f"  a plan says by name which layers are split; ready are those for {known}\n"
        "  give a TensorPlan with a rule for each linear layer inside its blocks, or set parallel.tensor = 1"
    )


def _rules(prefix: str = "", **names: str) -> Iterator[SplitRule]:
    """Makes rules from the names of each role, written as one text; ``?`` marks what some models lack.

    ``heads`` are column layers that are split between heads.
    """
    for role, text in names.items():
        for name in text.split():
            yield SplitRule(
                pattern=prefix + name.rstrip("?"),
                role="column" if role == "heads" else cast("Role", role),
                heads="head_dim" if role == "heads" else None,
                is_optional=name.endswith("?"),
            )


GPT_PLAN = TensorPlan(
    name="paceline GPT",
    rules=(
        *_rules(
            "layers.*.",
            input="attention mlp",
            heads="attention.query attention.key attention.value",
            column="mlp.gate? mlp.up",
            row="attention.output mlp.down",
        ),
        *_rules(embedding="token_embedding", positions="position_embedding?", head="head?"),
        *_rules(between="layers.*.attention_norm layers.*.mlp_norm norm"),
    ),
)

LLAMA_PLAN = TensorPlan(
    name="Llama",
    rules=(
        *_rules(
            "layers.*.",
            input="self_attn mlp",
            heads="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            column="mlp.gate_proj mlp.up_proj",
            row="self_attn.o_proj mlp.down_proj",
            shared="self_attn.q_norm? self_attn.k_norm?",
        ),
        *_rules(embedding="embed_tokens", head="lm_head?"),
        *_rules(between="layers.*.input_layernorm layers.*.post_attention_layernorm norm"),
        *_rules(begin="layers.0", end="norm"),
    ),
)

GPT2_PLAN = TensorPlan(
    name="GPT-2",
    rules=(
        SplitRule(pattern="h.*.attn", role="input", resized=("num_heads", "embed_dim", "split_size")),
        *_rules(input="h.*.mlp"),
        SplitRule(pattern="h.*.attn.c_attn", role="column", heads="head_dim", groups=3),
        *_rules("h.*.", row="attn.c_proj mlp.c_proj", column="mlp.c_fc"),
        *_rules(embedding="wte", head="lm_head?", between="h.*.ln_1 h.*.ln_2 ln_f", begin="h.0", end="ln_f"),
    ),
)

GPT_NEOX_PLAN = TensorPlan(
    name="GPT-NeoX",
    rules=(
        SplitRule(pattern="attention.query_key_value", role="column", heads="head_size", head_parts=3),
        *_rules(
            "layers.*.",
            input="attention mlp",
            column="mlp.dense_h_to_4h",
            row="attention.dense mlp.dense_4h_to_h",
            between="input_layernorm post_attention_layernorm",
        ),
        *_rules(embedding="embed_in", head="lm_head? embed_out?", between="final_layer_norm"),
        *_rules(begin="layers.0", end="final_layer_norm"),
    ),
)

READY_PLANS = (GPT_PLAN, LLAMA_PLAN, GPT2_PLAN, GPT_NEOX_PLAN)
