"""What torch's own helpers do with the parameters of an engine: the right thing, or an error that names what to call.

Under sharding a rank holds parts of the parameters and of their gradients. A helper that looks at one element at a time
is right as it is (``clip_grad_value_``). One that looks at all of them is not, and is made right here, or refuses:

    clip_grad_norm_, get_total_norm            right: the norm over all ranks, which all of them ask for
    GradScaler.unscale_                        right: what is not finite on one rank is so on all, and all skip the step
    parameters_to_vector, AveragedModel        refused
    Optimizer.step                             refused for parameters that an engine has replaced
    Optimizer.state_dict, load_state_dict      right: whole tensors, as in one process; all ranks call them
    Module.zero_grad                           right: what the engine updates forgets its gradients, too
    Module.state_dict, load_state_dict         refused

Optimizers have global hooks. For the other helpers, the function inside torch's wrapper is replaced when the first such
engine is made, so that it does not matter when a script imported them. A subclass of tensors would turn off foreach and
fused optimizers, and slow every step down.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad, convert_parameters
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.engines.engine import Engine
from paceline.engines.groups import forget_gradients
from paceline.engines.module_engine import ModuleEngine
from paceline.errors import UsageError
from paceline.shards import are_states_own


class _Watch:
    """The engines of this process, what they replaced, and the optimizers that were looked at."""

    def __init__(self) -> None:
        # By engine, the ids of what it updates, which it keeps.
        self.engines: weakref.WeakKeyDictionary[Engine, frozenset[int]] = weakref.WeakKeyDictionary()
        self.elsewhere: weakref.WeakSet[Engine] = weakref.WeakSet()  # that update not the module's parameters
        self.replaced: Any = WeakTensorKeyDictionary()  # parameters, and by weak reference what is updated now
        self.seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.is_installed = False

    def engines_of(self, parameters: Iterable[Tensor]) -> list[Engine]:
        """Returns the engines that update some of these."""
        given = {id(parameter) for parameter in parameters} if self.engines else set()
        return [engine for engine, ids in list(self.engines.items()) if not ids.isdisjoint(given)]

    def parts(self) -> list[Engine]:
        """Returns the engines that hold parts of their parameters."""
        return [engine for engine in list(self.engines) if engine.holds_parts]

    def engine_behind(self, optimizer: Optimizer) -> Engine | None:
        """Returns the engine whose parameters an optimizer updates, by the first of them."""
        first = next((id(p) for group in optimizer.param_groups for p in group["params"]), None)
        return next((engine for engine, ids in list(self.engines.items()) if first in ids), None)

    def engine_elsewhere(self, optimizer: Optimizer) -> Engine | None:
        """Returns that engine where users get a whole state of it, and not the optimizer's own."""
        engine = None if are_states_own() else self.engine_behind(optimizer)
        return engine if engine is not None and engine in self.elsewhere else None

    def replacements(self, parameters: Iterable[Tensor]) -> list[nn.Parameter | None]:
        """Returns, for those that an engine has put others in the place of, what this rank updates now, if anything."""
        found = [self.replaced[each] for each in parameters if each in self.replaced] if self.replaced else []
        return [None if now is None else now() for now in found]


_WATCH = _Watch()


