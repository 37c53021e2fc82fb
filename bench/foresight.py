"""Predictions beside runs on one GPU: models that no table has, and runs around the limit of memory.

    python bench/foresight.py models              # time and memory of six models of a user
    python bench/foresight.py limit               # twenty runs that need 80 to 120 % of the memory
    python bench/foresight.py limit --list        # the cases, without running any
    python bench/foresight.py models --cases vit  # one more time

Each run is the user's own command, ``paceline train``, in a process of its own (``bench/warm_runs.py``). It is
predicted before it runs: by ``paceline predict``, or around the limit as ``paceline train`` itself judges a GPT. A case
of the limit has as many samples a step as are predicted to need its share of the device's memory. What is predicted not
to fit must be refused; it is started all the same, and has to run out of memory. Two steps must run, since the
optimizer's state comes with the first.

The record is written after each case. Cases for which the budget has no time left are skipped, and told of.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from foresight_models import language_model
from paceline.cluster.detect import detect_machine
from paceline.cluster.devices import load_cluster
from paceline.config import load_config
from paceline.predict.memory.memory import WORKSPACE_BYTES
from paceline.search.expect import needed
from paceline.units import GIB
from warm_runs import Done, WarmRuns, at_once, found_in, warm_runs, with_errors, write_row

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
LIBRARIES = ("transformers", "transformers.models.auto.modeling_auto", "torchvision.models")
PLAIN = (
    *("checkpoint.at_end=false", "optim.schedule.warmup=0", "parallel.ranks=1", "recovery.max_restarts=0"),
    *("data.eval_fraction=0.0", "monitor.console=false"),
)
CASE_S = 30.0  # left of the budget, for another case to begin
PROBES = (16, 48)  # samples a step: with more of them memory grows along a line
MOST_PROBES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of a user's own: sections of its config, and where it is one of transformers, what its folder holds."""

    model: dict[str, Any]
    data: dict[str, Any]
    batch: int
    train: dict[str, Any]
    folder: dict[str, Any] | None = None

    def write(self, name: str, folder: Path) -> Path:
        """Writes the config, and the model's folder, and returns the config's path."""
        model = dict(self.model)
        if self.folder is not None:
            model["path"] = str(folder / "models" / name)
            language_model(folder=model["path"], **self.folder)
        train = {"steps": 12, "global_batch": self.batch, **self.train}
        sections = {"name": name, "model": model, "data": self.data, "train": train, "optim": {"lr": 1e-4}}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        return path


def factory(path: str, **args: Any) -> dict[str, Any]:
    return {"kind": "factory", "factory": path, "args": args}


def tokens(context: int, vocab: int = 32_000) -> dict[str, Any]:
    return {"kind": "synthetic_tokens", "vocab_size": vocab, "context": context, "samples": 8192}


