"""Everything that reads what others may have written, as targets of the fuzzer. One line in ``TARGETS`` adds one.

A target makes one input from a random number generator, in an empty folder, and returns what is to be run on it.
``parser`` makes one of a function that takes bytes: control messages belong there.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import math
import os
import pickle
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
import yaml
from fuzz_mutate import broken, changed, parser_inputs
from made_records import END, RUN, STEP
from trained_gpt import CLASSIC, VOCABULARY, change_manifest, make_model, rehash, save_trained

from paceline.checkpoint.find import find_checkpoint
from paceline.checkpoint.optimizer import load_optimizer
from paceline.checkpoint.read import fill_model, open_checkpoint
from paceline.checkpoint.tools.outgoing import ExportOptions, export
from paceline.cluster.entries import parse_catalog
from paceline.comm.control.wire import from_text
from paceline.comm.objects import from_bytes, to_bytes
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config.hf_folder import parse_class_names, parse_image_settings
from paceline.config.load import config_from_dict, load_config
from paceline.config.peft_folder import parse_peft
from paceline.data.token_files import parse_manifest
from paceline.engines.apply import parallelize
from paceline.errors import CheckpointError
from paceline.launch.kubernetes import render
from paceline.launch.kubernetes_options import KubernetesOptions
from paceline.launch.pod_patch import read_patch
from paceline.records.records import CommRecord, EvalRecord, EventRecord, to_line
from paceline.run.warm import parse_request
from paceline.schedule.text import parse_csv
from paceline.search.expectation import Expectation
from paceline.search.request import read_hugging_face
from paceline.view.document import Window, describe, heat, timeline
from paceline.view.folder import failure_of, parse_note, row_of, text_names, text_of
from paceline.view.server import Follower
from paceline_bench.profile.merge import beside
from paceline_course.course import parse_progress
from paceline_course.play import PlayInputs, answer_for

Run = Callable[[], object]
Inputs = Callable[[random.Random], bytes]
Case = Callable[[random.Random, Path], Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of input, and its share of all inputs."""

    name: str
    case: Case
    weight: int = 1


def parser(
    name: str, parse: Callable[[bytes], object], inputs: Callable[[random.Random], bytes], *errors: type
) -> Target:
    """Returns the target of a function that reads bytes, and raises ``errors`` or errors of Paceline alone."""

    def case(draw: random.Random, _: Path) -> Run:
        text = inputs(draw)

        def run() -> None:
            try:
                parse(text)
            except errors as error:  # type: ignore[misc]
                str(error).encode()

        return run

    return Target(name=name, case=case)


def command(*words: str | Path) -> Run:
    """Returns a call of the command line, in this process."""
    from paceline.cli.app import app

    return lambda: app([str(word) for word in words], prog_name="paceline")


# Checkpoints: a whole one as the template, whose large files are linked and never written to.


