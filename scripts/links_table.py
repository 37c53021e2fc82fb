"""Writes docs/dry-run.md's table of emulated links, and draws the time line, from records of ``python bench emulated``.

    python scripts/links_table.py RECORD [RECORD ...]            # print the table
    python scripts/links_table.py RECORD [RECORD ...] --write    # put it in, and draw docs/images/links-step.svg
    python scripts/links_table.py RECORD [RECORD ...] --case 7b/64-100g --write

Every figure is the record's. Of a case that several records have, the last one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pictures_svg import MARGIN, WIDTH, Picture
from speed_table import GIB, with_table

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "dry-run.md", ROOT / "docs" / "images" / "links-step.svg"
MARKS = "<!-- emulated links: begin (scripts/links_table.py) -->", "<!-- emulated links: end -->"
MODELS = {"124m": "GPT-124M", "1.1b": "GPT-1.1B", "7b": "3 blocks of a 7B", "70b": "3 blocks of a 70B"}
LINKS = {"8": "8", "64": "64", "64-100g": "64 at 100 Gbit/s"}
_HEAD = (
    "| model | GPUs | best of ours | best of torch | ratio | replicated | sharded | exposed | hidden | memory "
    "| dry run, ddp | fsdp |"
)
_LEFT = MARGIN + 86
_SPACE = WIDTH - MARGIN - _LEFT

Row = Mapping[str, Any]
Cases = Mapping[str, Sequence[Row]]


def cases_of(*records: Mapping[str, Any]) -> Cases:
    """Returns the rows of each case. Raises ValueError for records of several machines."""
    machines = {(each["hardware"].get("gpu", "a CPU"), each["versions"]["torch"]) for each in records}
    if len(machines) != 1:
        raise ValueError(f"the records are of several machines: {sorted(machines)}")
    found: dict[str, list[Row]] = {}
    for record in records:
        for case in dict.fromkeys(row["case"] for row in record["rows"]):
            found[case] = [row for row in record["rows"] if row["case"] == case]
    order = [f"{model}/{links}" for model in MODELS for links in LINKS]
    return {case: found[case] for case in order if case in found}


def table(*records: Mapping[str, Any]) -> str:
    """Returns the text between the marks: what was measured, and a row for each case."""
    cases = cases_of(*records)
    gpu, version = records[0]["hardware"].get("gpu", "a CPU"), records[0]["versions"]["torch"]
    introduction = (
        f"One {gpu}, torch {version}, emulated links. Ratios are of our fastest arm to torch's fastest: of all, "
        "of those that replicate the model, of those that shard it. Exposed: the step less that on links that take no "
        "time, ours and torch's. Hidden: of what ours could hide. Dry run: by how much the run of the trainer is "
        "longer than its dry run."
    )
    lines = [*textwrap.wrap(introduction, 118), "", _HEAD, "|" + "---|" * (_HEAD.count("|") - 1)]
    missing = []
    for case, rows in cases.items():
        lines.append("| " + " | ".join(_cells(case, rows)) + " |")
        missing += [f"{case} {row.get('arm', '')} ({row['error']})" for row in rows if "error" in row]
    if missing:
        lines += ["", *textwrap.wrap("Not run: " + "; ".join(missing) + ".", 118)]
    return "\n".join(lines)


def _cells(case: str, rows: Sequence[Row]) -> Iterator[str]:
    model, _, links = case.partition("/")
    arms = {row["arm"]: row for row in rows if row.get("arm", "").startswith(("best", "paceline predict"))}
    yield MODELS[model]
    yield LINKS[links]
    best = arms.get("best, all")
    ours, theirs = (None, None) if best is None else best_arms(rows)
    for row in (ours, theirs):
        yield "" if row is None else f"{_short(row)} {row['median_ms']:.1f} ms"
    for kind in ("all", "replicated", "sharded"):
        found = arms.get(f"best, {kind}")
        yield "" if found is None else f"{found['ratio']:.3f}"
    yield "" if ours is None or theirs is None else f"{ours['exposed_ms']:.1f}, {theirs['exposed_ms']:.1f} ms"
    yield "" if ours is None or ours["hidden_share"] is None else f"{100 * ours['hidden_share']:.0f} %"
    peaks = [] if ours is None or theirs is None else [ours["peak_bytes"], theirs["peak_bytes"]]
    yield ", ".join(f"{peak / GIB:.1f}" for peak in peaks if peak) + (" GiB" if all(peaks) and peaks else "")
    for strategy in ("ddp", "fsdp"):
        run = arms.get(f"paceline predict --on gpu, {strategy}", {})
        yield f"{100 * run['off']:+.1f} %" if "off" in run else ""


def best_arms(rows: Sequence[Row]) -> tuple[Row, Row]:
    """Returns the fastest arms of ours and of torch."""
    timed = [row for row in rows if "free_ms" in row]
    ours, theirs = ([row for row in timed if row["arm"].startswith(who)] for who in ("paceline", "torch"))
    return min(ours, key=lambda row: row["median_ms"]), min(theirs, key=lambda row: row["median_ms"])


def _short(row: Row) -> str:
    name = row["arm"].removeprefix("paceline ").removeprefix("torch ").replace(" bf16_master", "").replace(" bf16", "")
    return name if row["compiled"] else f"{name}, eager"


def draw(case: str, rows: Sequence[Row]) -> str:
    """Draws the step of the best arms: when kernels computed, and when collectives were on the wires."""
    model, _, links = case.partition("/")
    arms = best_arms(rows)
    longest = max(span[1] for row in arms for kind in row["timeline"].values() for span in kind)
    title = f"{MODELS[model]} on {LINKS[links]} GPUs: one step, emulated links"
    about = "One rank of many on a real GPU: ours above, torch's below, as its profiler saw them."
    picture = Picture(title, about, f"scripts/links_table.py, the record's time line of {case}")
    y = picture.legend(MARGIN, picture.top + 8, [("a", "kernels that compute"), ("c", "collectives")]) + 6
    for row in arms:
        picture.text(MARGIN, y + 12, row["arm"], "name ink")
        picture.text(WIDTH - MARGIN, y + 12, f"{row['median_ms']:.1f} ms", "small soft end")
        for place, (name, kind) in enumerate((("compute", "a"), ("wires", "c"))):
            top = y + 24 + 27 * place
            picture.text(MARGIN, top + 15, name, "small soft")
            picture.box(_LEFT, top, _SPACE, 22, "none")
            scale = _SPACE / longest
            spans = row["timeline"][name]
            picture.boxes([(_LEFT + a * scale, top, max((b - a) * scale, 0.3), 22) for a, b in spans], kind)
        y += 24 + 27 * 2 + 14
    picture.ruler(_LEFT, y, _SPACE, longest, "ms")
    return picture.svg(y + 34)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--case", default="70b/64", help="whose time line is drawn")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.records]
    text = table(*records)
    if not arguments.write:
        print(text)
        return 0
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), text, MARKS), encoding="utf-8")
    PICTURE.write_text(draw(arguments.case, cases_of(*records)[arguments.case]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
