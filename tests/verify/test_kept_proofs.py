"""Kept figures of proofs: how errors are measured and bounded, what one process computes, where a mistake is found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from kept_figures import assert_kept, through_json, told
from torch import nn

from paceline.config import config_from_dict
from paceline.verify import measure as measures
from paceline.verify.case import ConfigCase, FunctionCase, Settings, check_settings, complete, cut, num_samples
from paceline.verify.certificate import certify, locate, verify
from paceline.verify.measure import (
    Bound,
    Errors,
    absolute,
    bound_for,
    compare,
    difference,
    merge,
    noise_bound,
    relative,
)
from paceline.verify.runs import ActivationRecorder, CoarseParts, StepValues, prepare, run_reference, split_state

NAN, INF = float("nan"), float("inf")


def figures() -> dict[str, object]:
    parts = (
        _of_measures(),
        _of_cases(),
        _of_settings(),
        _of_references(),
        _of_recorders(),
        _of_places(),
        _of_certificates(),
    )
    return {name: value for part in parts for name, value in part}


def test_proofs_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def values(shift: float = 0.0, **changes: Any) -> StepValues:
    given: dict[str, Any] = {
        "loss": numbers(2.0 + shift)[0],
        "norm": numbers(3.0)[0],
        "gradients": {"a.weight": numbers(1.0, -2.0 + shift), "b.weight": None},
        "parameters": {"a.weight": numbers(5.0 + shift, 7.0)},
        "start": {"a.weight": numbers(4.0, 9.0)},
        "buffers": {"n": numbers(1.0)},
    }
    return StepValues(**(given | changes))


def _of_measures() -> Iterator[tuple[str, object]]:
    pairs = [
        (None, None),
        (None, numbers(1.0)),
        (numbers(1.0), None),
        (numbers(1.0), numbers(1.0, 2.0)),
        (numbers(), numbers()),
    ]
    pairs += [
        (numbers(1.0, 2.0), numbers(1.5, 2.0)),
        (numbers(NAN), numbers(NAN)),
        (numbers(NAN), numbers(1.0)),
        (numbers(INF), numbers(INF)),
    ]
    pairs += [(numbers(INF, 1.0), numbers(INF, 2.0)), (numbers(-INF), numbers(INF))]
    yield "differences", [str(difference(*pair)) for pair in pairs]
    ours = {"a": numbers(1.0, 2.0), "b": numbers(0.001), "c": None, "d": numbers(3.0), "f": numbers(1.0)}
    expected = {
        "a": numbers(1.0, 2.5),
        "b": numbers(0.002),
        "c": None,
        "d": numbers(3.0),
        "e": numbers(1.0),
        "f": numbers(INF),
    }
    yield "absolute", {name: str(each) for name, each in absolute(ours, expected, {}).items()}
    finite = {name: each for name, each in expected.items() if name != "f"}
    for floor in (0.0, 0.01, 1.0):
        yield (
            f"relative {floor}",
            {name: str(each) for name, each in relative(ours, finite, {"a": numbers(10.0)}, floor).items()},
        )
    yield "nothing", relative({"a": numbers(1.0)}, {"a": numbers(0.0)}, {}, 1.0)
    for measure in (None, partial(relative, floor=0.01)):
        found = [compare(values(shift), values(), measure) for shift in (0.0, 0.5)]
        yield f"compared {measure is None}", [*found, merge(found), merge([])]
    yield (
        "largest",
        [replace(Errors(), **{name: 1.0}).largest for name in ("loss", "gradients", "norm", "parameters", "buffers")],
    )
    for precision in ("fp32", "bf16", "fp16", "bf16_master", "fp8"):
        for tolerance in (None, 0.5):
            settings = Settings.of(ranks=2, accumulate=3, precision=precision, tolerance=tolerance)
            yield f"bound {precision} {tolerance}", [bound_for(settings, pieces) for pieces in (1, 6)]
    bounds = [Bound(tolerance=1.0, reason=""), Bound(tolerance=1.0, reason="", floor=0.5)]
    yield (
        "bounds",
        [[bound.is_relative, bound.measure({"a": numbers(3.0)}, {"a": numbers(2.0)}, {})] for bound in bounds],
    )


def _of_cases() -> Iterator[tuple[str, object]]:
    batch = (torch.arange(7), {"x": torch.arange(14).reshape(7, 2), "n": 3, "s": torch.tensor(5)})
    yield (
        "samples",
        [num_samples(batch), told(lambda: num_samples((torch.ones(2), torch.ones(3)))), told(lambda: num_samples(3))],
    )
    for parts in (1, 3, 9):
        pieces = [cut(batch, part, parts) for part in range(parts)]
        yield (
            f"cut {parts}",
            [
                None if piece is None else [piece[0].tolist(), piece[1]["x"].flatten().tolist(), piece[1]["n"]]
                for piece in pieces
            ],
        )
    sections: dict[str, Any] = {
        "train": {"global_batch": 4, "steps": 2, "seed": 3},
        "parallel": {"device": "cpu", "ranks": 1},
    }
    mlp = {"model": {"kind": "mlp", "hidden_dim": 8, "dropout": 0.5}, "data": {"kind": "digits"}, **sections}
    gpt = {
        "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 8, "context": 6},
        "data": {"kind": "synthetic_tokens", "context": 6, "samples": 32, "vocab_size": 11},
        **sections,
    }
    for name, config in (("mlp", mlp), ("gpt", gpt)):
        for as_blocks in (False, True):
            case = ConfigCase(config_from_dict(config), batch=5, layers_as_blocks=as_blocks)
            model = case.make_model()
            drops = [module.p for module in prepare(case, torch.float64)[0].modules() if isinstance(module, nn.Dropout)]
            own = getattr(model, "blocks", None)
            yield (
                f"case {name} {as_blocks}",
                [len(own()) if callable(own) else 0, drops, "_data" in case.__getstate__()],
            )
        inputs, targets = case.make_batch(0)
        again = case.make_batch(0)
        others = case.make_batch(1)
        yield (
            f"batch {name}",
            [
                list(inputs.shape),
                str(inputs.dtype),
                bool(torch.equal(inputs, again[0])),
                bool(torch.equal(inputs, others[0])),
                list(targets.shape),
            ],
        )
        _ = case._data
        yield f"state {name}", "_data" in case.__getstate__()
    shuffled = ConfigCase(config_from_dict({**mlp, "data": {"kind": "digits", "shuffle": False}}), batch=5)
    yield "not shuffled", [[int(each) for each in shuffled.make_batch(step)[1]] for step in (0, 1)]


def _of_settings() -> Iterator[tuple[str, object]]:
    cases: list[dict[str, Any]] = [
        {},
        {"strategy": "zero3"},
        {"strategy": "hybrid"},
        {"strategy": "hybrid", "ranks": 3},
        {"strategy": "hybrid", "ranks": 8, "tensor": 2},
        {"strategy": "auto"},
        {"strategy": "zzz", "precision": "fp3", "backend": "x"},
        {"ranks": 0, "steps": 0, "clip": 0.0, "tolerance": 0.0},
        {"clip": -1.0, "tolerance": INF},
        {"ranks": 1, "steps": 1, "clip": None, "tolerance": 1e-3},
        {"pipeline": 2, "ranks": 3},
        {"tensor": 8, "ranks": 4},
        {"precision": "fp16"},
        {"clip": NAN},
    ]
    for place, options in enumerate(cases):
        settings: Any = told(lambda options=options: complete(Settings.of(**options)))
        if isinstance(settings, str):
            yield f"settings {place}", settings
            continue
        found = [
            settings.data_ranks,
            settings.accumulate,
            settings.is_exact,
            str(settings.dtype),
            settings.layout.shard_ranks,
            settings.strategy,
        ]
        yield f"settings {place}", [found, told(lambda settings=settings: check_settings(settings))]
    yield "batches", [told(lambda batch=batch: check_settings(Settings(), batch=batch)) for batch in (None, 0, 1)]
    yield "no such name", told(lambda: Settings.of(hats=3))


class _Model(nn.Module):
    def __init__(self, *, coarse: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if norm else None
        self.drop = nn.Dropout(0.5)
        self.coarse = coarse
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                angles = torch.arange(parameter.numel(), dtype=torch.float64) * 0.61 + number
                parameter.copy_(angles.sin().reshape(parameter.shape))  # rounded: the same on every machine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x if self.norm is None else self.norm(x)
        x = torch.tanh(x.float()).to(x.dtype) if self.coarse else torch.tanh(x)
        return self.second(self.drop(x))


def _batch(step: int) -> Any:
    inputs = (torch.arange(21, dtype=torch.float64) * (0.3 + step)).cos().reshape(7, 3)
    return inputs, (torch.arange(7) + step) % 2


def _case(**options: Any) -> FunctionCase:
    return FunctionCase(model=partial(_Model, **options), batch=_batch, loss=nn.functional.cross_entropy)


def _sums(tensors: Any) -> object:
    return {
        name: None
        if each is None
        else [float(each.sum()), float((each.flatten() * torch.arange(1, each.numel() + 1)).sum())]
        for name, each in sorted(tensors.items())
    }


def _of_references() -> Iterator[tuple[str, object]]:
    """What one process computes, in float64."""
    for name, options, asked in (
        ("plain", {}, {}),
        ("clipped", {}, {"clip": 0.01}),
        ("unclipped", {}, {"clip": None}),
        ("norm", {"norm": True}, {"accumulate": 2}),
        ("recorded", {}, {"record_step": 1}),
    ):
        settings = Settings.of(ranks=2, steps=2, **asked)
        found = run_reference(_case(**options), settings)
        last = found.steps[-1]
        yield (
            f"reference {name}",
            [
                found.samples,
                found.pieces,
                found.coarse.unit,
                [float(step.loss) for step in found.steps],
                [float(step.norm) for step in found.steps],
                _sums(last.gradients),
                _sums(last.parameters),
                _sums(last.start),
                {key: float(each.double().sum()) for key, each in last.buffers.items()},
                {number: [call for call, _ in calls] for number, calls in last.activations.items()},
            ],
        )
    settings = Settings.of(ranks=2, steps=2, accumulate=2)
    first = run_reference(_case(), settings)
    followed = run_reference(_case(), settings, [replace(step, factor=2.0) for step in first.steps])
    yield (
        "followed",
        [
            followed.pieces,
            [float(step.loss) for step in followed.steps],
            _sums(followed.steps[1].start),
            _sums(followed.steps[1].gradients),
        ],
    )
    lost = replace(first.steps[0], parameters={name: each * NAN for name, each in first.steps[0].parameters.items()})
    yield "lost", [float(step.loss) for step in run_reference(_case(), settings, [lost, first.steps[1]]).steps]

    def nothing(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.sum() * NAN

    class Drawn(_Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand(2)

    yield "no number", told(lambda: run_reference(FunctionCase(model=_Model, batch=_batch, loss=nothing), settings))
    drawn = told(
        lambda: run_reference(FunctionCase(model=Drawn, batch=_batch, loss=nn.functional.cross_entropy), settings)
    )
    yield "drawn", str(drawn).partition("losses")[0]
    coarse = run_reference(_case(coarse=True), settings)
    calls: list[int] = []

    class Unsteady(_Model):
        """Gives no number every second time."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x) * (NAN if len(calls) % 2 else 1.0)

    unsteady = FunctionCase(model=Unsteady, batch=_batch, loss=nn.functional.cross_entropy)
    yield "unsteady", str(told(lambda: run_reference(unsteady, settings))).partition("losses")[0]
    yield "coarse", [coarse.coarse.unit, coarse.coarse.dtype, list(coarse.coarse.names)]
    pieces = replace(coarse, pieces=4)
    found_bound = noise_bound(settings, coarse, pieces)
    other = noise_bound(settings, coarse, replace(coarse, pieces=1))
    far = replace(coarse, steps=[replace(coarse.steps[0], loss=coarse.steps[0].loss * 2)])
    yield "noise", [found_bound, other, noise_bound(settings, coarse, far), noise_bound(settings, first, first)]
    plain = measures.errors_by_step(
        first, [first.steps, [replace(step, loss=step.loss + 1) for step in first.steps]], absolute
    )
    yield "by step", [each.loss for each in plain]