@functools.cache
def template() -> Path:
    """Returns a folder with a checkpoint of two ranks and its exports; made once."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    run_virtual(lambda comm: save_trained(comm, folder, "fsdp", CLASSIC), 2)
    checkpoint = open_checkpoint(folder / "step-00000007")
    export(checkpoint, folder / "plain.safetensors", ExportOptions(with_optimizer=True))
    export(checkpoint, folder / "weights.pt", ExportOptions(format="torch", with_optimizer=True))
    export(checkpoint, folder / "dcp", ExportOptions(format="dcp"))
    export(checkpoint, folder / "hf", ExportOptions(is_hugging_face=True))
    index = {"metadata": {"total_size": 1}, "weight_map": {"transformer.wte.weight": "model.safetensors"}}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def remove_template() -> None:
    """Removes what ``template`` has made."""
    if template.cache_info().currsize:
        shutil.rmtree(template(), ignore_errors=True)
        template.cache_clear()


def copy_of(name: str, folder: Path, under: str = "") -> Path:
    """Copies a part of the template; files are links to the same bytes, so that those to be changed are replaced."""
    target = folder / (under or name)
    source = template() / name
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)
    else:
        os.link(source, target)
    return target


def put(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def replace_content(found: dict[str, Any], other: Any) -> None:
    """Makes a dict what a change of it has made, if that is one."""
    found.clear()
    found.update(other if isinstance(other, dict) else {"schema": other})


def load_into_engine(path: Path) -> None:
    """Does what a resume does."""
    checkpoint = open_checkpoint(path)
    engine = parallelize(make_model(CLASSIC), SoloCommunicator(torch.device("cpu")), "ddp")
    fill_model(checkpoint, engine)
    load_optimizer(checkpoint, torch.optim.AdamW(engine.parameters(), lr=1e-2), list(engine.shards()))
    checkpoint.own(0)


def resume_auto(folder: Path) -> None:
    """Looks for the newest whole one beside an older one that is whole: there must be one."""
    try:
        found = find_checkpoint("auto", folder, "full", lambda passed: str(passed).encode())
    except CheckpointError as error:
        raise AssertionError("one bad checkpoint kept a run from going on") from error
    load_into_engine(found)


def use_checkpoint(draw: random.Random, folder: Path, path: Path) -> Run:
    """Returns one of all things that are done with a checkpoint."""
    source, out = str(path), str(folder / "out")
    fast = ["--fast"] if draw.random() < 0.5 else []
    uses: list[Run] = [
        command("checkpoint", "ls", folder),
        command("checkpoint", "ls", folder, "--full", "--json"),
        command("checkpoint", "inspect", source, "--tensors", "*"),
        command("checkpoint", "verify", source, *fast),
        command("checkpoint", "diff", source, template() / "step-00000007"),
        command("checkpoint", "reshard", source, out, "--ranks", "3", "--tensor", draw.choice("13"), *fast),
        command("checkpoint", "export", source, out, *fast),
        command("checkpoint", "export", source, f"{out}.pt", "--optimizer", *fast),
        command("checkpoint", "export", source, out, "--hf", *fast),
        lambda: load_into_engine(path),
    ]
    return draw.choice(uses)


def manifest_case(draw: random.Random, folder: Path) -> Run:
    path = copy_of("step-00000007", folder)
    if draw.random() < 0.85:
        change_manifest(path, lambda found: replace_content(found, changed(found, draw)))
    else:
        put(path / "manifest.json", broken((path / "manifest.json").read_bytes(), draw))
    return use_checkpoint(draw, folder, path)


def resume_case(draw: random.Random, folder: Path) -> Run:
    copy_of("step-00000007", folder)
    newer = copy_of("step-00000007", folder, "step-00000009")
    name = draw.choice(["manifest.json", "rank-00000.json", "rank-00001.f32.safetensors", "gone", "pipe", "loop"])
    if name == "manifest.json":
        change_manifest(newer, lambda found: replace_content(found, changed({**found, "step": 9}, draw)))
    elif name == "gone":
        (newer / "manifest.json").unlink()
    elif name in ("pipe", "loop"):
        (newer / "manifest.json").unlink()
        made = newer / draw.choice(["manifest.json", "rank-00000.json"])
        made.unlink(missing_ok=True)
        os.mkfifo(made) if name == "pipe" else made.symlink_to(made.name)
    else:
        put(newer / name, broken((newer / name).read_bytes(), draw))
        rehash(newer, name)
    return lambda: resume_auto(folder)


def values_case(draw: random.Random, folder: Path) -> Run:
    path = copy_of("step-00000007", folder)
    content = json.loads((path / "rank-00000.json").read_text())
    put(path / "rank-00000.json", json.dumps(changed(content, draw)).encode())
    rehash(path, "rank-00000.json")
    return use_checkpoint(draw, folder, path)


# safetensors, Hugging Face, torch


def other_header(content: bytes, draw: random.Random) -> bytes:
    (size,) = struct.unpack("<Q", content[:8])
    if draw.random() < 0.2:
        return broken(content[: 8 + size], draw) + content[8 + size :]
    header = json.dumps(changed(json.loads(content[8 : 8 + size]), draw)).encode()
    length = draw.choice([len(header)] * 9 + [2**60, 0, len(content) * 2, len(header) - 1])
    return struct.pack("<Q", length) + header + content[8 + size :]


def header_case(draw: random.Random, folder: Path) -> Run:
    if draw.random() < 0.5:
        path = copy_of("plain.safetensors", folder)
        put(path, other_header(path.read_bytes(), draw))
        return command("checkpoint", "import", path, folder / "out")
    path = copy_of("step-00000007", folder)
    name = "rank-00001.f32.safetensors"
    put(path / name, other_header((path / name).read_bytes(), draw))
    rehash(path, name)
    return use_checkpoint(draw, folder, path)


def hugging_face_case(draw: random.Random, folder: Path) -> Run:
    path = copy_of("hf", folder)
    name = draw.choice(["model.safetensors.index.json", "config.json", "model.safetensors"])
    content = (path / name).read_bytes()
    if name == "model.safetensors":
        put(path / name, other_header(content, draw))
    elif draw.random() < 0.7:
        put(path / name, json.dumps(changed(json.loads(content), draw)).encode())
    else:
        put(path / name, broken(content, draw))
    if draw.random() < 0.5:
        plant_pickle(path / ".metadata", folder)
    return command("checkpoint", "import", path, folder / "out")


class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def plant_pickle(path: Path, folder: Path) -> None:
    path.write_bytes(pickle.dumps(Evil(folder.parent / "planted")))


def pickle_case(draw: random.Random, folder: Path) -> Run:
    """Pickles with the flag that allows them: values alone are read. Without it nothing is."""
    flag = ["--allow-pickle"] if draw.random() < 0.8 else []
    kind = draw.choice(["weights.pt", "disks.pt", "dcp", "evil.pt", "evil"])
    path = folder / kind
    if kind == "disks.pt":  # the end of the archive, where its parts are listed
        torch.save({"a": torch.ones(2)}, path)
        content = path.read_bytes()
        end = content.rfind(b"PK\6\7")
        path.write_bytes(content[:end] + b"PK\6\7" + broken(content[end + 4 :], draw))
    elif kind == "weights.pt":
        put(copy_of(kind, folder), broken((template() / kind).read_bytes(), draw))
    elif kind == "dcp":
        copy_of(kind, folder)
        name = draw.choice([".metadata", ".metadata", "__0_0.distcp"])
        put(path / name, broken((path / name).read_bytes(), draw))
    elif kind == "evil.pt":
        torch.save({"a": torch.ones(2), "b": Evil(folder.parent / "planted")}, path)
    else:
        path.mkdir()
        plant_pickle(path / ".metadata", folder)
    return command("checkpoint", "import", path, folder / "out", *flag)


# Texts


_PARTS = {"seconds": 2.5, "processes": 1.5, "step": 1.0}
_EVENTS = [
    EventRecord(name="first_step", step=1, detail=_PARTS, time=RUN.time + 2),
    EventRecord(name="compiled", step=1, detail={"what": "the model", "seconds": 0.5}, time=RUN.time + 2),
    EventRecord(name="clock", step=1, detail={"ahead_s": 0.1, "ranks": [0]}, time=RUN.time + 2),
    EventRecord(name="scalars", step=1, detail={"mine": 1.0}, time=RUN.time + 2),
    EventRecord(name="samples", step=1, detail={"note": "1 sample", "items": [["a text", ""]]}, time=RUN.time + 2),
    EventRecord(name="microbatch", step=1, detail={"microbatch": 8, "reason": "memory"}, time=RUN.time + 2),
    CommRecord(step=1, kind="all_reduce", group="world", ranks=2, calls=1, bytes=8, seconds=0.1, time=RUN.time + 2),
    EvalRecord(step=1, loss=1.0, accuracy=0.5, samples=8, seconds=0.1, time=RUN.time + 2),
]
_FAILURE = {"rank": 0, "kind": "error", "message": "ValueError", "traceback": "in mine.py", "time": RUN.time}
_OPERATION = {"time": RUN.time + 1, "start_s": 0.0, "end_s": 0.1, "kind": "all_reduce", "num_bytes": 8}


def records_case(draw: random.Random, folder: Path) -> Run:
    """A run among others that are no runs, read by each of those who read one."""
    home = folder / "runs" / "a"
    (home / "records").mkdir(parents=True)
    place = home / "records" / "rank-0.jsonl"
    lines = [to_line(each) for each in (RUN, *[STEP] * 3, *_EVENTS, END)]
    at = draw.randrange(len(lines))
    if draw.random() < 0.8:
        lines[at] = json.dumps(changed(json.loads(lines[at]), draw)) + "\n"
    content = "".join(lines).encode()
    place.write_bytes(content if draw.random() < 0.8 else broken(content, draw))
    (home / "logs").mkdir()
    failure, log = home / "logs" / "rank-0.error.json", home / "logs" / "run.log"
    failure.write_text(json.dumps(changed(_FAILURE, draw)))
    log.write_bytes(broken(b"a line\nanother\n", draw))
    if draw.random() < 0.4:
        odd = [place, home / "records", folder / "runs" / "b", home / "trace", failure, log, home / "logs"]
        plant_odd_file(draw, draw.choice([*odd, home / "note.json", home / "config.yaml"]))
    elif draw.random() < 0.3:
        (home / "trace").mkdir()
        (home / "trace" / "rank-0.jsonl").write_text(json.dumps(changed(_OPERATION, draw)) + "\n")
    flags = draw.choice([[], [], ["--json"], ["--html", folder / "a.html"], ["--csv", folder / "a.csv"]])
    return draw.choice([command("report", home, *flags), lambda: watch_runs(folder / "runs")])


def plant_odd_file(draw: random.Random, path: Path) -> None:
    """Puts something in the place of a file or a folder that no run writes there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kind = draw.choice(["device", "loop", "pipe", "folder", "elsewhere", "nowhere"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "elsewhere": "/etc"}.get(kind, "gone"))


