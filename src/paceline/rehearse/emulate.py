"""``paceline predict --on gpu``: one rank of many on a real GPU, with links that are emulated.

    config --build_trainer--> the engine, kernels and loop of a run --a few steps--> step, exposed communication, memory

The other ranks are assumed to be alike (``comm/emulated``). Of a pipeline, a rank of each stage runs, one after the
other: each finds its messages there as soon as a link could bring them. So a stage's time has no bubble, which is that
of the dry run.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.cluster.devices import Cluster
from paceline.cluster.wires import num_channels
from paceline.comm.emulated.communicator import EmulatedWorld, Fabric, Traffic
from paceline.config import Config, config_batch, layout_of
from paceline.data.registry import SyntheticConfig
from paceline.errors import UsageError
from paceline.notebook import Shown
from paceline.predict.replay.replay import cost_in_training
from paceline.predict.replay.replayed import ReplayedStep
from paceline.records.records import StepRecord
from paceline.rehearse.simulate.recording import KeptRecords
from paceline.train.assemble import build_trainer
from paceline.train.step import StepResult
from paceline.train.trainer import Trainer
from paceline.units import format_bytes, format_seconds

_WARM = 4  # steps in which engines learn, compilers compile and memory settles


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRank:
    """What a step of one rank took; seconds and bytes of a step, and the most memory that it held."""

    rank: int
    stage: int
    seconds: float
    traffic: Mapping[str, Traffic]
    allocated_bytes: int
    reserved_bytes: int

    @property
    def exposed(self) -> float:
        return sum(each.exposed for each in self.traffic.values())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EmulatedStep(Shown):
    """The step that ranks of each stage took on ``device`` with the links of a cluster, beside the dry run's."""

    device: str
    predicted: ReplayedStep
    ranks: tuple[EmulatedRank, ...]
    problem: str = ""  # in words, where memory ran out

    @property
    def longest(self) -> EmulatedRank:
        return max(self.ranks, key=lambda each: each.seconds)

    @property
    def bubble(self) -> float:
        return self.predicted.longest.bubble if len(self.ranks) > 1 else 0.0

    @property
    def seconds(self) -> float:
        return self.longest.seconds + self.bubble

    @property
    def off(self) -> float:
        """By which share the emulated step is longer than the dry run's, whose loop around the step it has too."""
        return self.seconds / self.predicted.seconds - 1

    def facts(self) -> dict[str, object]:
        program = self.predicted.program
        told: dict[str, object] = {
            "run": program.name,
            "ranks": f"{program.ranks} of {self.predicted.cluster.name}",
            "on": self.device,
        }
        if self.problem:
            return told | {"problem": self.problem}
        return told | {
            "step": f"{format_seconds(self.seconds)} (dry run {format_seconds(self.predicted.seconds)})",
            "exposed communication": format_seconds(self.longest.exposed),
            "memory": format_bytes(max(each.allocated_bytes for each in self.ranks)),
        }

    def to_json(self) -> dict[str, Any]:
        if self.problem:
            return {"device": self.device, "fits": False, "problem": self.problem, "dry_run": self.predicted.to_json()}
        return {
            "device": self.device,
            "step_s": self.seconds,
            "bubble_s": self.bubble,
            "exposed_communication_s": self.longest.exposed,
            "off_dry_run": self.off,
            "fits": True,
            "ranks": [asdict(each) for each in self.ranks],
            "dry_run": self.predicted.to_json(),
        }

    def to_text(self) -> str:
        program = self.predicted.program
        lines = [
            f"{program.name} on {self.predicted.cluster.name}: {program.ranks} ranks, {program.strategy}",
            f"emulated links; the kernels and the memory of this {self.device}; values mean nothing",
            "",
        ]
        if self.problem:
            return "\n".join([*lines, self.problem])
        rank = self.longest
        lines.append(
            f"step          {format_seconds(self.seconds)}; the dry run says "
            f"{format_seconds(self.predicted.seconds)}: {-self.off / (1 + self.off):+.1%}"
        )
        if self.bubble:
            lines.append(f"  of that     {format_seconds(self.bubble)} bubble, which is the dry run's")
        if len(self.ranks) > 1:
            lines += [
                f"  stage {each.stage:<5} {format_seconds(each.seconds)}, rank {each.rank}" for each in self.ranks
            ]
        exposed = self.predicted.longest.exposed
        lines += [
            f"exposed       {format_seconds(rank.exposed)}; the dry run says {format_seconds(exposed)}",
            "",
            f"{f'of rank {rank.rank}':<15} {'calls':>6} {'MB':>10} {'on the wire':>12} {'exposed':>10}  in a step",
        ]
        for kind, each in sorted(rank.traffic.items()):
            size = each.num_bytes / 1e6
            on_wire, waited = format_seconds(each.seconds), format_seconds(each.exposed)
            lines.append(f"  {kind:<13} {each.calls:>6} {size:>10,.1f} {on_wire:>12} {waited:>10}")
        most = max(self.ranks, key=lambda each: each.allocated_bytes)
        held, taken = format_bytes(most.allocated_bytes), format_bytes(most.reserved_bytes)
        dry = format_bytes(self.predicted.total_memory)
        lines += ["", f"memory        {held} at most, of {taken} that the allocator took; the dry run says {dry}"]
        return "\n".join(lines)


