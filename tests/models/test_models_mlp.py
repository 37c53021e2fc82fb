from __future__ import annotations

import pytest
import torch
from torch import nn

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


def test_weights_of_a_plain_sequential_and_of_earlier_versions_load() -> None:
    torch.manual_seed(0)
    plain = nn.Module()
    plain.layers = nn.Sequential(
        nn.Linear(6, 4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 2), nn.ReLU(), nn.Dropout(0.3), nn.Linear(2, 3)
    )
    state = plain.state_dict()
    model = MLPClassifier(input_dim=6, hidden_dim=4, num_classes=3)
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    inputs = torch.randn(5, 6)
    assert torch.equal(model.eval()(inputs), plain.layers.eval()(inputs))

    earlier = {f"layers.{int(name[7]) + 1}{name[8:]}": value for name, value in state.items()}
    around = nn.Sequential(MLPClassifier(input_dim=6, hidden_dim=4, num_classes=3)).eval()
    around.load_state_dict({f"0.{name}": value for name, value in earlier.items()})
    assert torch.equal(around(inputs), model(inputs))
    assert next(iter(earlier)) == "layers.1.weight", "the caller's own dict stays as it is"
    with pytest.raises(RuntimeError, match=r"layers\.2\.weight"):
        model.load_state_dict({"layers.2.weight": state["layers.0.weight"], **state})