def watch_runs(folder: Path) -> None:
    """Does what the live page does with the runs in a folder, without a server."""
    follower = Follower([folder])
    follower.states()
    for run in follower.runs:
        follower.want(run)
        describe(run)
        heat(run, "step_s", Window())
        timeline(run, -math.inf, math.inf)
        failure_of(run.folder)
        row_of(run.folder)
        for name in text_names(run.folder):
            with contextlib.suppress(KeyError):
                text_of(run.folder, name)
    follower.states()


_TRACE = {"traceEvents": [{"ph": "X", "pid": 0, "name": "process_name", "args": {"name": "a"}, "ts": 1, "dur": 2}]}


def trace_case(draw: random.Random, folder: Path) -> Run:
    path = folder / draw.choice(["a.json", "a.json.gz"])
    content = _as_bytes(changed(_TRACE, draw))
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    if draw.random() < 0.4:
        path.write_bytes(broken(path.read_bytes(), draw))
    return lambda: beside([], path)


_CONFIG = {
    "name": "a",
    "model": {"kind": "mlp", "input_dim": 4, "hidden_dim": 8},
    "data": {"kind": "synthetic_classification", "samples": 64, "features": 4},
    "train": {"steps": 4, "global_batch": 8},
    "optim": {"kind": "adamw", "lr": 0.001, "betas": [0.9, 0.99]},
    "parallel": {"ranks": 2, "strategy": "ddp"},
}


