"""What a plan is asked for: a model, read from a config, from Hugging Face or measured, and a cluster to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cluster.devices import Cluster
from paceline.cluster.entries import near_names
from paceline.cluster.wires import over_backend
from paceline.config import Config, config_from_dict, with_precision
from paceline.errors import UsageError
from paceline.plan.model_shape import ModelShape
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import EngineMemory, StateFacts
from paceline.search.candidates import TrainingTask
from paceline.search.from_config import PRECISIONS, assumed_of, task_of
from paceline.search.hugging_face import read_hugging_face

# Where the precision is open, in this order: of equal ones the first is taken.
_OPEN = ("bf16_master", "bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is planned for, in each precision that may be, and what was assumed.

    ``no_config`` says why there can be no config of it. ``host_memory``: bytes of a node's host that its
    ranks may take together.
    """

    config: Config
    cluster: Cluster
    tasks: tuple[TrainingTask, ...]
    assumed: tuple[str, ...] = ()
    no_config: str = ""
    host_memory: float = float("inf")


def request_for(
    config: Config,
    cluster: Cluster,
    *,
    precision: str | None = None,
    shape: ModelShape | None = None,
    facts: ModelFacts | None = None,
    no_config: str = "",
) -> PlanRequest:
    """Makes a request of a config. ``shape`` or ``facts`` stand for a model that the config cannot describe.

    ``precision``: another one than the config's, or ``auto`` for any. Raises UsageError for what cannot be planned.
    """
    device = cluster.device
    cluster = over_backend(cluster, config.comm.backend) if cluster.devices > 1 else cluster
    config = with_precision(config, "cpu" if device.is_cpu else "cuda", has_bf16="bf16" in device.peak_flops)
    return PlanRequest(
        config=config,
        cluster=cluster,
        tasks=tuple(_task(config, cluster, each, shape, facts) for each in _precisions(precision)),
        assumed=assumed_of(config) if shape is None and facts is None else (),
        no_config=no_config,
    )


def request_for_hugging_face(
    source: Path | Mapping[str, Any], cluster: Cluster, overrides: Sequence[str] = (), precision: str | None = None
) -> PlanRequest:
    """Makes a request of a Hugging Face model, whose batch and tokens are assumed where ``overrides`` do not say."""
    model = read_hugging_face(source)
    own = ["train.precision=fp32"] if cluster.device.is_cpu else []  # processors have no faster one
    config = config_from_dict(model.values, overrides=[*own, *overrides])
    shape = model.shape if model.no_config else None
    said = {word.partition("=")[0] for word in overrides} | ({"train.precision"} if precision else set())
    made = request_for(config, cluster, precision=precision, shape=shape, no_config=model.no_config)
    return replace(made, assumed=model.assumed(config, said))


def _task(
    config: Config, cluster: Cluster, precision: str, shape: ModelShape | None, facts: ModelFacts | None
) -> TrainingTask:
    if precision:
        config = config.with_values("train", precision=precision)
    device = "cpu" if cluster.device.is_cpu else "cuda"
    need = None if shape is not None else EngineMemory.of(config, device)
    if facts is not None:
        need = EngineMemory(facts=facts, states=StateFacts.of(config, device))
    return replace(task_of(config, cluster.devices, shape, facts), names_precision=bool(precision), need=need)


def _precisions(asked: str | None) -> tuple[str, ...]:
    if asked is None:
        return ("",)
    if asked == "auto":
        return _OPEN
    if asked not in PRECISIONS:
        near = near_names(asked, [*PRECISIONS, "auto"])
        raise UsageError(
            f"precision {asked!r} is not known\n  it is auto, or one of {', '.join(PRECISIONS)}\n"
            f"  {f'did you mean {near[0]}?' if near else 'try auto'}"
        )
    return (asked,)