def _of_recorders() -> Iterator[tuple[str, object]]:
    model = _Model().double().eval()
    recorder = ActivationRecorder(model)
    for _ in range(4):
        model(_batch(0)[0])
    kept = recorder.stop([1, 3])
    model(_batch(0)[0])
    yield "kept", {number: [name for name, _ in calls] for number, calls in kept.items()}
    yield "none kept", len(ActivationRecorder(model).stop([]))
    coarse = CoarseParts(model)
    with coarse:
        torch.ones(2) + 1.0
        torch.ones(2, dtype=torch.bfloat16) * 2
        torch.ones(2, dtype=torch.float64) * 2
    yield "coarse parts", [coarse.unit, coarse.dtype, list(coarse.names), len(model.first._forward_hooks)]
    state = {"a": numbers(1.0), "b": numbers(2.0), "c": 3}
    yield "split", [sorted(each) for each in split_state({"a"}, state)]


def _of_places() -> Iterator[tuple[str, object]]:
    """The first place that differs."""
    settings = Settings.of(ranks=2, steps=2, record_step=1, accumulate=1, clip=1.0)
    expected = run_reference(_case(), settings).steps[1]
    half = {0: [(name, output[:4]) for name, output in expected.activations[0]]}
    rest = {0: [(name, output[4:]) for name, output in expected.activations[0]]}
    ranks = [replace(expected, activations=half), replace(expected, activations=rest)]
    bound = Bound(tolerance=1e-10, reason="")

    def place(**changes: Any) -> object:
        return told(lambda: str(locate(_case(), settings, bound, expected, [ranks[0], replace(ranks[1], **changes)])))

    wrong = {0: [(name, output + (name == "second")) for name, output in rest[0]]}
    scaled = {name: None if each is None else 2 * each for name, each in expected.gradients.items()}
    only = {**expected.gradients, "first.bias": expected.gradients["first.bias"] + 1}
    yield (
        "places",
        [
            place(),
            place(activations=wrong),
            place(gradients=scaled),
            place(gradients=only),
            place(norm=expected.norm + 1),
            place(loss=expected.loss + 1),
            place(parameters={**expected.parameters, "second.bias": expected.parameters["second.bias"] + 1}),
            place(activations={}),
            place(activations={0: [(name, output[:, :1]) for name, output in rest[0]]}),
        ],
    )
    with_buffer = replace(expected, buffers={"n.mean": numbers(1.0)})
    found = locate(
        _case(norm=True),
        settings.with_layout(sync_batchnorm=False),
        bound,
        with_buffer,
        [replace(ranks[0], buffers={"n.mean": numbers(2.0)})],
    )
    yield "buffer", str(found)
    plain = locate(
        _case(norm=True), settings, bound, with_buffer, [replace(ranks[0], buffers={"n.mean": numbers(2.0)})]
    )
    yield "buffer of ranks that synchronise", str(plain)
    without = locate(
        _case(),
        settings.with_layout(sync_batchnorm=False),
        bound,
        expected,
        [replace(ranks[0], loss=expected.loss + 1)],
    )
    yield "no norm", str(without)
    tiny = replace(
        expected, gradients={name: None if each is None else each * 0 for name, each in expected.gradients.items()}
    )
    moved = replace(tiny, parameters={**expected.parameters, "first.bias": expected.parameters["first.bias"] + 1})
    yield (
        "magnified",
        str(locate(_case(), settings, bound, replace(tiny, activations={}), [replace(moved, activations={})])),
    )


