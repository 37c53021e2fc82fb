"""What a mixture of experts may look like: which of the keys of ``model`` go together."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.errors import Problem
from paceline.plan.model_shape import ModelShape, RouterRule
from paceline.plan.rule_case import nearest_divisor, no_effect

_KEYS = ("active", "shared_experts", "expert_width", "dense_layers")


def expert_problems(shape: ModelShape) -> Iterator[Problem]:
    """Yields what does not fit: keys without experts, how many there are, their groups, what they take."""
    if shape.experts:
        yield from _count_problems(shape)
        yield from _router_problems(shape)
        return
    for key in _KEYS:
        if value := getattr(shape, key):
            yield _without_experts(f"model.{key}", value)
    if shape.router != RouterRule():
        yield _without_experts("model.router", "{...}")


def _without_experts(key: str, value: object) -> Problem:
    return no_effect(key, value, "without model.experts", "it belongs to a mixture of experts", "set model.experts = 8")


def _count_problems(shape: ModelShape) -> Iterator[Problem]:
    experts, active = shape.experts, shape.active
    if active > experts:
        what = f"model.active = {active} is more than model.experts = {experts}"
        fix = f"set model.active = {experts}, or model.experts = {active}"
        yield Problem(what=what, rule="a token passes through each of its experts once", fix=fix)
    if active == 1 < experts and shape.router.renormalise:
        what = "model.active = 1 with model.router.renormalise = true"
        rule = "the weight of a token's only expert is always 1 then, so that the loss teaches the router nothing"
        yield Problem(what=what, rule=rule, fix="set model.router.renormalise = false, or model.active = 2")
    if shape.dense_layers >= shape.layers:
        what = f"model.dense_layers = {shape.dense_layers} of model.layers = {shape.layers}"
        rule, fix = "the layers behind the dense ones have experts", f"set model.dense_layers = {shape.layers - 1}"
        yield Problem(what=f"{what} leaves no layer with experts", rule=rule, fix=fix)


def _router_problems(shape: ModelShape) -> Iterator[Problem]:
    rule, experts = shape.router, shape.experts
    if experts % rule.groups:
        what = f"model.experts = {experts} is not a multiple of model.router.groups = {rule.groups}"
        fix = f"try model.router.groups = {nearest_divisor(experts, rule.groups)}"
        yield Problem(what=what, rule="groups have the same number of experts", fix=fix)
    elif rule.active_groups > rule.groups:
        what = f"model.router.active_groups = {rule.active_groups} is more than model.router.groups = {rule.groups}"
        fix = f"set model.router.active_groups = {rule.groups}"
        yield Problem(what=what, rule="a token looks into some of the groups, or all", fix=fix)
    elif (found := rule.active_groups * experts // rule.groups) < shape.active <= experts:
        what = f"model.router.active_groups = {rule.active_groups} of {rule.groups} hold {found} of {experts} experts"
        fix = f"set model.router.active_groups = {-(-shape.active * rule.groups // experts)}, or model.active = {found}"
        yield Problem(what=what, rule=f"a token finds its model.active = {shape.active} in them", fix=fix)
    if 0 < rule.capacity < 1:
        yield Problem(
            what=f"model.router.capacity = {rule.capacity:g} drops {1 - rule.capacity:.0%} of all choices at least",
            rule="an expert that takes less than its fair share drops tokens however evenly they are spread",
            fix="try model.router.capacity = 1.25, or 0 for no limit",
        )
    if rule.balance == "none" and rule.balance_weight != RouterRule().balance_weight:
        what = f"model.router.balance_weight = {rule.balance_weight:g} with model.router.balance = none"
        fix = "set model.router.balance = aux, or leave the weight out"
        yield Problem(what=what, rule="it belongs to the auxiliary loss, or to the bias", fix=fix)
