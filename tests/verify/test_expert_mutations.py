"""Classic bugs of experts over ranks, as other projects had them, planted one by one, are all found.

Each names the report where it was found: https://github.com/ followed by the project, and the number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_gpt import case_of, make_model, make_one_sided
from planted_bugs import Bug, check_found, replacing
from torch import Tensor

import paceline
from paceline.checkpoint.tools.audit import audit
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines import ddp
from paceline.engines.apply import parallelize
from paceline.engines.experts import ExpertExchange
from paceline.engines.groups import Groups, ParameterGroups
from paceline.engines.module_engine import ModuleEngine
from paceline.engines.tensor.layers import SplitRouter
from paceline.engines.tensor.layout import ExpertParts
from paceline.errors import CollectiveMismatchError
from paceline.models.experts import Router
from paceline.verify.case import Settings

SETTINGS = Settings.of(ranks=4, expert=2, steps=2, clip=0.1)
APART = Settings.of(ranks=4, expert=4, steps=1)
SPLIT = Settings.of(ranks=2, tensor=2, steps=1)


def norm_of_own(_: Any) -> Any:
    """Each group of experts has a norm of its own, by which its ranks clip (NVIDIA-NeMo/Automodel 3816)."""
    return lambda power, _, kind: power ** (1 / kind)


def averaged_norm(original: Any) -> Any:
    """Norms of different experts are averaged, as if they were copies (deepspeedai/DeepSpeed 8475)."""
    return lambda power, comm, kind: original(power / comm.size, comm, kind)


def scaled_by_their_group(original: Any) -> Any:
    """An expert's gradient is divided by the ranks that hold it, not by all that share the batch (Megatron-LM 7165)."""

    def of(self: Groups, parameter: Any) -> ParameterGroups:
        found = original(self, parameter)
        return dataclasses.replace(found, averaged_over=found.gradients.size)

    return of


def of_one_rank(_: Any) -> Any:
    """A whole state is that of one rank's experts, as often as there are ranks (KempnerForge 202)."""

    def whole(self: ExpertParts, name: str, value: Any) -> Any:
        if name not in self or not isinstance(value, Tensor) or not value.ndim:
            return value
        return torch.cat([value] * self._comm.size)

    return whole


def silent_without_rows(original: Any) -> Any:
    """A rank to which nobody sent a row leaves out the way back."""

    def back(self: ExpertExchange, made: Tensor, *way: Any) -> Tensor:
        return original(self, made, *way) if len(made) else made.new_zeros(sum(way[0]._sent), made.shape[1])

    return back


def counted_on_every_rank(_: Any) -> Any:
    """What a router's input learns is summed over tensor ranks, each of which has all of it."""

    def forward(self: SplitRouter, tokens: Tensor) -> Any:
        found = Router.forward(self, tokens)
        return dataclasses.replace(found, weights=self.region.sum_back(found.weights))

    return forward


def parts_of_gradients(_: Any) -> Any:
    """A router learns from a tensor rank's part of the experts alone."""
    return lambda self, tokens: Router.forward(self, tokens)


def bug(plant: Callable[..., Any], **fields: Any) -> Bug:
    return Bug(**{"plant": plant, "case": CASE, "shows": "gradient", "settings": SETTINGS, **fields})


CASE, ONE_SIDED = case_of(), case_of(make=make_one_sided)
BUGS = {
    "a norm for each group of experts": bug(
        replacing(ddp, "reduce_norm", norm_of_own), shows="norm", settings=dataclasses.replace(SETTINGS, clip=None)
    ),
    "norms of different experts averaged": bug(replacing(ddp, "reduce_norm", averaged_norm), shows="norm"),
    "gradients scaled by the experts' own group": bug(replacing(Groups, "of", scaled_by_their_group)),
    "one rank's experts in a whole state": bug(replacing(ExpertParts, "whole", of_one_rank)),
    "a rank without rows is silent": bug(
        replacing(ExpertExchange, "_return", silent_without_rows),
        case=ONE_SIDED,
        settings=APART,
        verdict=CollectiveMismatchError,
    ),
    "a router's input counted by each rank": bug(
        replacing(SplitRouter, "forward", counted_on_every_rank), settings=SPLIT
    ),
    "a router of parts": bug(replacing(SplitRouter, "forward", parts_of_gradients), settings=SPLIT),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("planted", BUGS.values(), ids=BUGS.keys())
def test_a_planted_bug_is_found(planted: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(planted, monkeypatch)


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_checkpoint_of_one_ranks_experts_is_found(
    is_planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts count as copies of one another, of which the first rank writes its own (KempnerForge 202)."""
    if is_planted:
        everyone = lambda self: dict.fromkeys(self._updated, self.groups.gradients)  # noqa: E731
        monkeypatch.setattr(ModuleEngine, "holders", everyone)

    def work(comm: Communicator) -> None:
        engine = parallelize(make_model(), comm, expert=2)
        paceline.save(tmp_path, engine, torch.optim.AdamW(engine.parameters()), step=1)

    if is_planted:
        with pytest.raises(Exception, match=r"layers\.1\.mlp\.experts"):
            run_virtual(work, ranks=4)
        return
    run_virtual(work, ranks=4)
    (saved,) = tmp_path.glob("step-*")
    assert audit(saved).is_good
