"""What is special about an operator in a dry run."""

from __future__ import annotations

import pytest
import torch

from paceline.rehearse.dryrun.recorder import _kind

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        (aten.view.default, "view"),
        (aten.t.default, "view"),
        (aten.lift_fresh.default, "plain"),
        (aten.mm.default, "plain"),
        (aten.add_.Tensor, "plain"),
        (aten._local_scalar_dense.default, "reads"),
        (aten._to_copy.default, "reads"),
        (aten._fused_adamw_.default, "fused"),
    ],
)
def test_an_operator_is_of_its_kind(operator: object, kind: str) -> None:
    assert _kind(operator) == kind