def _of_certificates() -> Iterator[tuple[str, object]]:
    """Certificates without their rounding errors."""
    for options in (
        {"strategy": "ddp"},
        {"strategy": "fsdp", "accumulate": 2, "clip": None},
        {"strategy": "zero1", "precision": "bf16", "steps": 1},
    ):
        found = verify(_Model, _batch, nn.functional.cross_entropy, ranks=2, **options)
        told_of: Any = through_json(found.to_json())
        left = {name: each for name, each in told_of.items() if name not in ("errors", "max_abs_error", "seconds")}
        yield (
            f"certificate {options}",
            [
                left,
                found.facts()["what"],
                found.facts()["result"],
                found.facts()["diverges"],
                found.errors.largest <= found.tolerance,
            ],
        )

    for options in ({"coarse": True}, {"coarse": True, "tolerance": 1e-10}, {"norm": True, "precision": "bf16_master"}):
        model = partial(_Model, **{name: value for name, value in options.items() if name in ("coarse", "norm")})
        asked = {name: value for name, value in options.items() if name not in ("coarse", "norm")}
        found = verify(model, _batch, nn.functional.cross_entropy, ranks=2, steps=1, **asked)
        said = [found.passed, found.measure, found.reference, found.bound.partition(":")[0]]
        yield f"certificate of {options}", said

    def skewed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) * (1 + len(targets) / 100)

    wrong = verify(_Model, _batch, skewed, ranks=2, steps=1)
    yield (
        "wrong",
        [wrong.passed, wrong.divergence and [wrong.divergence.step, wrong.divergence.module, wrong.divergence.what]],
    )
    case = FunctionCase(model=lambda: _Model(), batch=_batch, loss=nn.functional.cross_entropy)
    yield "unpicklable", str(told(lambda: certify(case, Settings.of(backend="gloo")))).partition("there:")[0]
    yield "largest rounding", [math.isfinite(wrong.max_abs_error), wrong.facts()["diverges"] == str(wrong.divergence)]
