"""Writes the table of scores in docs/prediction.md: bench/score_table.py [--write] [--without COLUMN ...].

``--without``: as a table would be scored that lacks some columns (``ep dispatcher graphs``: how experts are run).

Families are rows of a table whose names begin alike; the sentence beside each is for readers, and touches no score.
``tests/docs/test_figures.py`` compares the page with what this script prints.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from paceline_bench.scored.measured_table import Table, read_shipped
from paceline_bench.scored.validation import ErrorScores, FamilyScores, Validation, validate

DOCUMENT = Path(__file__).parents[1] / "docs/prediction.md"
OPTIONAL = ("ep", "dispatcher", "graphs")  # columns that say how experts are run, which tables may lack
BEGIN, END = "<!-- scores -->\n", "<!-- end of scores -->"
FAMILIES = {
    "mpt": "MPT, FSDP on A100 and H100",
    "titan": "torchtitan, Llama 3.1 on H100 (500 W), H200",
    "kempner": "Llama on H200",
    "internevo": "InternEvo 7B, A100",
    "ibm": "IBM, Llama 2 by FSDP on A100 and H100",
    "sc21": "Megatron 2021, A100",
    "meg20": "Megatron 2020, V100 and A100",
    "selrec": "selective recomputation, A100",
    "megh100": "Megatron 2024, H100",
    "bridge": "Megatron-Bridge, Llama and MoE, Hopper and Blackwell",
    "nemo": "NeMo 2024, H100",
    "dgxc": "DGX Cloud Benchmarking, Megatron on H100 and GB200",
    "dle": "DeepLearningExamples, V100 and A100",
    "vtrain": "vTrain, 256 A100",
    "vtrain1n": "vTrain, one node",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write it into {DOCUMENT.name}")
    parser.add_argument("--without", nargs="+", metavar="COLUMN", choices=OPTIONAL, default=[], help="left empty")
    arguments = parser.parse_args()
    if arguments.write and arguments.without:
        parser.error(f"--write --without: {DOCUMENT.name} has the scores of the whole table")
    text = scores(without(read_shipped(), arguments.without))
    print(text)
    if arguments.write:
        document = DOCUMENT.read_text()
        before, _, rest = document.partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(before + BEGIN + text + END + after)


def without(table: Table, columns: Iterable[str]) -> Table:
    """Returns the table as it would be if it lacked some columns."""
    empty = dict.fromkeys(columns, "")
    return replace(table, rows=tuple(replace(row, text={**row.text, **empty}) for row in table.rows))


def scores(table: Table) -> str:
    dev, calib, whole = (validate(table, split) for split in ("dev", "calib", None))
    bare = validate(without(table, OPTIONAL), "dev")
    about = (
        f"`paceline validate` scores the {len(dev.rows)} `dev` rows, `paceline validate --split calib` the "
        f"{len(calib.rows)} `calib` rows. `bench/score_table.py` writes this part of the page from the same rows."
    )
    columns = (
        *("family", "dev rows", "held out", "bias", "in band", "beside other rows", "one rate per device"),
        "given the smallest run",
        *("calib rows", "calib error", "memory, all rows"),
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [_line(each, _family(dev, each.family), _family(calib, each.family)) for each in whole.families]
    lines.append(_last_line(dev, calib, whole))
    return (
        "\n\n".join([_wrapped(about), "\n".join(lines), *map(_wrapped, (*_paragraphs(dev), _bare(dev, bare)))]) + "\n"
    )


def _last_line(dev: Validation, calib: Validation, whole: Validation) -> str:
    cells = (
        *("**mean over families**", _rows(dev.time), f"**{_percent(dev.held_out_mean_over_families)}**", ""),
        *(_percent(dev.held_out_coverage), _percent(dev.mean_over_families), "", ""),
        *(_rows(calib.time), _percent(calib.mean_over_families), f"{_mean(whole.memory)} of {_rows(whole.memory)}"),
    )
    return f"| {' | '.join(cells)} |"


def _paragraphs(dev: Validation) -> list[str]:
    ranking, scaling = dev.ranking, dev.scaling
    if ranking is None or scaling is None or dev.time is None:
        return []
    beaten = [each for each in dev.families if each.time and each.baseline and each.time.mean > each.baseline]
    told = ", ".join(f"{FAMILIES.get(each.family, each.family)} ({_rows(each.time)} rows)" for each in beaten)
    return [
        "An error is the mean of |predicted / measured - 1| over rows, in each row's own metric. *Held out*: by "
        "constants that were fitted without any row of the family; bias is the mean of predicted / measured - 1, "
        "and *in band* the share of rows whose time is in the band of that prediction. *Beside other rows*: by the "
        "constants that ship, which calib rows of the same family may have taken part in. *One rate per device* "
        "is the error of a single FLOP/s figure for each device and precision. That figure is fitted on the very rows "
        f"that it is scored on. Even so, it is better than the prediction on {told or 'no family'}. "
        "*Given the smallest run* is the error of a group's other runs when its smallest run's throughput is known.",
        f"More figures of the `dev` rows, by the constants that ship: nine of ten rows are within "
        f"{_percent(dev.time.p90)}, and {_percent(dev.coverage)} in their band. Inside the calibrated "
        f"domain the error is {_both(dev.inside)}, outside of it {_both(dev.outside)}. In {ranking.groups} groups of "
        f"alternatives the rank correlation (Spearman) is {ranking.spearman:.2f}. The alternative that is predicted "
        f"fastest takes {_percent(ranking.mean_regret)} longer than the fastest on average, "
        f"{_percent(ranking.worst_regret)} at worst; in {_percent(ranking.top_three)} of the groups the fastest is "
        f"among the first three. Scaling efficiency is within {scaling.points:.1f} points on {scaling.rows} rows. "
        f"Memory is off by {_mean(dev.memory)} over {_rows(dev.memory)} rows. {_fits(dev)}",
    ]


def _bare(dev: Validation, bare: Validation) -> str:
    pairs = [(each, _family(dev, each.family)) for each in bare.families]
    moved = [
        f"{FAMILIES.get(each.family, each.family)} is off by {_mean(each.held_out)}, with "
        f"{_percent(each.held_out_coverage)} of its rows in their band"
        for each, other in pairs
        if other is None or each.held_out != other.held_out
    ]
    held, told = _percent(bare.held_out_mean_over_families), f"without the columns {', '.join(OPTIONAL)}"
    return f"As a table is scored {told} (`--without {' '.join(OPTIONAL)}`): {held} with each family held out. " + (
        f"{'; '.join(moved)}." if moved else "No family moves."
    )


def _fits(dev: Validation) -> str:
    ran = dev.time.rows if dev.time else 0
    wrong = "No run" if dev.false_misfits == 0 else f"{dev.false_misfits} runs"
    told = f"{wrong} that fitted (of {ran}) was predicted to run out of memory."
    if dev.ran_out == 0:
        return f"{told} No row ran out of memory, so the opposite mistake has no score."
    return f"{told} {dev.false_fits} of {dev.ran_out} runs that ran out of memory were predicted to fit."


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _both(errors: ErrorScores | None) -> str:
    return "none" if errors is None else f"{_mean(errors)} (p90 {_percent(errors.p90)}) on {errors.rows} rows"


def _rows(errors: ErrorScores | None) -> str:
    return str(errors.rows if errors else 0)


def _line(whole: FamilyScores, dev: FamilyScores | None, calib: FamilyScores | None) -> str:
    held, time, fitted = dev.held_out if dev else None, dev.time if dev else None, calib.time if calib else None
    given = dev.scaling.given_first if dev and dev.scaling else None
    memory = f"{_percent(whole.memory.mean)} of {whole.memory.rows}" if whole.memory else "-"
    cells = (
        FAMILIES.get(whole.family, whole.family),
        _rows(time),
        _mean(held),
        _percent(held.bias if held else None),
        _percent(dev.held_out_coverage if dev else None),
        _mean(time),
        _percent(dev.baseline if dev else None),
        _mean(given),
        _rows(fitted),
        _mean(fitted),
        memory,
    )
    return f"| {' | '.join(cells)} |"


def _family(found: Validation, name: str) -> FamilyScores | None:
    return next((each for each in found.families if each.family == name), None)


def _mean(errors: ErrorScores | None) -> str:
    return _percent(errors.mean if errors else None)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
