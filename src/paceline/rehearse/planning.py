"""``paceline.plan``: how to train a model on a cluster, before there is one. The command line is the same with options.

    found = paceline.plan("configs/gpt_7b.yaml", "4x dgx-h100")
    print(found.to_text())
    found.winner.seconds, found.config, found.to_yaml()

A config of this package and a Hugging Face ``config.json`` are read, and torch is not imported. A model of your own
code is run once on tensors that have shapes and no values, on samples of the config's data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.cluster.devices import Cluster, load_cluster
from paceline.config import Config, config_from_dict, load_config
from paceline.errors import UsageError
from paceline.search.request import PlanRequest, request_for, request_for_hugging_face
from paceline.search.result import PlanResult, plan_for
from paceline.units import GIB

if TYPE_CHECKING:
    from torch import nn

    from paceline.predict.memory.facts import ModelFacts
    from paceline.predict.replay.replayed import ReplayedStep

Source: TypeAlias = "Config | str | Path | Mapping[str, Any] | Callable[[], nn.Module]"

_FIX = "make its forward independent of values, or describe it as model.kind: gpt with its dimensions"


def plan(
    model: Source,
    cluster: str | Cluster,
    *,
    overrides: Sequence[str] = (),
    by: str = "time",
    gpus: Sequence[int] | None = None,
    precision: str | None = None,
    price: float | None = None,
    host_gb: float | None = None,
) -> PlanResult:
    """Finds the best ways to train a model on a cluster: mesh, strategy, microbatch, schedule, recomputation, offload.

    ``model``: a config (its path, its values, or itself), a Hugging Face ``config.json`` (its path, or its values), or
    a function that makes a module, whose data the ``overrides`` name (``["data.kind=digits"]``). ``overrides`` are
    ``section.key=value``, as on the command line. ``by``: time, cost or memory. ``gpus``: numbers of devices for tables
    of scaling. ``precision``: another one than the config's, or auto. ``price``: dollars of a device-hour. ``host_gb``:
    memory of a node's host, in GiB; without it, what is offloaded fits.

    Raises UsageError or ConfigError for what cannot be planned; that nothing fits is a result without a winner.
    """
    place = load_cluster(cluster) if isinstance(cluster, str) else cluster
    request = read_source(model, place, overrides=overrides, precision=precision)
    if host_gb is not None:
        if not host_gb > 0:
            what = f"{host_gb} GiB of the host's memory"
            raise UsageError(f"{what}\n  it is above 0\n  leave it out where it is not known")
        request = replace(request, host_memory=host_gb * GIB)
    return plan_for(request, by=by, gpus=gpus, price=price)


def trace_plan(found: PlanResult, path: Path) -> ReplayedStep:
    """Replays the first plan's engine, and writes the time line of its step. Raises UsageError where it cannot run."""
    from paceline.predict.replay.replay import replay
    from paceline.predict.replay.replayed import write_trace
    from paceline.rehearse.dryrun.record import record_stages  # with torch

    cluster = found.request.cluster
    programs = record_stages(found.config, ranks=cluster.devices, node_ranks=cluster.node.devices)
    replayed = replay(programs, cluster, keeps_spans=True)
    write_trace(replayed, path)
    return replayed


def read_source(
    model: Source, cluster: Cluster, *, overrides: Sequence[str] = (), precision: str | None = None
) -> PlanRequest:
    """Reads a model of any kind. Raises UsageError or ConfigError for what cannot be read, or measured."""
    if isinstance(model, str | Path) and Path(model).suffix == ".json":
        return request_for_hugging_face(Path(model), cluster, overrides, precision)
    if isinstance(model, Mapping) and "model_type" in model:
        return request_for_hugging_face(model, cluster, overrides, precision)
    if callable(model) and not isinstance(model, Config):
        return _of_factory(model, cluster, overrides, precision)
    if not isinstance(model, Config | str | Path | Mapping):
        raise UsageError(
            f"{model!r} is no model: it is of type {type(model).__name__}\n"
            "  a plan is for a config, its path or values, a config.json, or a function that makes a module\n"
            "  pass one of these"
        )
    if isinstance(model, Config) and overrides:
        raise UsageError(
            f"overrides {', '.join(overrides)} of a config that is read already\n"
            "  they replace values of a file\n  pass the path of the file, or a config with these values"
        )
    if isinstance(model, str | Path):
        model = load_config(Path(model), list(overrides))
    config = model if isinstance(model, Config) else config_from_dict(model, "plan", overrides)
    facts = _measure(config) if config.model.kind in ("factory", "hf") else None
    return request_for(config, cluster, precision=precision, facts=facts)


def _of_factory(
    factory: Callable[[], nn.Module], cluster: Cluster, overrides: Sequence[str], precision: str | None
) -> PlanRequest:
    name = getattr(factory, "__qualname__", type(factory).__name__)
    is_found = "<" not in name and hasattr(factory, "__module__") and factory.__module__ != "__main__"
    path = f"{factory.__module__}:{name}" if is_found else "paceline.plan:factory"
    words = [f"name={name.rpartition('.')[2].strip('<>')}", "model.kind=factory", f"model.factory={path}"]
    if not any(word.startswith("data.kind=") for word in overrides):
        raise UsageError(
            f"{name} is given without data\n  a model of your own code is measured on samples\n"
            "  pass overrides=['data.kind=synthetic_tokens', 'data.context=1024', ...], or a config with model.factory"
        )
    config = load_config(None, [*words, *overrides])
    facts = _measure(config, factory)
    no_config = "" if is_found else f"{name} has no name by which it can be imported"
    return request_for(config, cluster, precision=precision, facts=facts, no_config=no_config)


def _measure(config: Config, make_model: Callable[[], nn.Module] | None = None) -> ModelFacts:
    from paceline.train.resolve import measure_config  # with torch, which nothing else here needs

    return measure_config(config, "cpu", make_model=make_model, asked="a plan", fix=_FIX)