def watch_engine(engine: Engine, before: Mapping[str, nn.Parameter]) -> None:
    """Takes note of an engine, and of the parameters that the module had ``before``."""
    named = dict(engine.named_parameters())
    updated = {id(parameter) for parameter in named.values()}
    replaced = {name: parameter for name, parameter in before.items() if id(parameter) not in updated}
    for name, parameter in replaced.items():
        _WATCH.replaced[parameter] = weakref.ref(named[name]) if name in named else None
    _WATCH.engines[engine] = frozenset(updated)
    if engine.holds_parts or replaced:
        _WATCH.elsewhere.add(engine)
        # Engines read the module's own tensors with ``state_dict(keep_vars=True)``, which stays open, and write them
        # with ``load_own_state``.
        each: Any  # torch does not annotate these
        for each in engine.module.modules():
            each.register_state_dict_pre_hook(_refuse_state)
            each.register_load_state_dict_pre_hook(_refuse_loading)
    if _WATCH.is_installed:
        return
    _WATCH.is_installed = True
    register_optimizer_step_pre_hook(_check_step)
    _replace_inside(clip_grad, "_get_total_norm", _total_norm)
    _replace_inside(clip_grad, "clip_grad_norm_", _checked)
    _replace_inside(clip_grad, "clip_grad_value_", _checked)
    for owner, name, wrap in (
        (Optimizer, "state_dict", _whole_state),
        (Optimizer, "load_state_dict", _loading_whole),
        (convert_parameters, "_check_param_device", _one_of_vector),
        (AveragedModel, "update_parameters", _average),
        (torch.amp.GradScaler, "_unscale_grads_", _unscaled),
        (nn.Module, "zero_grad", _forgetting),
    ):
        setattr(owner, name, wrap(getattr(owner, name)))


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    """Runs before every step of every optimizer; looks at one when it is new, or has other groups."""
    groups = optimizer.param_groups
    if _WATCH.seen.get(optimizer) == len(groups):
        return
    _WATCH.seen[optimizer] = len(groups)
    parameters = [parameter for group in groups for parameter in group["params"]]
    num_replaced = len(_WATCH.replacements(parameters))
    if num_replaced:
        del _WATCH.seen[optimizer]  # the next step says the same
        kind = type(optimizer).__name__
        raise UsageError(
            f"{num_replaced} of the {len(parameters)} tensors of this {kind} are no longer the parameters that train\n"
            "  parallelize() gave the engine others in their place, and this step would change nothing\n"
            f"  give parallelize(..., optimizer=optimizer), or build it afterwards: {kind}(engine.parameters(), ...)"
        )
    for engine in _WATCH.engines_of(parameters):
        if isinstance(engine, ModuleEngine) and engine.replica_watch is not None:
            engine.replica_watch.optimizer = weakref.ref(optimizer)
        is_checked = engine.checked_optimizer is not None and engine.checked_optimizer() is optimizer
        may_miss = engine.holds_parts or not engine.num_trained  # else it may update parameters of others, too
        if may_miss and not is_checked and engine.device.type != "meta":  # a dry run records what happens in a step
            engine.check_optimizer(optimizer)


def adopt_optimizer(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Lets an optimizer of the module's former parameters update those of the engine, with its own ``state``."""
    ours = _WATCH.engines[engine]
    theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in ours and parameter not in _WATCH.replaced for parameter in theirs)
    if strangers:
        raise UsageError(
            f"{strangers} tensors of the optimizer are no parameters of the model\n"
            "  parallelize(..., optimizer=...) puts those of the engine in the place of the model's\n"
            "  build the optimizer of model.parameters() alone, or afterwards of engine.parameters()"
        )
    for group in optimizer.param_groups:
        now = [each if id(each) in ours else _WATCH.replacements([each])[0] for each in group["params"]]
        group["params"] = [parameter for parameter in now if parameter is not None]
        if "param_names" in group:
            pairs = zip(group["param_names"], now, strict=True)
            group["param_names"] = [name for name, parameter in pairs if parameter is not None]
    optimizer.state.clear()
    engine.check_optimizer(optimizer)
    if state["state"]:
        engine.load_full_optimizer_state(optimizer, dict(state))


def is_of_former(optimizer: Optimizer) -> bool:
    """Says whether an optimizer has parameters of a module in whose place an engine has put others."""
    return bool(_WATCH.replacements(parameter for group in optimizer.param_groups for parameter in group["params"]))


