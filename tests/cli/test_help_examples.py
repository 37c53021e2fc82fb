"""Every example of a ``--help``: read by its command, and run, the costly ones with less to do.

``CHEAP`` verbs run by default, the others in the exhaustive run. ``LESS`` is what is appended to an example, and
``ELSEWHERE`` has those that need what a test has not, with the reason.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_runs import Call
from typer.main import get_command

from measures.verbs import app as authors_app
from paceline.cli.app import app
from paceline.config import load_config
from paceline.config.shipped import shipped_configs
from paceline.run.location import RunOptions
from paceline.run.train import train

REPOSITORY = Path(__file__).parents[2]
_EXAMPLE = re.compile(r"^(?:Examples?:)?\s*((?:(?:torchrun .*)?paceline|python bench) .*)$", re.MULTILINE)

CHEAP = ("cluster ls", 'cluster show "', "config", "learn", "schedule 1f1b")
LESS = {
    "bench checkpoint": ["--size", "gpt-nano", "--rounds", "2"],
    "bench comm": ["--sizes", "1024", "--rounds", "2"],
    "bench compression": ["--steps", "6"],
    "bench engines": ["--models", "mlp", "--rounds", "2"],
    "bench ledger": ["--blocks", "2"],
    "bench load": ["--mib", "4", "--rounds", "1"],
    "bench loop": ["--rounds", "2"],
    "bench memory": ["--options", "ddp fp32", "--size", "gpt-nano", "--context", "8", "--budget-gb", "0.001"],
    "bench pipeline": ["--rounds", "2", "--parts", "bubbles"],
    "bench restart": ["--rounds", "1"],
    "bench scaling": ["--steps", "6", "--ranks", "1,2", "--modes", "strong", "--predict-to", "2"],
    "bench tokens": ["--steps", "6"],
    "profile": ["--steps", "1"],
    "chaos": ["train.steps=60", "train.epochs=null"],
    "train digits train.epochs": ["train.epochs=0.1"],  # of two overrides the last one counts
    "train": ["train.steps=6"],
    "simulate": ["train.steps=6"],
    "sample": ["--tokens", "4"],
    "verify": ["--steps", "1"],
}
ELSEWHERE = {
    "torchrun": "starts several processes by another launcher: tests/run and tests/launch do",
    "--nnodes": "waits for other hosts",
    "paceline launch": "needs a scheduler or hosts: tests/launch has their stand-ins",
    "s3://": "needs a bucket",
    "--device cuda": "needs a GPU",
    "bench gpu": "needs a GPU",
    "bench memory --budget-gb 8": "needs a GPU",
    "bench memory --budget-gb 0 ": "fills the memory of this machine",
    "~/models": "needs a tokenizer that was downloaded",
    "data/corpus": "needs a tokenizer that was downloaded",
    "watch": "serves until it is stopped: tests/view does",
    "learn play": "serves until it is stopped: tests/learn does",
    "llama-folder": "needs a folder of transformers: tests/checkpoint has some",
    "measurements.csv": "needs a table of measured runs",
    "model.pt": "needs a pickle of the user's own: tests/checkpoint has some",
    "my_all_gather.py": "needs the answer of a reader: tests/learn has some",
    "mine.yaml": "measures a machine for minutes, or needs one that was: tests/calibrate has the parts",
    "bench prepare": "takes minutes, and has no smaller form",
    "bench losses": "needs a GPU",
    "bench muon": "takes minutes, and has no smaller form",
    "bench convergence": "takes minutes, and has no smaller form",
    "bench predict": "takes minutes, and has no smaller form",
}
REFUSES = {  # what they show is a refusal, and an answer that is wrong
    "paceline config check gpt_pydoc parallel.ranks=3": 2,
    "paceline learn check 1.2 24": 1,
}


BEFORE = {  # what an example goes on from
    "train.epochs=30 --resume auto": ["train digits train.epochs=0.05 --quiet"],
    "schedule mine.csv": ["schedule 1f1b --stages 2 --microbatches 4 --csv mine.csv"],
    "import model.safetensors": ["checkpoint export runs/gpt model.safetensors"],
    "--resume start": [
        "train gpt_small train.steps=1 name=small --quiet",
        "checkpoint export runs/small model.safetensors",
        "checkpoint import model.safetensors start",
    ],
    "--resume mixture": [
        "train gpt_small train.steps=1 name=small --quiet",
        "checkpoint upcycle runs/small mixture --experts 8",
    ],
    "path: data/book": ["data prepare book.txt --tokenizer char --output data/book"],
    "inspect data/book": ["data prepare book.txt --tokenizer char --output data/book"],
    "digits-simulated": ["simulate digits --ranks 2 train.steps=3"],
}
AUTHORS = typer.Typer()
AUTHORS.add_typer(authors_app, name="bench")
VERBS = {"paceline": app, "python": AUTHORS}
COMMANDS: dict[str, Any] = {program: get_command(verbs) for program, verbs in VERBS.items()}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    yield path, command


def examples() -> list[str]:
    every = [command for program in COMMANDS.values() for _, command in commands(program)]
    found = [each.strip() for command in every for each in _EXAMPLE.findall(command.help or "")]
    return [re.split(r" > |, and ", each)[0] for each in dict.fromkeys(found)]


def program_of(example: str) -> str:
    return "python" if example.startswith("python bench ") else "paceline"


def words_of(example: str) -> list[str]:
    return shlex.split(example.partition(f"{program_of(example)} ")[2])


def with_less(words: list[str]) -> list[str]:
    """Returns the words of an example with those that make it shorter; an option that comes twice counts last."""
    verb = next((each for each in LESS if " ".join(words).startswith(each)), None)
    return [*words, *(LESS[verb] if verb else ())]


def marked(example: str) -> Any:
    verb = example.removeprefix(f"{program_of(example)} ")
    is_cheap = verb.startswith(CHEAP)
    return pytest.param(example, marks=() if is_cheap else (pytest.mark.exhaustive,), id=verb[:70])


EXAMPLES = examples()
RUN_HERE = [each for each in EXAMPLES if not any(word in each for word in ELSEWHERE)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that examples name, of a hundred steps, to be copied."""
    folder = tmp_path_factory.mktemp("made") / "runs"
    small = [f"monitor={{folder: {folder}, console: false, tensorboard: false}}", "parallel.threads=1"]
    small += ["comm.backend=virtual", "parallel.device=cpu", "parallel.ranks=2", "train.steps=100"]
    small += ["train.eval_every=null", "train.global_batch=8"]
    size = ["model={kind: gpt, layers: 2, heads: 2, width: 16, context: 8}", "data.eval_fraction=0.001"]
    train("digits", [*small, "model.hidden_dim=8"], RunOptions(is_quiet=True))
    train("gpt_pydoc", [*small, *size], RunOptions(is_quiet=True))
    for copy, source in {"digits-2": "digits", "a": "digits", "b": "digits", "gpt": "gpt-pydoc"}.items():
        shutil.copytree(folder / source, folder / copy)
    return folder


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has files of the user's own, and the configs that the authors' benchmarks name."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    (tmp_path / "book.txt").write_text("the line of riders takes turns in the wind\n" * 50)
    (tmp_path / "their.yaml").write_text("model: transformer\nbatch_size: 8\nnum_gpus: 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return tmp_path


def test_every_example_of_a_help_is_read_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) > 100
    shipped = shipped_configs()
    for example in EXAMPLES:
        for words in (words_of(example), with_less(words_of(example))):
            read(COMMANDS[program_of(example)], words)
        words = words_of(example)
        configs = [word for word in words if shipped.get(word, Path()).suffix == ".yaml"]
        if configs and example not in REFUSES and "data/book" not in example:
            load_config(configs[0], [word for word in words if re.match(r"[a-z_]+(\.\w+)+=", word)])


def read(command: Any, words: list[str]) -> None:
    """Lets a command take its words; raises for an option or a value that it does not know."""
    words = list(words)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    command.make_context("paceline", words)


@pytest.mark.timeout(900)  # some start a dozen runs
@pytest.mark.parametrize("example", [marked(each) for each in RUN_HERE])
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_an_example_of_a_help_runs(example: str, workshop: Path, call: Call, request: pytest.FixtureRequest) -> None:
    if "runs/" in example or "model.safetensors" in example:
        shutil.copytree(request.getfixturevalue("runs"), workshop / "runs")
    for part, before in BEFORE.items():
        for command in before if part in example else ():
            done = call(*shlex.split(command))
            assert done.code == 0, f"{command}\n{done.err}"
    called = call(*with_less(words_of(example)), verbs=VERBS[program_of(example)])
    assert called.code == REFUSES.get(example, 0), f"{example}\n{called.out}\n{called.err}"


def test_no_reason_to_leave_an_example_out_is_superfluous() -> None:
    assert [word for word in ELSEWHERE if not any(word in each for each in EXAMPLES)] == []
