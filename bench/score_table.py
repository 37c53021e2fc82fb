"""Writes the table of scores in docs/prediction.md: bench/score_table.py FILE.csv [--write].

Families are rows of a table whose names begin alike; the sentence beside each is for readers, and touches no score.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from paceline.predict.scored.measured_table import Table, read_table
from paceline.predict.scored.scores import ErrorScores
from paceline.predict.scored.validation import FamilyScores, Validation, validate

DOCUMENT = Path(__file__).parents[1] / "docs/prediction.md"
BEGIN, END = "<!-- scores -->\n", "<!-- end of scores -->"
FAMILIES = {
    "mpt": "MPT, FSDP on A100 and H100",
    "titan": "torchtitan, Llama 3.1 on H100 (500 W), H200",
    "kempner": "Llama on H200",
    "internevo": "InternEvo 7B, A100",
    "sc21": "Megatron 2021, A100",
    "meg20": "Megatron 2020, V100 and A100",
    "selrec": "selective recomputation, A100",
    "megh100": "Megatron 2024, H100",
    "bridge": "Megatron-Bridge, Llama and MoE, Hopper and Blackwell",
    "nemo": "NeMo 2024, H100",
    "dle": "DeepLearningExamples, V100 and A100",
    "vtrain": "vTrain, 256 A100",
    "vtrain1n": "vTrain, one node",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write it into {DOCUMENT.name}")
    arguments = parser.parse_args()
    text = scores(read_table(arguments.file))
    print(text)
    if arguments.write:
        document = DOCUMENT.read_text()
        before, _, rest = document.partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(before + BEGIN + text + END + after)


def scores(table: Table) -> str:
    dev, calib, whole = (validate(table, split) for split in ("dev", "calib", None))
    about = (
        f"On all {len(table.rows)} rows of the collection that the constants come from (constants were fitted on the "
        "`calib` rows; `dev` rows chose the structure of the model, so that they are not wholly unseen), by `paceline "
        "validate FILE.csv --split dev` and `--split calib`; this part is written by `bench/score_table.py`:"
    )
    columns = (
        *("family", "dev rows", "dev error", "p90", "one rate per device", "given the smallest run"),
        *("calib rows", "calib error", "memory, all rows"),
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [_line(each, _family(dev, each.family), _family(calib, each.family)) for each in whole.families]
    lines.append(_last_line(dev, calib, whole))
    return "\n\n".join([_wrapped(about), "\n".join(lines), *map(_wrapped, _paragraphs(dev))]) + "\n"


def _last_line(dev: Validation, calib: Validation, whole: Validation) -> str:
    cells = (
        *("**mean over families**", _rows(dev.time), f"**{_percent(dev.mean_over_families)}**", "", "", ""),
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
        "Errors are means of |predicted / measured - 1| in each row's own metric. *One rate per device* is what a "
        "single FLOP/s figure for each kind of device and precision would reach, chosen on these very rows after the "
        f"fact; it is better than the model on: {told or 'none'}. *Given the smallest run*: errors of the others' "
        "throughput, where that one's is known.",
        f"On `dev` rows besides: p90 {_percent(dev.time.p90)} over all rows; {_both(dev.inside)} inside the calibrated "
        f"domain and {_both(dev.outside)} outside; Spearman {ranking.spearman:.2f} within {ranking.groups} groups of "
        f"alternatives, regret {_percent(ranking.mean_regret)} on average and {_percent(ranking.worst_regret)} at "
        f"worst, the best among the first three in {_percent(ranking.top_three)} of groups; scaling efficiency within "
        f"{scaling.points:.1f} points on {scaling.rows} rows; memory {_mean(dev.memory)} over {_rows(dev.memory)} "
        f"rows. Of runs that ran, {dev.false_misfits} of {dev.time.rows} were said not to fit; {dev.ran_out} rows ran "
        f"out of memory, {dev.false_fits} of which were said to fit.",
    ]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _both(errors: ErrorScores | None) -> str:
    return "none" if errors is None else f"{_mean(errors)} (p90 {_percent(errors.p90)}) on {errors.rows} rows"


def _rows(errors: ErrorScores | None) -> str:
    return str(errors.rows if errors else 0)


def _line(whole: FamilyScores, dev: FamilyScores | None, calib: FamilyScores | None) -> str:
    time, fitted = dev.time if dev else None, calib.time if calib else None
    given = dev.scaling.given_first if dev and dev.scaling else None
    memory = f"{_percent(whole.memory.mean)} of {whole.memory.rows}" if whole.memory else "-"
    cells = (
        FAMILIES.get(whole.family, whole.family),
        _rows(time),
        _mean(time),
        _percent(time.p90 if time else None),
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