def _around(ours: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a wrapper of a function of torch: ``ours`` is called in its place, with that function as first argument."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(function, *args, **kwargs)

        return call

    return wrap


@_around
def _whole_state(function: Callable[..., Any], optimizer: Optimizer) -> Any:
    """Gives the state as one process would have it, and not that of a rank's parts, which no other rank could load."""
    engine = _WATCH.engine_elsewhere(optimizer)
    return function(optimizer) if engine is None else engine.full_optimizer_state(optimizer)


@_around
def _loading_whole(function: Callable[..., Any], optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    engine = _WATCH.engine_elsewhere(optimizer)
    if engine is None:
        function(optimizer, state_dict)
    else:
        engine.load_full_optimizer_state(optimizer, state_dict)


def _refuse_state(module: nn.Module, _: str, keep_vars: bool) -> None:
    if not keep_vars:
        raise UsageError(
            f"state_dict() of a {type(module).__name__} whose parameters an engine updates elsewhere\n"
            "  the module has parts of them, or values from before the last update\n"
            "  call engine.state_dict() on all ranks, or paceline.save(folder, engine, optimizer, step=step)"
        )


def _refuse_loading(module: nn.Module, *_: Any) -> None:
    if not are_states_own():
        raise UsageError(
            f"load_state_dict() of a {type(module).__name__} whose parameters an engine updates elsewhere\n"
            "  the engine would not see the new values, or has other shapes\n"
            "  call engine.load_state_dict(state) on all ranks, or load before parallelize()"
        )


def _replace_inside(module: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function of torch for all who have imported it: torch's own wrapper of it calls another one then."""
    outer = getattr(module, name)
    for cell in outer.__closure__ or () if isinstance(outer, FunctionType) else ():
        inner: Callable[..., Any] = cell.cell_contents
        if inner == getattr(outer, "__wrapped__", None):
            cell.cell_contents = wrap(inner)
            return
    ours = wrap(outer)  # another torch, without such a wrapper: for those who look it up from now on
    for owner in (module, nn.utils):
        for key in (name, name.lstrip("_")):
            if getattr(owner, key, None) is outer:
                setattr(owner, key, ours)


@_around
def _checked(function: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    num_replaced = len(_WATCH.replacements(given))
    if num_replaced:
        raise UsageError(
            f"{function.__name__} was given {num_replaced} parameters that an engine has replaced\n"
            "  gradients are at the engine's own parameters, and these have none\n"
            "  call engine.clip_grad_norm_(max_norm), or give engine.parameters()"
        )
    return function(given, *args, **kwargs)


@_around
def _total_norm(function: Callable[..., Any], tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
    """Gives the norm over all ranks: one number with this norm takes the place of an engine's gradients."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for engine in _WATCH.parts():
        ours = {id(p.grad): p.grad.numel() for p in engine.parameters() if p.grad is not None}
        found = ours.keys() & {id(tensor) for tensor in given}
        if not found:
            continue
        if any(size for number, size in ours.items() if number not in found):
            raise UsageError(
                f"a norm of {len(found)} of the engine's {len(ours)} gradients\n"
                "  a rank holds a part of each gradient, and the ranks know the norm of all of them\n"
                "  call engine.clip_grad_norm_(max_norm), with infinity to measure, or give the gradients of all "
                "engine.parameters()"
            )
        norm = engine.clip_grad_norm_(math.inf, float(norm_type))
        given = [norm.reshape(1), *(tensor for tensor in given if id(tensor) not in found)]
    return function(given, norm_type, *args, **kwargs)


def _refuse_parts(parameters: Iterable[Tensor], problem: str) -> None:
    given = list(parameters)
    if any(engine.holds_parts for engine in _WATCH.engines_of(given)) or _WATCH.replacements(given):
        raise UsageError(problem)


@_around
def _one_of_vector(function: Callable[..., Any], param: Tensor, *args: Any, **kwargs: Any) -> Any:
    _refuse_parts(
        [param],
        "a vector of the parameters of an engine that holds parts of them\n  it would be another vector on every rank\n"
        "  take engine.full_state_dict() on all ranks, which has whole tensors, and engine.load_full_state_dict(state)",
    )
    return function(param, *args, **kwargs)


@_around
def _average(function: Callable[..., Any], averages: Any, model: Any) -> Any:
    _refuse_parts(
        model.parameters(),
        "AveragedModel with an engine that holds parts of the parameters\n"
        "  whole averages cannot be updated from parts\n"
        "  average what the rank updates, and swap it in to evaluate: paceline.WeightAverage(engine, decay)",
    )
    return function(averages, model)


@_around
def _unscaled(function: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Lets all ranks know of gradients that are not finite on one of them."""
    found = function(scaler, optimizer, *args, **kwargs)
    engines = _WATCH.engines_of(p for group in optimizer.param_groups for p in group["params"])
    for engine in [each for each in engines if each.holds_parts]:
        device = engine.world.device
        bad = found.setdefault(device, torch.zeros(1, dtype=torch.float32, device=device))
        engine.world.all_reduce(bad, "max").wait()
    return found


@_around
def _forgetting(function: Callable[..., Any], module: nn.Module, set_to_none: bool = True) -> None:
    """Lets a module's zero_grad() reach what an engine updates in the place of its parameters."""
    function(module, set_to_none)
    now = [parameter for parameter in _WATCH.replacements(module.parameters()) if parameter is not None]
    forget_gradients(now, set_to_none)
