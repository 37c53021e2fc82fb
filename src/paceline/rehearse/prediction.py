"""``paceline.predict``: what a step of a config takes on a cluster, from the engine that would run it.

    found = paceline.predict("configs/gpt_7b.yaml", "4x dgx-h100", overrides=["parallel.strategy=fsdp"])
    found.seconds, found.total_memory, found.binds

The real engine runs one rank on tensors without values, and what it issues is timed on the cluster's devices and links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cluster.devices import Cluster, load_cluster
from paceline.cluster.wires import over_backend, wire_cost
from paceline.config import Config, layout_of, load_config, with_precision
from paceline.errors import UsageError
from paceline.plan.plan import RunMachine
from paceline.predict.memory.memory import EngineMemory, is_known
from paceline.predict.replay.program import Program
from paceline.predict.replay.replay import check_slow, replay
from paceline.predict.replay.replayed import ReplayedStep
from paceline.rehearse.dryrun.parts import with_stand_in
from paceline.rehearse.dryrun.record import record_stages, with_fitting_microbatch
from paceline.search.expect import check_measured
from paceline.search.request import with_context_method
from paceline.train.resolve import resolve_strategy


def predict(
    config: Config | str | Path,
    cluster: str | Cluster,
    *,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
    rank: int | None = None,
    slow: Mapping[int, float] | None = None,
) -> ReplayedStep:
    """Predicts a step of a config on a cluster: seconds, where they go, and memory.

    ``ranks``: how many; None: as the config says, else one for each device. ``rank``: the one to tell of; None: the one
    that computes most. ``slow`` multiplies what ranks compute, ``{2: 1.5}``. Raises ConfigError or UsageError for what
    cannot be run so; that a step does not fit into memory is a result (``found.fits``).
    """
    where = load_cluster(cluster) if isinstance(cluster, str) else cluster
    asked, count = config_on(config, where, overrides=overrides, ranks=ranks)
    return predict_decided(asked, where, count, rank=rank, slow=slow)[1]


def config_on(
    config: Config | str | Path, cluster: Cluster, *, overrides: Sequence[str] = (), ranks: int | None = None
) -> tuple[Config, int]:
    """Returns the config for a number of ranks: as asked, else as it says itself, else one for each device."""
    if isinstance(config, Config):
        if overrides:
            raise UsageError("overrides of a config that is read already\n  they change a file\n  pass its path")
        own = config.parallel.ranks
        return config, ranks or (own if isinstance(own, int) else cluster.devices)
    if ranks is None:
        asked = load_config(Path(config), list(overrides))
        if isinstance(asked.parallel.ranks, int):
            return asked, asked.parallel.ranks
    count = cluster.devices if ranks is None else ranks
    return load_config(Path(config), [*overrides, f"parallel.ranks={count}"]), count


def memory_bound(config: Config, cluster: Cluster, ranks: int) -> int | None:
    """Returns the bytes of a rank that ``paceline plan`` shows, by formula; None where only code could tell."""
    device = "cpu" if cluster.device.is_cpu else "cuda"
    need = EngineMemory.of(config, device)
    if need is None:
        return None
    layout = layout_of(config, ranks, min(ranks, cluster.node.devices))
    found = need.estimate(layout) if is_known(need.facts, layout) else None
    return None if found is None else int(found.device_bytes)


def predict_decided(
    config: Config,
    cluster: Cluster,
    ranks: int,
    *,
    rank: int | None = None,
    slow: Mapping[int, float] | None = None,
    keeps_spans: bool = False,
) -> tuple[Config, ReplayedStep]:
    """Returns the config with what was decided for it, and the step; ``keeps_spans`` for a time line."""
    cluster = over_backend(cluster, config.comm.backend) if ranks > 1 else cluster
    wire_cost(cluster, ranks)  # refuses ranks that the cluster has no devices for
    check_slow(slow or {}, ranks)
    if rank is not None and rank >= ranks:
        raise UsageError(f"rank = {rank} of {ranks} ranks\n  ranks are 0 to {ranks - 1}\n  try rank = {ranks - 1}")
    if cluster.device.is_cpu and config.parallel.device == "auto":  # engines do some things otherwise there
        config = config.with_values("parallel", device="cpu")
    check_measured(config.train.precision_on("cpu"), cluster.device)
    if not cluster.device.is_cpu and config.parallel.device != "cpu":
        config = with_precision(config, "cuda", has_bf16="bf16" in cluster.device.peak_flops)

    def record(asked: Config) -> tuple[Config, tuple[Program, ...]]:
        asked = with_fitting_microbatch(asked, cluster, ranks=ranks, rank=rank or 0)
        return asked, record_stages(asked, ranks=ranks, rank=rank or 0, node_ranks=min(ranks, cluster.node.devices))

    if config.is_open:
        device, size = "cpu" if cluster.device.is_cpu else "cuda", min(ranks, cluster.node.devices)
        has = int(cluster.device.memory_bytes)
        there = RunMachine(device=device, ranks=ranks, node_ranks=size, device_bytes=has, host_bytes=2**60)
        config, _ = resolve_strategy(config.with_values("parallel", device=device, ranks=ranks), there, cluster)
    config = with_context_method(config, cluster, ranks)
    (recorded, programs), rough = with_stand_in(config, record)
    found = replay(programs, cluster, slow=slow, keeps_spans=keeps_spans, with_loop=True)
    config = config.with_values("train", microbatch=recorded.train.microbatch)
    return config, replace(found, shown=rank, rough=rough)