HF = {"kind": "hf", "pretrained": False, "task": "causal_lm"}
IMAGES = {"kind": "synthetic_images", "samples": 16_384, "classes": 1000, "size": 224, "dtype": "uint8"}
LLAMA_3B = {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8}
LLAMA_SMALL = {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16}
T5 = {"vocab_size": 32_128, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
MAMBA = {"hidden_size": 768, "num_hidden_layers": 8, "state_size": 16, "vocab_size": 32_000}
MOE = {"hidden_size": 1024, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 16}
EXPERTS = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000}
UNET = Model(
    model=factory("foresight_models:unet"),
    data=factory("foresight_models:masks", samples=65_536, size=256),
    batch=16,
    train={"loss": "foresight_models:mask_loss"},
)
LLAMA = Model(
    model=HF,
    data=tokens(1024),
    batch=8,
    train={},
    folder={"kind": "llama", "intermediate_size": 2816, "vocab_size": 32_000, **LLAMA_SMALL},
)
MODELS = {
    "vit": Model(model=factory("torchvision.models:vit_b_16"), data=IMAGES, batch=256, train={}),
    "t5": Model(
        model=factory("foresight_models:t5", **T5),
        data=factory("foresight_models:texts", samples=8192, vocab=32_000, source=512, target=128),
        batch=32,
        train={"loss": "foresight_models:t5_loss"},
    ),
    "unet": UNET,
    "moe": Model(model=HF, data=tokens(1024), batch=8, train={}, folder={"kind": "mixtral", **MOE, **EXPERTS}),
    "llama-3b": Model(
        model=HF,
        data=tokens(2048),
        batch=4,
        train={},
        folder={"kind": "llama", "intermediate_size": 8192, "vocab_size": 32_000, **LLAMA_3B},
    ),
    "mamba": Model(model=HF, data=tokens(128), batch=8, train={"steps": 6}, folder={"kind": "mamba", **MAMBA}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A kind of run, at some shares of the memory. ``config``: one that ships, or a model of a user's own."""

    config: str | Model
    shares: tuple[float, ...]
    settings: tuple[str, ...] = ()


EAGER = "model.compile=false"
SHORT = ("model.context=512", "data.context=512")
LIMITS = {
    "124m": Limit(config="gpt_124m.yaml", shares=(0.80, 0.98, 1.20), settings=(EAGER,)),
    "124m-fp32": Limit(config="gpt_124m.yaml", shares=(0.92, 1.06), settings=(EAGER, "train.precision=fp32")),
    "124m-autocast": Limit(config="gpt_124m.yaml", shares=(0.95, 1.05), settings=(EAGER, "train.precision=bf16")),
    "124m-twice": Limit(config="gpt_124m.yaml", shares=(0.96,), settings=(EAGER, "train.accumulate=2")),
    "350m": Limit(config="gpt_124m.yaml", shares=(0.90, 1.04), settings=(EAGER, "model.size=gpt-350m")),
    "1b": Limit(config="gpt_1b.yaml", shares=(0.94, 1.08), settings=(EAGER, "parallel.strategy=fsdp", *SHORT)),
    "1b-matmuls": Limit(
        config="gpt_1b.yaml",
        shares=(0.97, 1.03),
        settings=(EAGER, "parallel.strategy=fsdp", "memory.checkpoint_activations=matmuls", *SHORT),
    ),
    "experts": Limit(
        config="gpt_124m.yaml",
        shares=(0.88, 1.12),
        settings=(EAGER, "model.experts=8", "model.active=2", "model.expert_width=1536"),
    ),
    "llama": Limit(config=LLAMA, shares=(0.85, 1.15)),
    "unet": Limit(config=UNET, shares=(0.93, 1.07)),
}


def own_figures(predicted: dict[str, Any]) -> dict[str, Any]:
    """Returns of a prediction what is compared: its memory as the allocator counts, with the workspaces of products."""
    parts = predicted["memory_bytes"]
    held = parts["total"] - parts.get("framework", 0) + WORKSPACE_BYTES
    low, high = predicted["step_s_low"], predicted["step_s_high"]
    row = {"predicted_step_s": round(predicted["step_s"], 5), "predicted_gib": round(held / GIB, 3)}
    row |= {"low_s": round(low, 5), "high_s": round(high, 5), "doubt": predicted["doubt"]}
    return row | {"parts_s": {name: round(seconds, 5) for name, seconds in predicted["parts_s"].items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What cases share: the server that runs, a folder, and where it is predicted for and measured on."""

    runs: WarmRuns
    folder: Path
    cluster: str
    device: str
    has_bytes: float

    def train(self, case: str, config: Path, settings: Sequence[str], *options: str) -> dict[str, Any]:
        own = (*PLAIN, f"parallel.device={self.device}", f"monitor.folder={self.folder}", f"name={case}", *settings)
        done: Done = self.runs.run(["train", str(config), *own, "--quiet", *options], is_rank=True)
        row = {"ran": not done.code, "ran_out": done.ran_out, "took_s": done.took_s} | found_in(self.folder / case)
        return row | ({"error": done.told} if done.code else {})

    def predict(self, config: Path, settings: Sequence[str]) -> dict[str, Any]:
        own = (*PLAIN, *settings, "--cluster", self.cluster)
        return self.runs.predict([str(config), *own])

    def models(self, names: Sequence[str], settings: Sequence[str]) -> Iterator[Callable[[], dict[str, Any]]]:
        """Predicts all models at once, before the GPU has anything to do; then yields their runs."""
        configs = {name: MODELS[name].write(name, self.folder) for name in names}
        found = at_once([partial(self.predict, path, settings) for path in configs.values()])
        for (name, path), predicted in zip(configs.items(), found, strict=True):
            yield partial(self.model, name, path, predicted, settings)

    def model(self, name: str, path: Path, predicted: Any, settings: Sequence[str]) -> dict[str, Any]:
        if isinstance(predicted, Exception):
            return {"case": name, "error": str(predicted)}
        row = {"case": name} | own_figures(predicted)
        row |= self.train(name, path, settings)
        if (found := with_errors(row)).get("steps", 0) > 1:
            found["in_band"] = row["low_s"] <= row["step_s"] <= row["high_s"]
        return found

    def limits(self, names: Sequence[str], settings: Sequence[str]) -> Iterator[Callable[[], dict[str, Any]]]:
        """Looks for the samples of all cases at once; then yields their runs, those that fit first."""
        cases = [(f"{name}-{share:.0%}", LIMITS[name], share) for name in names for share in LIMITS[name].shares]
        cases.sort(key=lambda case: (case[2] > 1, case[2]))
        sizes = at_once([partial(self.size_for, *case, settings) for case in cases])
        for (name, limit, share), found in zip(cases, sizes, strict=True):
            yield partial(self.limit, name, limit, share, found, settings)

    def config_of(self, name: str, limit: Limit) -> Path:
        return CONFIGS / limit.config if isinstance(limit.config, str) else limit.config.write(name, self.folder)

    def need(self, config: Path, limit: Limit, samples: int, settings: Sequence[str]) -> float:
        """Returns the bytes that so many samples a step are predicted to need."""
        own = (*limit.settings, *settings, *_steps(samples))
        if isinstance(limit.config, Model):
            return float(self.predict(config, own)["memory_bytes"]["total"])
        asked = load_config(config, [*PLAIN, *own, "parallel.device=cuda"])
        found = needed(asked)
        assert found is not None
        return float(found.total)

    def size_for(self, name: str, limit: Limit, share: float, settings: Sequence[str]) -> tuple[int, float]:
        """Returns how many samples a step are predicted to need a share of the memory, and what they need."""
        config = self.config_of(name, limit)
        need = partial(self.need, config, limit, settings=settings)
        seen = [(samples, need(samples)) for samples in PROBES]
        while len(seen) < MOST_PROBES:
            (fewer, base), (more, other) = seen[-2:]
            wanted = max(2.0, more + (share * self.has_bytes - other) * (more - fewer) / (other - base))
            samples = 2 * (math.floor(wanted / 2) if share < 1 else math.ceil(wanted / 2))  # for two microbatches
            if samples == more:
                break
            seen.append((samples, need(samples)))
        return seen[-1]

    def limit(self, name: str, limit: Limit, share: float, found: Any, settings: Sequence[str]) -> dict[str, Any]:
        row: dict[str, Any] = {"case": name, "share": share, "settings": list(limit.settings)}
        if isinstance(found, Exception):
            return row | {"error": str(found)}
        samples, need = found
        config, own = self.config_of(name, limit), (*limit.settings, *settings, *_steps(samples))
        row |= {"samples": samples, "needs_gib": round(need / GIB, 2), "has_gib": round(self.has_bytes / GIB, 2)}
        row["says_fits"] = need <= self.has_bytes
        options: tuple[str, ...] = ()
        if not row["says_fits"] and isinstance(limit.config, str):
            row["refused"] = self.train(name, config, own)["ran_out"]
            options = ("--no-memory-check", "--force")
        row |= self.train(name, config, own, *options)
        if row["ran"] or row["ran_out"]:
            row["right"] = row["says_fits"] == row["ran"]
        return row


def _steps(samples: int) -> tuple[str, ...]:
    return (f"train.global_batch={samples}", "train.steps=2")


@contextmanager
def opened(asked: argparse.Namespace) -> Iterator[Bench]:
    # The catalog's memory is what torch says of the GPU. Nothing here asks torch: its context would take a part.
    has = load_cluster(asked.cluster).device.memory_bytes
    with tempfile.TemporaryDirectory() as folder, warm_runs(LIBRARIES) as runs:
        device = "cuda" if detect_machine().gpus else "cpu"
        yield Bench(runs=runs, folder=Path(folder), cluster=asked.cluster, device=device, has_bytes=has)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("models", "limit"))
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE", help="values for all cases")
    parser.add_argument("--cases", nargs="+", default=[], help="names of cases, or of kinds; else all")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    parser.add_argument("--cluster", default="1x h200", help="what is predicted for")
    parser.add_argument("--output", type=Path, help="default: bench/results/foresight-models-h200.json, or -limit-")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_intermixed_args()
    known: dict[str, Any] = MODELS if asked.what == "models" else LIMITS
    if unknown := [each for each in asked.cases if each not in known]:
        parser.error(f"{' and '.join(unknown)}: cases are {', '.join(known)}")
    names = asked.cases or list(known)
    if asked.list:
        for name in names:
            shares = [] if asked.what == "models" else [f"{share:.0%}" for share in LIMITS[name].shares]
            print(name, *shares)
        return
    output = asked.output or ROOT / f"bench/results/foresight-{asked.what}-h200.json"
    ends = time.monotonic() + asked.budget
    with opened(asked) as bench:
        works = bench.models if asked.what == "models" else bench.limits
        config = {"cluster": asked.cluster, "device": bench.device, "settings": asked.settings}
        for work in works(names, asked.settings):
            if time.monotonic() + CASE_S > ends:
                print("the budget is spent: the other cases are skipped", flush=True)
                break
            row = work()
            write_row(output, row, name=f"foresight-{asked.what}", config=config)
            print(
                json.dumps({key: value for key, value in row.items() if key not in ("losses", "parts_s")}), flush=True
            )


if __name__ == "__main__":
    main()
