"""A module's table of parameters that asks first: so a weight that anybody reads is noticed, whatever path they take.

``module.weight`` looks into ``module._parameters``. While a parameter is not there yet, its module has a table of this
kind in that place, and whoever reads from it waits for the parameter, or has it gathered.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

Table = dict[str, nn.Parameter | None]


class AskingTable(Table):
    """A table of parameters that asks ``current`` for the one that holds now, at each read."""

    def __init__(self, table: Table, current: Callable[[], Table]) -> None:
        super().__init__(table)
        self._current = current

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._current()[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._current().get(name, default)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        return self._current().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        return self._current().values()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain tables: nobody gathers their parameters."""
        return dict, (dict(self),)


def keeps_second_list(module: nn.Module) -> bool:
    """Says whether a module keeps a list of its weights beside the table, as recurrent layers do: it sees to that."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def held_elsewhere(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Finds parameters that modules keep in attributes of their own, such as plain lists."""
    for owner in module.modules():
        others = {k: v for k, v in vars(owner).items() if k not in ("_parameters", "_buffers", "_modules")}
        yield from ((owner, leaf) for leaf in tree_leaves(others) if isinstance(leaf, nn.Parameter))
