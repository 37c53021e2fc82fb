"""Writes the README's tables of one GPU from records of ``paceline bench gpu``.

    python scripts/speed_table.py RECORD [RECORD ...]            # print them
    python scripts/speed_table.py RECORD [RECORD ...] --write    # put them into README.md, between its marks
    python scripts/speed_table.py RECORD [RECORD ...] --check    # exit 1 where README.md says something else

Every figure is the record's. A record in which an arm did not run says so in its row.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- one GPU: begin (scripts/speed_table.py) -->", "<!-- one GPU: end -->"
NAMES = {
    "gpt-124m": "GPT-124M, 32 x 1024 tokens",
    "gpt-1.1b": "GPT-1.1B, 8 x 2048 tokens",
    "gpt-10m": "nanoGPT's 10M on characters, 64 x 256 tokens",
    "resnet50": "ResNet-50, 256 images of 224 pixels",
}
GIB = 2**30
INTRODUCTION = (
    "`paceline train` beside the best loops that a user would write. These compile the whole model together with its "
    "loss, clip, and update with torch's fused optimizer. The ratio is that of step times to the fastest plain loop of "
    "the same round: below 1 is faster. All arms train the same model on the same batches, each in a process of its "
    "own, in turns. MFU is the share of the data sheet's bf16 peak that the model's own FLOPs come to, with causal "
    "attention as it is computed: half of the square."
)


def table(*records: dict[str, Any]) -> str:
    """Returns the text between the marks: what was measured, a table for each model, and what it rests on.

    Of a model that several records have, the last one counts. They are of one machine: else a ValueError is raised.
    """
    machines = {f"One {each['hardware'].get('gpu', 'a CPU')}, torch {each['versions']['torch']}: " for each in records}
    if len(machines) != 1:
        raise ValueError(f"the records are of several machines: {sorted(machines)}")
    last = {row["model"]: each for each in records for row in each["rows"]}
    rows = [row for each in records for row in each["rows"] if last[row["model"]] is each]
    lines = textwrap.wrap(machines.pop() + INTRODUCTION, 118)
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += ["", *_model_table(model, [row for row in rows if row["model"] == model])]
    missing = {row["arm"]: row["error"] for row in rows if "error" in row}
    if missing:
        lines += ["", "Not run: " + "; ".join(f"{arm} ({reason})" for arm, reason in missing.items()) + "."]
    return "\n".join(lines)


def _model_table(model: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    unit = "tokens" if any("tokens_per_s" in row for row in rows) else "images"
    yield f"| {NAMES.get(model, model)} | step | {unit}/s | ratio | MFU | peak memory | first step, again | loss |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        if "error" not in row:
            yield "| " + " | ".join(_cells(row, unit)) + " |"


def _cells(row: dict[str, Any], unit: str) -> Iterator[str]:
    is_ours = row["arm"].startswith("paceline")
    yield f"**{row['arm']}**" if is_ours else row["arm"]
    yield f"{row['step_ms']:.1f} ms"
    yield f"{row[f'{unit}_per_s']:,.0f}"
    yield "" if row["ratio"] is None else f"{row['ratio']:.3f}"
    yield "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
    yield "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:.1f} GiB"
    again = row["second_start_s"]
    yield f"{row['first_step_s']:.0f} s" + ("" if again is None else f", {again:.0f} s")
    yield f"{row['loss']:.4f} after {row['loss_step']}"


def with_table(page: str, text: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Returns a page, by default the README, with the text between its marks. Raises ValueError where it has none."""
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the page has no lines {marks[0]} and {marks[1]}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = table(*(json.loads(path.read_text(encoding="utf-8")) for path in arguments.records))
    readme = README.read_text(encoding="utf-8")
    if arguments.check:
        return int(with_table(readme, text) != readme)
    if arguments.write:
        README.write_text(with_table(readme, text), encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
