"""``paceline learn play``: memory and step time of a model, for what the sliders of the page say.

    inputs = PlayInputs.of({"size": "gpt-7b", "gpus": "32", "strategy": "fsdp"})
    answer = answer_for(inputs)

An answer comes from the functions behind ``paceline plan``, as it judges a config that is written. It imports no torch
and takes about ten milliseconds; ``curves_for`` asks for each value of three sliders, and the global batch stays. The
page gets the command that gives the same config, on top of ``gpt_7b``, which ships. It is one file, served on the
loopback address; ``/api/answer?size=gpt-7b&gpus=32`` has what it shows, ``/api/curves`` the curves.
The content security policy allows its style and script by their hashes and nothing else, and requests must name a
loopback host (``paceline/view/gate.py``). Inputs are words of fixed lists and numbers within bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.cluster.devices import Catalog, Cluster, load_cluster
from paceline.cluster.entries import shipped
from paceline.config import config_from_dict
from paceline.config.load import read_values
from paceline.config.sections import GPT_SIZES
from paceline.errors import ConfigError, PacelineError, UsageError
from paceline.plan.layout import STRATEGIES
from paceline.plan.plan import MemoryEstimate
from paceline.predict.formulas.step import Prediction
from paceline.search.candidates import CHECKPOINTS, TrainingTask
from paceline.search.request import PRECISIONS, request_for, why_not_written, workload_as_written
from paceline.search.search import budget_of, rank_one
from paceline.units import format_bytes, format_count, format_seconds
from paceline.view.gate import HEADERS, Gate
from paceline.view.html import as_json, security_policy
from paceline.view.server import as_response

CONFIG_FILE = "gpt_7b"  # it ships
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
# The least and the most of each number, so that no request takes long.
NUMBERS: Mapping[str, tuple[int, int]] = {
    "layers": (1, 96),
    "width": (64, 32768),
    "context": (64, 131072),
    "gpus": (1, 4096),
    "tensor": (1, 64),
    "pipeline": (1, 16),
    "microbatch": (1, 128),
    "batch": (1, 65536),
}
# What is drawn as curves, and up to which value.
CURVES: Mapping[str, int] = {"gpus": 1024, "context": 131072, "batch": 8192}
# What lessons begin with, on top of what the page shows first.
PRESETS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "3: data parallelism, one node",
        {
            "size": "gpt-1.1b",
            "layers": 20,
            "width": 2048,
            "context": 2048,
            "gpus": 8,
            "strategy": "ddp",
            "batch": 64,
            "microbatch": 4,
        },
    ),
    ("4: a 7B under DDP does not fit", {"gpus": 8, "strategy": "ddp", "batch": 64}),
    ("5: FSDP over a slow network", {"strategy": "fsdp", "network": "ethernet-100g", "batch": 64}),
    ("6: tensor parallelism inside a node", {"gpus": 8, "tensor": 8, "strategy": "ddp", "batch": 8}),
    ("7: a pipeline and its bubble", {"pipeline": 8, "strategy": "zero1", "batch": 64}),
    ("8: fp8 and bf16", {"gpus": 8, "precision": "fp8", "batch": 64}),
    ("9: a 7B on ten nodes", {"gpus": 80, "strategy": "zero2", "batch": 80, "compile": "off"}),
    ("10: a long context", {"gpus": 8, "context": 32768, "recompute": "full", "batch": 8}),
    ("12: too many GPUs for a batch", {"gpus": 1024, "strategy": "zero1", "batch": 1024}),
)
# What the file does not say as the sliders stand at first: the command always has it.
_OWN = ("parallel.ranks", "parallel.strategy", "train.microbatch", "train.global_batch")
# Parts of a step, as the page shows them: those of StepParts that are added up in each.
STEP_PARTS: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute",),
    "launches": ("launch_wait",),
    "exposed": ("exposed", "tensor_wait"),
    "slowed": ("contention",),
    "bubble": ("bubble",),
    "optimizer": ("optimizer",),
    "slowest": ("slowest",),
}
MEMORY_PARTS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "temporary", "at_other_times"),
    "other": ("buffers", "framework", "compression"),
}


@cache
def _base_values() -> dict[str, Any]:
    return read_values(CONFIG_FILE)


def choices() -> dict[str, tuple[str, ...]]:
    """Returns the words that each choice of the page has."""
    catalog = shipped()
    return {
        "size": tuple(GPT_SIZES),
        "node": tuple(name for name in catalog.nodes if not Catalog().node(name).device.is_cpu),
        "network": ("", *catalog.networks),
        "strategy": STRATEGIES,
        "precision": PRECISIONS,
        "recompute": CHECKPOINTS,
        "schedule": SCHEDULES,
        "compile": ("on", "off"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayInputs:
    """Where the sliders stand. ``network`` is empty for the one that the node usually has."""

    size: str = "gpt-7b"
    layers: int = 32
    width: int = 4096
    context: int = 4096
    node: str = "dgx-h100"
    network: str = ""
    gpus: int = 32
    strategy: str = "fsdp"
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    microbatch: int = 1
    batch: int = 256
    precision: str = "bf16_master"
    recompute: str = "none"
    compile: str = "on"

    @classmethod
    def of(cls, values: Mapping[str, str]) -> PlayInputs:
        """Reads the fields of a request. Raises UsageError for a name, word or number that the page does not have."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UsageError(f"{_shown(unknown[0])} is no input of the page\n  they are {', '.join(sorted(known))}")
        return cls(**{name: _read(name, text) for name, text in values.items()})

    @property
    def cluster_text(self) -> str:
        """The cluster in the words of ``--cluster``: whole nodes, or devices of one kind where they fill none."""
        node = Catalog().node(self.node)
        if self.gpus % node.devices == 0:
            text = f"{self.gpus // node.devices}x {self.node}"
        else:
            text = f"{self.gpus}x {node.device.name}"
        return f"{text} over {self.network}" if self.network else text

    @property
    def data(self) -> int:
        """Data-parallel ranks; 0 where tensor and pipeline ranks do not divide the GPUs."""
        data, rest = divmod(self.gpus, self.tensor * self.pipeline)
        return 0 if rest else data

    def settings(self) -> dict[str, str]:
        """Returns the keys of the config that the sliders set."""
        shape = GPT_SIZES[self.size]
        heads = max(1, self.width // (shape.width // shape.heads))
        found = {
            "model.size": self.size,
            "model.layers": str(self.layers),
            "model.width": str(self.width),
            "model.heads": str(heads),
            "model.kv_heads": str(max(1, heads * shape.kv_heads // shape.heads)),
            "model.mlp_width": str(max(1, self.width * shape.mlp_width // shape.width)),
            "model.context": str(self.context),
            "model.compile": "true" if self.compile == "on" else "false",
            "data.context": str(self.context),
            "parallel.ranks": str(self.gpus),
            "parallel.strategy": self.strategy,
            "parallel.tensor": str(self.tensor),
            "parallel.pipeline": str(self.pipeline),
            "train.microbatch": str(self.microbatch),
            "train.global_batch": str(self.batch),
            "train.precision": self.precision,
            "memory.checkpoint_activations": self.recompute,
        }
        if self.pipeline > 1:
            found["parallel.schedule"] = self.schedule
        if self.tensor > 1:
            found["parallel.sequence_parallel"] = "true"
        return found

    def command(self, verb: str) -> str:
        """Returns the command line that asks ``paceline plan`` or ``predict`` for the same."""
        is_file = GPT_SIZES[self.size] is GPT_SIZES["gpt-7b"]
        usual = PlayInputs().settings()
        words = [
            f"{key}={value}"
            for key, value in self.settings().items()
            if key in _OWN or usual.get(key) != value or (key.startswith("model.") and not is_file)
        ]
        return shlex.join(["paceline", verb, CONFIG_FILE, *words, "--cluster", self.cluster_text])


def _read(name: str, text: str) -> Any:
    if name in NUMBERS:
        low, high = NUMBERS[name]
        if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
            raise UsageError(f"{name} = {_shown(text)}\n  it is a whole number\n  give one from {low} to {high}")
        return int(text)
    if text not in (known := choices()[name]):
        raise UsageError(f"{name} = {_shown(text)}\n  the page has no such choice\n  take one of {', '.join(known)}")
    return text


def _shown(text: str) -> str:
    return repr(text[:40])


# Answers.


class Priced(NamedTuple):
    """Where the sliders stand, priced: its parts are those of ``paceline plan``."""

    cluster: Cluster
    task: TrainingTask
    ranked: Prediction
    memory: MemoryEstimate


def price(inputs: PlayInputs) -> Priced:
    """Prices a config as it is written. Raises PacelineError with the rule that refuses it."""
    cluster = load_cluster(inputs.cluster_text)
    words = [f"{key}={value}" for key, value in inputs.settings().items()]
    request = request_for(config_from_dict(_base_values(), "play", words), cluster)
    task = request.tasks[0]
    workload = workload_as_written(request.config, task, cluster)
    if workload is None:
        raise UsageError(why_not_written(request.config, cluster))
    memory = None if task.need is None else task.need.estimate(workload.layout)
    if memory is None:
        raise UsageError("the model cannot be cut into these stages\n  a stage has one block at least")
    return Priced(cluster, task, rank_one(workload, cluster, task.need), memory)


def answer_for(inputs: PlayInputs) -> dict[str, Any]:
    """Returns what the page shows, as plain data: numbers, or under ``problems`` the rules that refuse them."""
    about = {"cluster": inputs.cluster_text} | {name: getattr(inputs, name) for name in ("gpus", "data", "batch")}
    commands = {verb: inputs.command(verb) for verb in ("plan", "predict")}
    answer: dict[str, Any] = {"about": about, "commands": commands}
    try:
        priced = price(inputs)
    except ConfigError as error:
        return answer | {"problems": [str(each) for each in error.problems]}
    except PacelineError as error:
        return answer | {"problems": [str(error)]}
    params = priced.task.model.params
    model = {"parameters": params, "text": f"{format_count(params)} parameters"}
    memory, step = _memory(priced, inputs), _step(priced.ranked, priced.task)
    return answer | {"problems": [], "memory": memory, "step": step, "model": model}


def curves_for(inputs: PlayInputs) -> dict[str, list[dict[str, float]]]:
    """Returns memory and speed along each curve: one slider moves, the others stay; what is refused is left out."""
    curves: dict[str, list[dict[str, float]]] = {}
    for name, most in CURVES.items():
        first = {"context": 512, "batch": inputs.microbatch * max(1, inputs.data)}.get(name, 1)
        values = sorted({getattr(inputs, name), *(first * 2**power for power in range(18) if first * 2**power <= most)})
        curves[name] = []
        for value in values:
            with contextlib.suppress(PacelineError):
                priced = price(replace(inputs, **{name: value}))
                speed = priced.ranked.tokens_per_s / priced.cluster.devices
                point = {"at": value, "memory": priced.ranked.memory_bytes, "tokens_per_s": speed}
                curves[name].append(point | {"budget": budget_of(priced.cluster)})
    return curves


def _memory(priced: Priced, inputs: PlayInputs) -> dict[str, Any]:
    cluster, memory = priced.cluster, priced.memory
    budget, needs = budget_of(cluster), priced.ranked.memory_bytes
    fits = needs <= budget
    room = f"{format_bytes(budget)} of the device's {format_bytes(cluster.device.memory_bytes)} may be taken"
    words = f"It {'fits' if fits else 'does not fit'}: a rank needs {format_bytes(needs)}, and {room}."
    return {
        "parts": {name: sum(getattr(memory, each) for each in parts) for name, parts in MEMORY_PARTS.items()},
        "total": memory.device_bytes,
        "needs": needs,
        "budget": budget,
        "device": cluster.device.memory_bytes,
        "fits": fits,
        "words": words,
        "ways": "" if fits else _ways_out(inputs, budget),
    }


def _ways_out(inputs: PlayInputs, budget: float) -> str:
    """Says which single changes make it fit, and what a rank needs then."""
    data = f"over {inputs.data} data-parallel ranks"
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"strategy {name} {data}", {"strategy": name}) for name in STRATEGIES if name != "ddp"
    ]
    changes += [("recompute full", {"recompute": "full"}), ("a microbatch of 1", {"microbatch": 1})]
    for name, words in (("tensor", "tensor ranks"), ("pipeline", "pipeline stages"), ("gpus", "GPUs")):
        more = [times * getattr(inputs, name) for times in (2, 4)]
        changes += [(f"{each} {words}", {name: each}) for each in more]
    ways = []
    for words, change in changes:
        with contextlib.suppress(PacelineError):
            needs = price(replace(inputs, **change)).ranked.memory_bytes
            if needs <= budget:
                ways.append(f"{words} ({format_bytes(needs)})")
    return f"It fits with one change: {', '.join(ways)}." if ways else "No single change of a slider makes it fit."


def _step(ranked: Prediction, task: TrainingTask) -> dict[str, Any]:
    step = ranked.step
    parts = {name: sum(getattr(step, each) for each in names) for name, names in STEP_PARTS.items()}
    low, high = ranked.band
    waits = parts["exposed"] / step.total
    words = f"A step takes {format_seconds(ranked.seconds)}; {waits:.0%} of it is exposed communication"
    if parts["bubble"]:
        words += f", and {parts['bubble'] / step.total:.0%} is the pipeline's bubble"
    return {
        "parts": parts,
        "seconds": ranked.seconds,
        "low": low,
        "high": high,
        "hidden": step.hidden,
        "tokens_per_s": ranked.tokens_per_s,
        "mfu": ranked.mfu,
        "layout": str(ranked),
        "outside": list(ranked.outside),
        "words": f"{words}.",
        "precision": task.compute,
    }


_MOST_QUERY = 1000  # letters


def make_play_app() -> Starlette:
    """Returns the application, which answers requests to names of this machine alone."""
    app = Starlette(routes=[Route("/", _page), Route("/api/answer", _answer), Route("/api/curves", _answer)])
    app.add_middleware(Gate, token="")  # nosec B106  # none is needed on the loopback
    answer_for(PlayInputs())  # the first one reads the catalog and the constants
    return app


@cache
def play_page() -> tuple[str, str]:
    """Returns the page and its content security policy."""
    text = page_with({})
    style, script = (text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] for tag in ("style", "script"))
    return text, security_policy(style, script, connect="'self'") + "; frame-ancestors 'none'"


def page_with(more: Mapping[str, Any]) -> str:
    """Returns the page with what it is about, and with more data; numbers look as on the live page of a run."""
    text = resources.files("paceline_course").joinpath("play.html").read_text(encoding="utf-8")
    numbers = resources.files("paceline.view").joinpath("page", "format.js").read_text(encoding="utf-8")
    usual = dataclasses.asdict(PlayInputs())
    # The width grows so that heads stay as wide, and heads of keys and values whole.
    sizes = {
        name: {"layers": of.layers, "width": of.width, "context": of.context, "step": of.width // of.kv_heads}
        for name, of in GPT_SIZES.items()
    }
    data = {"choices": choices(), "numbers": NUMBERS, "usual": usual, "sizes": sizes, "presets": PRESETS, **more}
    return text.replace("@FORMAT@", numbers).replace("@DATA@", as_json(data))


async def _page(_: Request) -> Response:
    text, policy = play_page()
    return Response(text, media_type="text/html", headers=HEADERS | {"content-security-policy": policy})


async def _answer(request: Request) -> Response:
    if len(request.url.query) > _MOST_QUERY:
        return as_response({"problems": ["the request is too long"]}, status=414)
    try:
        inputs = PlayInputs.of(dict(request.query_params))
    except UsageError as error:
        return as_response({"problems": [str(error)]}, status=400)
    asked = curves_for if request.url.path.endswith("curves") else answer_for
    return as_response(await asyncio.to_thread(asked, inputs))
