"""A script of one process beside its conversions to Paceline, Accelerate and Lightning, and mistakes in each of them.

    python bench/peers_loops.py --output bench/results/own-loops-cpu.json     # run all of it; 20 to 30 minutes
    python bench/peers_loops.py --arms "paceline ddp" --mistakes leaves       # print one cell, write nothing
    python bench/peers_loops.py --write                                       # docs/convert.md from scripts and record

The scripts are in ``own_loops``. Every run has processes and a folder of its own, on Gloo ranks of this CPU. A mistake is an edit of the script; what came of it is read from its exit code, its output and its curve:

    right      the validation losses are those of the same script without the mistake
    told       the same, or others, with a warning that names the mistake
    named      it stops, and the error says what is wrong, the rule, and what to do
    error      it stops with another error
    silent     it trains to the end on other numbers, without a word
    hang       nothing happens until the time limit
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import importlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.timing import BenchRecord

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "bench" / "own_loops"
PAGE, RECORD = ROOT / "docs" / "convert.md", ROOT / "bench" / "results" / "own-loops-cpu.json"
LIMIT_S = 60.0  # a right run takes 2 to 10 s beside other work
TELLS_S = 20.0  # after the first rank has failed
EPOCHS, CLOSE = 3, 1e-5
# The arms, by script and by an edit of it.
ARMS: dict[str, tuple[str, tuple[str, str]]] = {
    "paceline ddp": ("with_paceline", ('"fsdp"', '"ddp"')),
    "paceline fsdp": ("with_paceline", ("", "")),
    "accelerate": ("with_accelerate", ("", "")),
    "lightning": ("with_lightning", ("", "")),
}
# What is there without a further line, by a look at the folder and the terminal of a right run.
SHOWN = {
    "paceline": "the print; live page, report, comparison and records of every rank; trackers by a word",
    "accelerate": "the print; trackers by further lines",
    "lightning": "a progress bar, losses in a CSV file; trackers by further lines",
}
END = "main(int(sys.argv[1]))"
TELL = """import json, os
    curve = main(int(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        with open("curve.json", "w") as file:
            json.dump(curve, file)"""
ON_RANK_1 = '__import__("os").environ["RANK"] == "1"'
ON_RANK_0 = '__import__("os").environ["RANK"] == "0"'
Edits = Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake: its words, the edits that make it in each script, and the edits of a script that does it right."""

    words: str
    paceline: Edits
    accelerate: Edits
    lightning: Edits
    right: Mapping[str, Edits] = field(default_factory=dict)

    def edits(self, arm: str) -> Edits:
        found: Edits = getattr(self, arm.split()[0])
        return found


_STEP = "train_step(model, optimizer, x, y)"
_PREPARED = (
    "model, optimizer, train_loader, valid_loader = accelerator.prepare(model, optimizer, train_loader, valid_loader)"
)
_L_STEP = '        loss = F.cross_entropy(self.model(x), y)\n        self.log("loss", loss)\n'
_SEEDED = (("Generator().manual_seed(1)", "Generator().manual_seed(int(__import__('os').environ['RANK']))"),)
_UNUSED = (
    ("nn.Linear(512, 10))", "nn.Linear(512, 10), Unused())"),
    (
        "def make_model():",
        "class Unused(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(3, 3)\n\n    def forward(self, x):\n        return x\n\n\ndef make_model():",
    ),
)
_OTHERS = (("AdamW(model.parameters()", "AdamW(make_model().parameters()"),)
_NAN = f"if {ON_RANK_1} and len(seen) == 5:\n{{0}}    x = x * float('nan')\n{{0}}seen.append(0)\n"
_SEEN = ("def make_data", "seen = []\n\n\ndef make_data")
_RATE = "for group in {0}.param_groups:\n{1}    group['lr'] = 3e-3 if float({2}) < 1.0 else 1e-3\n"


def _before(line: str, added: str) -> tuple[str, str]:
    """Puts lines before a line, at its indentation."""
    indent = re.match(" *", line)
    assert indent is not None
    return (line, indent[0] + added.format(indent[0]) + line)


MISTAKES: dict[str, Mistake] = {
    "unshared": Mistake(
        words="the loader is not shared out",
        paceline=[
            ("(paceline.shard(each, comm) for each in (train_loader, valid_loader))", "(train_loader, valid_loader)")
        ],
        accelerate=[(_PREPARED, "model, optimizer = accelerator.prepare(model, optimizer)")],
        lightning=[("max_epochs=epochs,", "max_epochs=epochs, use_distributed_sampler=False,"), ("60 // ranks", "60")],
    ),
    "order": Mistake(
        words="each rank shuffles by a seed of its own", paceline=_SEEDED, accelerate=_SEEDED, lightning=_SEEDED
    ),
    "leaves": Mistake(
        words="one rank leaves its epoch early",
        paceline=[
            _before("            with run.step", f"if {ON_RANK_1} and train_loader.position == 600:\n{{0}}    break\n")
        ],
        accelerate=[
            _SEEN,
            _before(
                f"            {_STEP}", f"seen.append(0)\n{{0}}if {ON_RANK_1} and len(seen) == 11:\n{{0}}    break\n"
            ),
        ],
        lightning=[
            _before(
                "    def training_step",
                f"def on_train_batch_start(self, batch, number):\n{{0}}    return -1 if {ON_RANK_1} and number == 10 "
                "else None\n\n",
            )
        ],
    ),
    "uneven": Mistake(
        words="mean losses, where the last batch gives ranks 9 and 8 samples",
        paceline=[
            ('    loss = F.cross_entropy(model(x), y, reduction="sum")\n', "    loss = F.cross_entropy(model(x), y)\n"),
            ("(loss * model.loss_scale(len(y))).backward()", "loss.backward()"),
            ("loss_sum=", "loss="),
        ],
        accelerate=[],  # it fills the batch up with samples that it has already had
        lightning=[],
    ),
    "left over": Mistake(
        words="five batches an update, and four are left over",
        paceline=[
            (
                "    (loss * model.loss_scale(len(y))).backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
                "    optimizer.step()\n    optimizer.zero_grad()\n",
                "    with model.accumulate(5, loader) as turn:\n        (loss * turn.scale).backward()\n"
                "        if turn.is_last:\n            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
                "            optimizer.step()\n            optimizer.zero_grad()\n",
            ),
            ("def train_step(model, optimizer, x, y):", "def train_step(model, optimizer, x, y, loader):"),
            (f"run.log(loss_sum={_STEP})", "run.log(loss_sum=train_step(model, optimizer, x, y, train_loader))"),
        ],
        accelerate=[
            ("Accelerator(cpu=True,", "Accelerator(cpu=True, gradient_accumulation_steps=5,"),
            (f"            {_STEP}", f"            with accelerator.accumulate(model):\n                {_STEP}"),
            (
                "    accelerator.clip_grad_norm_",
                "    if accelerator.sync_gradients:\n        accelerator.clip_grad_norm_",
            ),
        ],
        lightning=[("max_epochs=epochs,", "max_epochs=epochs, accumulate_grad_batches=5,")],
        right={name: [("batch_size=60", "batch_size=300")] for name in ("paceline", "accelerate", "lightning")},
    ),
    "own loss": Mistake(
        words="the validation loss is that of the rank's own share",
        paceline=[("paceline.mean(total, count, model.comm)", "float(total / count)")],
        accelerate=[
            (
                'accelerator.gather_for_metrics(F.cross_entropy(model(x), y, reduction="none"))',
                'F.cross_entropy(model(x), y, reduction="none")',
            )
        ],
        lightning=[(", sync_dist=True", "")],
    ),
    "saves alone": Mistake(
        words="rank 0 saves alone",
        paceline=[("        run.save(", f"        if {ON_RANK_0}:\n            run.save(")],
        accelerate=[
            ("        accelerator.save_state(", f"        if {ON_RANK_0}:\n            accelerator.save_state(")
        ],
        lightning=[
            _before(
                "        if not self.trainer.sanity_checking:",
                f"if {ON_RANK_0}:\n{{0}}    self.trainer.save_checkpoint('mine.ckpt')\n",
            )
        ],
    ),
    "validates alone": Mistake(
        words="rank 0 validates alone",
        paceline=[
            ("        valid_loss = validate(", f"        if {ON_RANK_0}:\n            valid_loss = validate("),
            ("    for epoch in range(", "    valid_loss = 9.0\n    for epoch in range("),
        ],
        accelerate=[
            ("        valid_loss = validate(", f"        if {ON_RANK_0}:\n            valid_loss = validate("),
            ("    for epoch in range(", "    valid_loss = 9.0\n    for epoch in range("),
        ],
        lightning=[
            _before(
                "        if not self.trainer.sanity_checking:",
                f"if {ON_RANK_0}:\n{{0}}    self.trainer.strategy.reduce(torch.ones(()))\n",
            )
        ],
    ),
    "unused": Mistake(
        words="a layer that the loss does not use", paceline=_UNUSED, accelerate=_UNUSED, lightning=_UNUSED
    ),
    "other optimizer": Mistake(
        words="the optimizer has the parameters of another model",
        paceline=_OTHERS,
        accelerate=_OTHERS,
        lightning=[("AdamW(self.parameters()", "AdamW(make_model().parameters()")],
    ),
    "own rate": Mistake(
        words="the learning rate follows the rank's own loss",
        paceline=[
            _before(
                "    optimizer.step()",
                _RATE.replace("{0}", "optimizer").replace("{1}", "{0}").replace("{2}", "loss.detach() / len(y)"),
            )
        ],
        accelerate=[
            _before(
                "    optimizer.step()",
                _RATE.replace("{0}", "optimizer").replace("{1}", "{0}").replace("{2}", "loss.detach()"),
            )
        ],
        lightning=[
            _before(
                "        return loss\n",
                _RATE.replace("{0}", "self.optimizers()").replace("{1}", "{0}").replace("{2}", "loss.detach()"),
            )
        ],
    ),
    "nan": Mistake(
        words="a batch of one rank has a NaN",
        paceline=[_SEEN, _before("            with run.step", _NAN)],
        accelerate=[_SEEN, _before(f"            {_STEP}", _NAN)],
        lightning=[_SEEN, _before('        loss = F.cross_entropy(self.model(x), y)\n        self.log("loss"', _NAN)],
    ),
}


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a run of a script left: its exit code (None: it hung), its curve, and what it wrote."""

    code: int | None
    curve: list[float] | None
    text: str


def script_of(arm: str, edits: Edits = ()) -> str:
    """Returns the text of an arm's script with edits; each must fit."""
    name, own = ARMS.get(arm, (arm, ("", "")))
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    for old, new in (own, *edits, (END, TELL)):
        if old not in text:
            raise ValueError(f"{name}.py has no {old!r}")
        text = text.replace(old, new) if old else text
    return text


def run_script(text: str, ranks: int, folder: Path, epochs: int = EPOCHS) -> Done:
    """Runs a script on ranks of its own in a folder; with 0 ranks, as one process that no launcher started.

    Ranks are forked from this process, which has loaded the libraries: that takes longer than all else. As launchers do,
    it ends the others when one has failed, after they had time to tell what they know.
    """
    (folder / "curve.json").unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_fork(text, rank, ranks, port, folder, epochs) for rank in range(max(ranks, 1))]
    codes: dict[int, int] = {}
    until = time.monotonic() + LIMIT_S
    while len(codes) < len(children) and time.monotonic() < until:
        for child in children:
            if child not in codes and (ended := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(ended[1])
                if codes[child]:
                    until = min(until, time.monotonic() + TELLS_S)
        time.sleep(0.05)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    code = next((each for each in codes.values() if each), 0 if len(codes) == len(children) else None)
    found = folder / "curve.json"
    curve = json.loads(found.read_text()) if found.exists() else None
    return Done(code=code, curve=curve, text=(folder / "output.txt").read_text(encoding="utf-8", errors="replace"))


def _fork(text: str, rank: int, ranks: int, port: int, folder: Path, epochs: int) -> int:
    """Starts one rank, as Python would run the script: with its hooks for errors and for the end."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        if ranks:
            size = str(ranks)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "peers"}
        sys.argv = ["script.py", str(epochs)]
        Path("script.py").write_text(text, encoding="utf-8")
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(text, str(folder / "script.py"), "exec"), vars(module))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def difference(curve: Sequence[float] | None, right: Sequence[float]) -> float:
    """Returns the largest difference of two curves; infinite where one has a NaN, or ends early."""
    if curve is None or len(curve) != len(right) or not all(map(math.isfinite, curve)):
        return math.inf
    return max(abs(a - b) for a, b in zip(curve, right, strict=True))


# Mistakes.

_ERROR = re.compile(r"^(?:\[rank\d\]: ?)?((?:paceline\.errors\.)?\w*(?:Error|Exception|Exited)\b.*)$", re.MULTILINE)
_WARNING = re.compile(r"^.*?(?:Warning: )(.*)$", re.MULTILINE)


def outcome(done: Done, right: Done) -> tuple[str, str]:
    """Says what came of a mistake, and what was seen of it."""
    assert right.curve is not None
    if done.code is None:
        return "hang", f"after {LIMIT_S:g} s"
    if done.code:
        return _failure(done.text)
    off = difference(done.curve, right.curve)
    seen = "a curve with NaN" if math.isinf(off) else f"the curve differs by {off:.1e}"
    if math.isinf(off) and done.curve is not None and len(done.curve) != len(right.curve):
        seen = f"it ended after {len(done.curve)} of {len(right.curve)} epochs"
    known = set(_WARNING.findall(right.text))
    told = [each for each in _WARNING.findall(done.text) if each not in known and not _is_other(each)]
    if told:
        return "told", told[0][:200]
    return ("right" if off < CLOSE else "silent"), seen


def _failure(text: str) -> tuple[str, str]:
    errors = [each for each in _ERROR.findall(text) if "ChildFailedError" not in each]
    ours = [each for each in errors if each.startswith("paceline.errors.")]
    if ours:
        return "named", ours[0].removeprefix("paceline.errors.")[:200]
    return "error", (errors[0] if errors else "a process died")[:200]


def _is_other(warning: str) -> bool:
    """Whether a warning is of the launcher or the end of processes, and not of the mistake."""
    return "destroy_process_group" in warning or "leaked" in warning


def try_mistakes(arms: Sequence[str], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Makes each mistake in the script of each arm, on two ranks."""
    rights: dict[tuple[str, str], Done] = {}
    for name in names:
        mistake = MISTAKES[name]
        for arm in arms:
            right = mistake.right.get(arm.split()[0], ())
            key = (arm, name if right else "")
            if key not in rights:
                rights[key] = _in_a_folder(script_of(arm, right))
            if name == "uneven" and not mistake.edits(arm):
                found = "silent" if difference(rights[key].curve, _plain_curve()) > CLOSE else "right"
                seen = (
                    f"the curve differs by {difference(rights[key].curve, _plain_curve()):.1e} from the plain script's"
                )
            else:
                found, seen = outcome(_in_a_folder(script_of(arm, mistake.edits(arm))), rights[key])
            print(f"{arm}: {mistake.words}: {found} ({seen})", flush=True)
            yield {"kind": "mistake", "name": name, "words": mistake.words, "arm": arm, "outcome": found, "seen": seen}


_PLAIN: list[float] = []


def _plain_curve() -> list[float]:
    if not _PLAIN:
        _PLAIN.extend(_in_a_folder(script_of("plain"), ranks=0).curve or [])
    return _PLAIN


def _in_a_folder(text: str, ranks: int = 2) -> Done:
    with _folder() as folder:
        return run_script(text, ranks, folder)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Makes a folder for a while: not a TemporaryDirectory, which forked processes would remove at their end."""
    found = Path(tempfile.mkdtemp(prefix="own-loops-"))
    try:
        yield found
    finally:
        shutil.rmtree(found)


# Curves and resume.


def changed_lines(name: str) -> dict[str, int]:
    """Counts the lines that differ from the plain script: one that was replaced by another is one change."""
    before, after = ((SCRIPTS / f"{each}.py").read_text(encoding="utf-8").splitlines() for each in ("plain", name))
    parts = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    sizes = [(a2 - a1, b2 - b1) for word, a1, a2, b1, b2 in parts if word != "equal"]
    return {
        "changed": sum(max(each) for each in sizes),
        "removed": sum(each[0] for each in sizes),
        "added": sum(each[1] for each in sizes),
    }


def compare_curves(arms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Runs the script of each arm on 1, 2 and 3 ranks, and on 2 ranks for two epochs, then on 3 for the rest."""
    plain = _plain_curve()
    for arm in arms:
        whole: list[float] | None = None
        off: dict[str, float | str] = {}
        for ranks in (1, 2, 3):
            done = _in_a_folder(script_of(arm), ranks)
            off[str(ranks)] = difference(done.curve, plain)
            whole = done.curve
        resumed: float | str
        with _folder() as folder:
            run_script(script_of(arm), 2, folder, epochs=2)
            done = run_script(script_of(arm), 3, folder)
            resumed = difference(done.curve, plain)
            resumed_own = difference(done.curve, whole or [])
        row = {"kind": "script", "arm": arm, **changed_lines(ARMS[arm][0]), "off": off, "resumed": resumed}
        print(row, flush=True)
        yield {**row, "resumed_own": resumed_own, "resume_failed": "" if done.code == 0 else _failure(done.text)[1]}


# The page.


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--mistakes", nargs="+", default=list(MISTAKES), choices=[*MISTAKES, "none"])
    parser.add_argument("--output", type=Path, help="write the record, with the curves")
    parser.add_argument("--mistakes-alone", action="store_true", help="run no curves: the record keeps those it has")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    for name in ("torch", "sklearn.datasets", "paceline", "accelerate", "lightning.pytorch"):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    warnings.simplefilter("always")
    rows = list(try_mistakes(options.arms, [each for each in options.mistakes if each != "none"]))
    if options.output is None:
        return
    if not options.mistakes_alone:
        rows += compare_curves(options.arms)
    if options.output.exists():  # of arms that were not asked for, or of mistakes
        made = {(row["arm"], row.get("name")) for row in rows}
        before = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
        rows = [*(row for row in before if (row["arm"], row.get("name")) not in made), *rows]
    order = [(arm, name) for name in (None, *MISTAKES) for arm in ARMS]
    rows.sort(key=lambda row: order.index((row["arm"], row.get("name"))))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "lightning")}
    BenchRecord(
        name="own-loops",
        command="python bench/peers_loops.py --output bench/results/own-loops-cpu.json",
        rows=rows,
        config={"epochs": EPOCHS, "limit_s": LIMIT_S, "close": CLOSE, "versions": versions},
    ).write(options.output)


if __name__ == "__main__":
    main()