def config_case(draw: random.Random, folder: Path) -> Run:
    path = folder / "a.yaml"
    text = (json.dumps(changed(_CONFIG, draw)) if draw.random() < 0.6 else yaml.safe_dump(_CONFIG)).encode()
    path.write_bytes(text if draw.random() < 0.4 else broken(text, draw))
    override = "optim.lr=" + broken(b"[1, {a: &x 2}, *x]", draw).decode("utf-8", "replace")
    return lambda: load_config(path, [override] if draw.random() < 0.3 else [])


_CATALOG = json.dumps(
    {"links": {"mine": {"gb_per_s": 100, "latency_us": 5, "efficiency": 0.8, "kind": "nvlink"}}, "devices": {}}
).encode()
_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
_HF = json.dumps({"model_type": "gpt2", **_SIZES}).encode()
_PREDICTED = b'{"step_s": 0.5, "step_s_low": 0.4, "step_s_high": 0.6, "memory_bytes": 1e9, "assumed": ["a"]}'
_PREDICTIONS = parser_inputs([_PREDICTED], lambda value: json.dumps(value).encode())
_REQUEST = b'{"command": ["paceline.run.worker", "a"], "folder": "/a", "environment": {"RANK": "0"}}'


def _as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def _text(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def model_case(draw: random.Random, folder: Path) -> Run:
    path = folder / "config.json"
    path.write_bytes(parser_inputs([_HF], _as_bytes)(draw))
    return lambda: read_hugging_face(path)


def _patch_pods(text: bytes) -> None:
    config = config_from_dict({"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 1}})
    render(KubernetesOptions(name="a", image="a:1", patch=read_patch(_text(text))), config)


_TOKENS = json.dumps(
    {
        "format": "paceline-tokens-1",
        "dtype": "uint16",
        "vocab_size": 257,
        "end_token": 256,
        "tokenizer": "bytes",
        "skipped": 0,
        "source": ["a.txt"],
        "shards": [{"file": "tokens-00000.bin", "tokens": 9, "documents": 1, "sha256": "00"}],
    }
).encode()
_PATCH = {
    "metadata": {"labels": {"team": "a"}},
    "spec": {
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "volumes": [{"name": "data", "emptyDir": {}}, {"name": "shm", "$patch": "delete"}],
        "containers": [
            {
                "name": "paceline",
                "env": [{"name": "A", "value": "b"}],
                "volumeMounts": [{"name": "data", "mountPath": "/d"}],
            }
        ],
    },
}
_IMAGES = b'{"size": {"height": 8, "width": 8}, "image_mean": [0.5, 0.5, 0.4], "image_std": [0.5, 0.2, 0.5]}'

TARGETS: tuple[Target, ...] = (
    Target(name="manifests", case=manifest_case, weight=6),
    Target(name="resume", case=resume_case, weight=3),
    Target(name="values of ranks", case=values_case),
    Target(name="safetensors headers", case=header_case, weight=3),
    Target(name="Hugging Face folders", case=hugging_face_case, weight=3),
    Target(name="pickles", case=pickle_case, weight=2),
    Target(name="records", case=records_case, weight=3),
    Target(name="traces", case=trace_case),
    Target(name="configs", case=config_case, weight=3),
    Target(name="configs of models", case=model_case),
    parser("catalogs", lambda text: parse_catalog(_text(text), "a"), parser_inputs([_CATALOG], _as_bytes)),
    parser("predictions", lambda text: Expectation.of_text(_text(text)), _PREDICTIONS, ValueError),
    parser(
        "schedules",
        lambda text: parse_csv(_text(text)),
        parser_inputs([b"# microbatches=2\nF0.0,F0.1,B0.0\n,F1.0,B1.0\n"]),
    ),
    parser("control messages", from_text, parser_inputs([b'["set","key","dmFsdWU="]', b'["wait",["a","b"],30.0]'])),
    parser("values between ranks", from_bytes, parser_inputs([to_bytes({"step": 3, "loss": torch.ones(2)})])),
    parser("images of models", parse_image_settings, parser_inputs([_IMAGES]), ValueError),
    parser(
        "classes of models", parse_class_names, parser_inputs([b'{"id2label": {"0": "cat", "1": "dog"}}']), ValueError
    ),
    parser(
        "configs of adapters",
        lambda content: parse_peft(content, b'{"base_model.model.q.lora_A.weight": {}}'),
        parser_inputs([b'{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "bias": "none"}']),
        ValueError,
    ),
    parser("patches of pods", _patch_pods, parser_inputs([_as_bytes(_PATCH)], _as_bytes), ValueError),
    parser("notes of runs", parse_note, parser_inputs([b'{"tags": "a, b", "note": "best"}']), ValueError),
    parser("requests for ranks", parse_request, parser_inputs([_REQUEST], _as_bytes), ValueError),
    parser("manifests of tokens", parse_manifest, parser_inputs([_TOKENS]), ValueError),
    parser(
        "progress in the course",
        parse_progress,
        parser_inputs([b'{"passed": ["1.1"], "hints": {"1.2": 1}}']),
        ValueError,
    ),
    parser(
        "requests of learn play",
        lambda text: answer_for(PlayInputs.of(dict(parse_qsl(_text(text), keep_blank_values=True)))),
        parser_inputs([b"size=gpt-1.1b&gpus=16&strategy=zero1&tensor=2&network=", b"layers=4&width=256&pipeline=2"]),
    ),
)
