"""Which modules are gathered together: the units of a sharded model.

A unit is a module whose parameters are gathered just before its forward and freed after it. The model itself is the
last resort, the *root* unit: it has what no other unit has, and stays gathered through forward and backward. Good units
are called one after another and are neither so small that latency counts nor so large that two do not fit: the repeated
blocks of a model, as they are or several together.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.errors import UsageError
from paceline.units import MIB

Named = tuple[str, nn.Module]


def choose_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ends: Sequence[nn.Module] = (),
    *,
    names: Sequence[str] | None = None,
    unit_mb: float | None = None,
    apart: Sequence[nn.Module] = (),
) -> list[Named]:
    """Returns the units below the root, outermost first, in the order of definition.

    By name where ``names`` are given; by size where ``unit_mb`` is: the largest modules that are not larger; otherwise
    the model's blocks, and those of its ``ends`` that are as large: all that is in the root stays gathered for long.
    By size, modules that are read ``apart`` from their calls are left to the root.
    Raises UsageError for names that are not modules of the model.
    """
    if names is not None:
        return _by_name(model, names)
    if unit_mb is not None:
        kept = frozenset(id(module) for module in apart)
        return [unit for unit in _by_size(model, unit_mb * MIB, kept) if unit[1] is not model]
    chosen = {id(block) for block in blocks}
    largest = max((_num_bytes(block) for block in blocks), default=0)
    chosen |= {id(end) for end in ends if _num_bytes(end) >= largest > 0}
    return [(name, module) for name, module in model.named_modules() if id(module) in chosen and module is not model]


def owned_parameters(model: nn.Module, units: Sequence[Named]) -> list[list[tuple[str, nn.Parameter]]]:
    """Returns the parameters of each unit, and of the root last.

    A parameter belongs to the innermost unit around it. One that several units use (tied weights, a module with two
    parents) belongs to the root, which is gathered whenever any of them runs.
    """
    innermost: dict[int, set[int]] = {}
    first_name: dict[int, tuple[str, nn.Parameter]] = {}
    prefixes = sorted(((name, index) for index, (name, _) in enumerate(units)), key=lambda pair: -len(pair[0]))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name.setdefault(id(parameter), (name, parameter))
        inside = next((index for prefix, index in prefixes if name.startswith(prefix + ".")), len(units))
        innermost.setdefault(id(parameter), set()).add(inside)
    owned: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(len(units) + 1)]
    for key, named in first_name.items():
        users = innermost[key]
        owned[users.pop() if len(users) == 1 else len(units)].append(named)
    return owned


def _by_name(model: nn.Module, names: Sequence[str]) -> list[Named]:
    modules = dict(model.named_modules(remove_duplicate=False))
    wrong = [name for name in names if name not in modules or not name]
    if wrong:
        known = ", ".join(name for name in list(modules)[1:8])
        raise UsageError(
            f"units = {list(names)}: no module is called {', '.join(map(repr, wrong))}\n"
            f"  a unit is a module of the model below its root, by its name\n  the first modules are {known}"
        )
    seen: dict[int, str] = {}
    for name in names:
        if id(modules[name]) in seen:
            raise UsageError(
                f"units {seen[id(modules[name])]!r} and {name!r} are one and the same module\n"
                "  a module is gathered by one unit\n  name it once: it may be called as often as you like"
            )
        seen[id(modules[name])] = name
    return [(name, modules[name]) for name in modules if name in set(names)]


def _num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _by_size(module: nn.Module, limit: float, apart: frozenset[int], name: str = "") -> list[Named]:
    num_bytes = _num_bytes(module)
    if num_bytes == 0 or id(module) in apart:
        return []
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList)
    is_whole = not is_list and not any(id(inner) in apart for inner in module.modules())
    if name and num_bytes <= limit and is_whole:
        return [(name, module)]
    if name and isinstance(module, nn.MultiheadAttention):
        return [(name, module)]  # it reads its inner layer's weights without calling it
    prefix = f"{name}." if name else ""
    inner = [unit for child, sub in module.named_children() for unit in _by_size(sub, limit, apart, prefix + child)]
    is_leaf = not any(any(True for _ in child.parameters()) for child in module.children())
    return [(name, module)] if is_leaf and name else inner
