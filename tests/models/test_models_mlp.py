from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.models.mlp import MLPClassifier
from paceline.models.registry import model_blocks, num_parameters


@pytest.mark.parametrize("shape", [(5, 784), (5, 1, 28, 28), (0, 784)])
def test_inputs_of_any_shape_become_logits(shape: tuple[int, ...]) -> None:
    assert MLPClassifier()(torch.randn(shape)).shape == (shape[0], 10)


def test_layer_widths() -> None:
    model = MLPClassifier(input_dim=20, hidden_dim=9, num_classes=3)
    weights = [tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2]
    assert weights == [(9, 20), (4, 9), (3, 4)]
    assert num_parameters(model) == 9 * 21 + 4 * 10 + 3 * 5


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model, inputs = MLPClassifier(dropout=0.5), torch.randn(4, 784)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_float64_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    model = MLPClassifier(input_dim=6, hidden_dim=4, num_classes=3, dropout=0.0).double()
    assert torch.autograd.gradcheck(model, torch.randn(3, 6, dtype=torch.float64, requires_grad=True))


def test_it_has_no_blocks() -> None:
    assert model_blocks(MLPClassifier()) == []


@pytest.mark.parametrize("arguments", [{"input_dim": 0}, {"hidden_dim": 1}, {"num_classes": 0}])
def test_a_layer_without_units_is_refused(arguments: dict[str, int]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(UsageError, match=f"{name} = {value}"):
        MLPClassifier(**arguments)
