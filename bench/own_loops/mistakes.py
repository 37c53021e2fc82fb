"""Twelve mistakes, as edits of the scripts of this folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent
# The arms, by script and by an edit of it.
ARMS: dict[str, tuple[str, tuple[str, str]]] = {
    "paceline ddp": ("with_paceline", ('"fsdp"', '"ddp"')),
    "paceline fsdp": ("with_paceline", ("", "")),
    "accelerate": ("with_accelerate", ("", "")),
    "lightning": ("with_lightning", ("", "")),
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
_COUNT = 'print(f"samples {{len(y)}}", flush=True)\n'
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
        # These fill the batch up with samples that they have had: we count.
        accelerate=[_before(f"            {_STEP}", _COUNT)],
        lightning=[_before(_L_STEP, _COUNT)],
    ),
    "left over": Mistake(
        words="five batches an update, and four are left over",
        paceline=[
            (
                "    (loss * model.loss_scale(len(y))).backward()\n"
                "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()\n"
                "    optimizer.zero_grad()\n",
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


def script_of(arm: str, edits: Edits = ()) -> str:
    """Returns the text of an arm's script with edits; each must fit."""
    name, own = ARMS.get(arm, (arm, ("", "")))
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    for old, new in (own, *edits, (END, TELL)):
        if old not in text:
            raise ValueError(f"{name}.py has no {old!r}")
        text = text.replace(old, new) if old else text
    return text
