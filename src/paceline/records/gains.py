"""What would help a run, and by how much: changes of the config with the speed-up that each is predicted to bring.

    predicted   the formulas of ``predict/`` priced the config as it is and as it would be, on the run's devices
    bound       arithmetic: what the step would take if the change removed the cost that it is about, wholly or in half

A bound is the most that a change can bring. With shares of the step d (data), c (communication), l (lost to a rank):

    no waiting for data 1/(1-d)      half the exchanges 1/(1-c/2)      a rank as fast as the others 1/(1-l)
    twice the ranks     1/((1-c)/2 + c), where communication stays as it is
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from paceline.cluster.devices import load_cluster
from paceline.config import Config, load_config
from paceline.config.load import leaf_values
from paceline.errors import PacelineError
from paceline.records.facts import RunFacts
from paceline.records.records import RunRecord

_FEWEST = 1.005  # a speed-up below is none
_LONGEST = 50.0  # a bound beyond says nothing
_COMPILE = "compile the model (model.compile = auto)"
Predict = Callable[[Sequence[str]], float | None]
"""Returns how many times as fast a run would be with these overrides of its config; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What to change, and how many times as fast the run would be: predicted by formulas, or at most (a bound)."""

    text: str
    gain: float
    basis: Literal["predicted", "bound"]
    why: str = ""

    def __str__(self) -> str:
        most = "" if self.basis == "predicted" else "at most "
        basis = "predicted by formulas" if self.basis == "predicted" else "arithmetic bound"
        return f"{self.text}: {most}{self.gain:.2f} x as fast ({basis}{f': {self.why}' if self.why else ''})"


@dataclass(frozen=True, slots=True)
class Gains:
    """Knows what can be changed about a run: its first record, the values of its config, and who predicts."""

    run: RunRecord
    settings: Mapping[str, Any] = field(default_factory=dict)  # by dotted key
    predict: Predict = lambda _: None

    def best_changes(self, shares: Mapping[str, float], facts: RunFacts, most: int = 2) -> tuple[Improvement, ...]:
        """Returns the changes that help most against what limits a run: those of the first cause come first."""
        ways: dict[str, Callable[[float, RunFacts], Iterator[Improvement]]] = {
            "data": self._for_data,
            "communication": self._for_communication,
            "link": self._for_link,
            "rank": self._for_rank,
            "host": self._for_host,
            "memory": self._for_memory,
            "restarts": self._for_restarts,
            "compute": self._for_compute,
        }
        found: list[Improvement] = []
        for cause in [*shares, "compute"]:
            own = sorted(ways[cause](shares.get(cause, 0.0), facts), key=lambda change: -change.gain)
            found += [each for each in own if each.gain >= _FEWEST and each.text not in {one.text for one in found}]
        return tuple(found[:most])

    def _change(self, text: str, bound: float, why: str, overrides: Sequence[str] = ()) -> Improvement:
        """Makes a change with the gain that formulas predict for the overrides; else with the bound."""
        predicted = self.predict(overrides) if overrides else None
        if predicted is not None:
            return Improvement(text=text, gain=predicted, basis="predicted")
        return Improvement(text=text, gain=min(bound, _LONGEST), basis="bound", why=why)

    def _for_data(self, share: float, _: RunFacts) -> Iterator[Improvement]:
        bound, text = 1.0 / max(1.0 - share, 1e-9), "raise data.workers"
        if isinstance(workers := self.settings.get("data.workers", 0), int):
            # Workers that are always busy read one step in (workers x step); without any, the rank itself reads.
            wanted = math.ceil((workers or share) / max(1.0 - share, 0.02))
            text += f" from {workers} to {max(wanted, workers + 1)}"
        yield self._change(text, bound, "no waiting for data")
        yield self._change("prepare samples once, ahead of the run", bound, "no waiting for data")

    def _for_communication(self, share: float, _: RunFacts) -> Iterator[Improvement]:
        half = 1.0 / (1.0 - share / 2)
        yield self._accumulate(half)
        if self.settings.get("comm.compression.policy", "none") == "none":
            yield self._change("send half the bytes (comm.compression.policy = bf16)", half, "half the bytes")

    def _accumulate(self, bound: float) -> Improvement:
        """Twice the samples a step; in a pipeline also half the bubble for each of them."""
        run = self.run
        twice = [f"train.accumulate={2 * run.accumulate}", f"train.global_batch={2 * run.global_batch}"]
        text = f"raise train.accumulate from {run.accumulate} to {2 * run.accumulate}, and the global batch with it"
        return self._change(text, bound, "half the exchanges for each sample", twice)

    def _for_link(self, share: float, facts: RunFacts) -> Iterator[Improvement]:
        exposed = share * (facts.steps.without_warm_up().step_s or 0.0)
        kept = min(1.0, (facts.priced_comm_s or 0.0) / exposed) if exposed > 0 else 0.0
        bound = 1.0 / max(1.0 - share * (1.0 - kept), 1e-9)
        ranks = self.run.world_size
        look = f"find the slow link (paceline doctor --ranks {ranks}), or leave its host out"
        if facts.is_inside_a_host:
            look = f"end what else runs on {self.run.host}; paceline doctor --ranks {ranks} measures its links again"
        yield self._change(look, bound, "links as fast as expected")
        yield self._accumulate(1.0 / (1.0 - share / 2))

    def _for_rank(self, share: float, facts: RunFacts) -> Iterator[Improvement]:
        if facts.straggler is None:
            return
        rank, ranks = facts.straggler.rank, self.run.world_size
        bound = 1.0 / max(1.0 - share, 1e-9)
        yield self._change(
            f"make rank {rank} as fast as the others: look at its {facts.straggler.phase}", bound, "no waiting for it"
        )
        if ranks > 2:
            yield self._change(f"leave rank {rank} out", bound * (ranks - 1) / ranks, f"{ranks - 1} equal ranks")

    def _for_host(self, _: float, facts: RunFacts) -> Iterator[Improvement]:
        if self._is_eager:
            yield self._change(_COMPILE, 2.0, "half the launches", ["model.compile=auto"])
        run = facts.run
        text = f"raise train.microbatch from {run.microbatch} to {2 * run.microbatch}"
        twice = [f"train.microbatch={2 * run.microbatch}", f"train.global_batch={2 * run.global_batch}"]
        yield self._change(text, 2.0, "twice the samples in as many launches", twice)

    @property
    def _is_eager(self) -> bool:
        return str(self.settings.get("model.compile", "none")).lower() in ("none", "false")

    def _for_memory(self, share: float, _: RunFacts) -> Iterator[Improvement]:
        run, bound = self.run, 1.0 / max(1.0 - share, 1e-9) if share > 0 else 2.0
        why = "as before memory ran out" if share > 0 else "half as many passes over the model"
        if run.world_size > 1 and run.strategy == "ddp":
            yield self._change("shard the states (parallel.strategy = fsdp) and raise train.microbatch", bound, why)
        if self.settings.get("memory.checkpoint_activations", "none") == "none":
            text = "compute activations again (memory.checkpoint_activations = full) and raise train.microbatch"
            yield self._change(text, max(1.0, bound * 0.75), f"{why}, less a forward pass of four parts")
        if not self.settings.get("train.precision", "").startswith("bf16"):
            yield self._change("halve activations (train.precision = bf16) and raise train.microbatch", bound, why)

    def _for_restarts(self, share: float, facts: RunFacts) -> Iterator[Improvement]:
        goodput = facts.goodput
        yield self._change(
            "remove what ends the ranks (paceline report names it)", 1.0 / max(1.0 - share, 1e-9), "no restarts"
        )
        total = goodput.useful_s + goodput.repeated_s + goodput.down_s
        saved = goodput.repeated_s / 2 / total if total > 0 else 0.0
        yield self._change(
            "save twice as often (checkpoint.every_steps)", 1.0 / (1.0 - saved), "half the steps made again"
        )

    def _for_compute(self, _: float, facts: RunFacts) -> Iterator[Improvement]:
        run, steps = self.run, facts.steps.without_warm_up()
        total = steps.mean_s("step_s")
        waited = steps.mean_s("comm_s") / total if total > 0 else 0.0
        text, why = f"twice the ranks ({2 * run.world_size})", "compute halves, the rest stays"
        yield self._change(text, 1.0 / ((1.0 - waited) / 2 + waited), why)
        if run.device != "cpu" and run.compute in ("fp32", "tf32"):
            times, text = 16.0 if run.compute == "fp32" else 2.0, "train in bf16 (train.precision = bf16)"
            yield self._change(text, times, "products at the peak of bf16", ["train.precision=bf16"])
        if run.device != "cpu" and self._is_eager and (gain := self.predict(["model.compile=auto"])) is not None:
            yield Improvement(text=_COMPILE, gain=gain, basis="predicted")
        peak, rate = run.measured_peak_flops, steps.samples_per_s
        if peak and rate and run.flops_per_sample:
            bound = peak * run.world_size / (rate * run.flops_per_sample)
            yield self._change("larger products: raise train.microbatch", bound, "the measured peak of products")


def settings_of(folder: Path) -> tuple[Config | None, dict[str, Any]]:
    """Reads a run's config, and its values by dotted key; nothing where there is none, or one of another version."""
    try:
        config = load_config(folder / "config.yaml")
    except (PacelineError, OSError, ValueError):
        return None, {}
    return config, leaf_values(config)


def gains_of(folder: Path, run: RunRecord, cluster: str) -> Gains:
    """Reads the config of a run, and predicts changes of it where its model and ``cluster`` can be priced."""
    config, settings = settings_of(folder)
    if config is None or config.model.kind != "gpt" or not cluster:
        return Gains(run, settings)

    @cache
    def samples_per_s(*overrides: str) -> float | None:
        from paceline.search.request import task_of, workload_as_written
        from paceline.search.search import rank_one

        try:
            changed, place = load_config(folder / "config.yaml", list(overrides)), load_cluster(cluster)
            task = task_of(changed, run.world_size)
            workload = workload_as_written(changed, task, place)
            return None if workload is None else task.global_batch / rank_one(workload, place).seconds
        except (PacelineError, ValueError, KeyError, ArithmeticError):  # this change, or this device, has no price
            return None

    def predict(overrides: Sequence[str]) -> float | None:
        now = samples_per_s()
        changed = samples_per_s(*overrides) if now else None
        return changed / now if changed and now else None

    return Gains(run, settings, predict)