def emulate(
    config: Config,
    predicted: ReplayedStep,
    *,
    device: torch.device | None = None,
    rank: int = 0,
    steps: int = 8,
    lateness_s: float = 0.0,
    trace: Path | None = None,
) -> EmulatedStep:
    """Runs a rank of each stage for a few steps, with what was decided for a prediction; on this machine's GPU.

    ``rank`` is one of a pipeline's ranks that pass their work to one another. ``lateness_s``: by how much the last rank
    of a collective is late on average. Raises UsageError without a GPU, and for what has no emulation.
    """
    cluster, ranks = predicted.cluster, predicted.program.ranks
    where = _device_for(cluster) if device is None else device
    config = _for_a_few_steps(config, where, ranks, steps + _WARM)
    node_ranks = min(ranks, cluster.node.devices)
    fabric = Fabric(
        cost_in_training(cluster, ranks, is_compiled=predicted.program.is_compiled),
        where,
        node_ranks=node_ranks,
        channels=num_channels(cluster),
        lateness_s=lateness_s,
        seed=config.train.seed,
    )
    world, stages = EmulatedWorld(ranks, fabric), layout_of(config, ranks, node_ranks).pipeline
    width = ranks // stages
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    found: list[EmulatedRank] = []
    for stage in range(stages):
        own = rank % width + stage * width
        try:
            with _traced(trace if stage == 0 else None) as look:
                found.append(_run(config, world, own, stage, node_ranks, look))
        except torch.OutOfMemoryError as error:
            return EmulatedStep(device=name, predicted=predicted, ranks=(), problem=_out_of_memory(own, where, error))
        finally:
            gc.collect()
            if where.type == "cuda":
                torch.cuda.empty_cache()
    return EmulatedStep(device=name, predicted=predicted, ranks=tuple(found))


def _device_for(cluster: Cluster) -> torch.device:
    if not torch.cuda.is_available():
        raise UsageError(
            "--on gpu, and torch sees no GPU here\n  the engine's kernels and memory are real, and links are emulated\n"
            "  run it where one of the cluster's GPUs is, or leave --on out for the dry run"
        )
    if cluster.device.is_cpu:
        raise UsageError(
            f"--on gpu with {cluster.name}, which has CPUs\n  name a cluster of GPUs: --cluster '1x dgx-h200'"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _for_a_few_steps(config: Config, device: torch.device, ranks: int, steps: int) -> Config:
    if config.comm.algorithm != "native":
        raise UsageError(
            f"comm.algorithm = {config.comm.algorithm} with --on gpu\n  what is emulated are NCCL's collectives\n"
            "  set comm.algorithm = native, or leave --on out for the dry run"
        )
    if isinstance(config.data, SyntheticConfig):
        needed = config_batch(config, ranks).global_batch
        config = config.with_values("data", samples=max(config.data.samples, needed), eval_fraction=0.0)
    config = config.with_values("parallel", device=device.type, ranks=ranks)
    return config.with_values("train", steps=steps)


def _run(
    config: Config, world: EmulatedWorld, rank: int, stage: int, node_ranks: int, look: torch.profiler.profile | None
) -> EmulatedRank:
    device, sink, fabric = world.device, KeptRecords(), world.fabric
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer = build_trainer(config, world.rank(rank), node_ranks=node_ranks, sink=sink)
    traffic: dict[str, Traffic] = {}
    last = trainer.parts.plan.total_steps

    def watch(_: Trainer, result: StepResult) -> None:
        if result.step in (_WARM, last):
            traffic.clear()
            traffic.update(fabric.take_traffic())
        if look is not None and result.step == last - 1:
            look.start()

    trainer.hooks = [watch]
    trainer.run()
    if look is not None:
        look.stop()
    steps, on_gpu = last - _WARM, device.type == "cuda"
    taken = [each.step_s for each in sink.records if isinstance(each, StepRecord) and each.step > _WARM]
    return EmulatedRank(
        rank=rank,
        stage=stage,
        seconds=statistics.median(taken),
        traffic={
            kind: Traffic(each.calls // steps, each.num_bytes // steps, each.seconds / steps, each.exposed / steps)
            for kind, each in traffic.items()
            if each.calls >= steps
        },
        allocated_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else 0,
    )


@contextlib.contextmanager
def _traced(path: Path | None) -> Iterator[torch.profiler.profile | None]:
    """Yields what looks at the last step, and writes its time line; None where nobody asked."""
    if path is None:
        yield None
        return
    look = torch.profiler.profile(acc_events=True)  # else torch 2.10 warns of one cycle
    yield look
    look.export_chrome_trace(str(path))


def _out_of_memory(rank: int, device: torch.device, error: BaseException) -> str:
    held = format_bytes(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else "the memory"
    return f"rank {rank} does not fit: it ran out of memory with {held} in use ({str(error).partition('. ')[0]})"
