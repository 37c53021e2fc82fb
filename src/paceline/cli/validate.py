"""``paceline validate``: how well predictions do on published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.destination import check_file
from paceline.cli.options import print_json
from paceline.errors import UsageError
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.predict.scored.validation import ErrorScores, FamilyScores, Validation

_LISTED = 20
_HELD_OUT, _ALL = "dev", "all"


def validate(
    file: Path | None = typer.Argument(
        None,
        metavar="[FILE.csv]",
        help="A table of measurements.  [default: the published runs that come with paceline]",
    ),
    split: str | None = typer.Option(
        None,
        "--split",
        metavar="NAME",
        help="Only rows of this split, or all.  [default: dev, which no constant was fitted on; of a FILE, all]",
    ),
    rows: Path | None = typer.Option(
        None,
        "--rows",
        callback=check_file,
        metavar="OUT.csv",
        help="Write id, metric_name, measured, predicted, skipped of every row.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the scores as JSON; errors are shares of 1."),
) -> None:
    """Score predictions on measurements that others published."""
    from paceline.predict.scored.measured_table import read_shipped, read_table
    from paceline.predict.scored.validation import rows_csv, to_json
    from paceline.predict.scored.validation import validate as score

    chosen = split or (_HELD_OUT if file is None else _ALL)
    found = score(read_shipped() if file is None else read_table(file), None if chosen == _ALL else chosen)
    if rows is not None:
        try:
            rows.write_text(rows_csv(found))
        except OSError as error:
            raise UsageError(f"the rows cannot be written to {rows}: {error}") from error
    if as_json:
        print_json(to_json(found))
    elif found.has_scores:
        _show(found)
    else:
        _show_skipped(found)
    if not found.has_scores:
        echo(f"no row of {found.source} has a score: each is listed with its reason", err=True)
        raise typer.Exit(1)


def _show(found: Validation) -> None:
    skipped = len(found.skipped)
    of_split = f", split {found.split}" if found.split else ""
    echo(f"{found.source}{of_split}: {len(found.rows)} rows, {skipped} without a score\n")
    echo(
        f"{'family':<12}{'rows':>5}{'mean':>8}{'median':>8}{'p90':>8}{'bias':>8}{'constant':>10}{'memory':>9}{'Spearman':>10}"
    )
    for each in found.families:
        echo(_line(each))
    echo("\nconstant     the error of one FLOP/s figure for each device and precision,")
    echo("             fitted on the very rows it is scored on")
    if found.mean_over_families is not None and found.time is not None:
        echo(f"step time    {_percent(found.mean_over_families)} mean over families; {_scores(found.time)} over rows")
    for where, errors in (("inside", found.inside), ("outside", found.outside)):
        if errors is not None:
            echo(f"{where:<13}{_scores(errors)} over {errors.rows} rows {where} the calibrated domain")
    if found.memory is not None:
        echo(f"memory       {_scores(found.memory)} over {found.memory.rows} rows")
    timed = 0 if found.time is None else found.time.rows
    echo(
        f"fits         {found.false_fits} of {found.ran_out} runs that ran out of memory were predicted to fit, and "
        f"{found.false_misfits} of {timed} that ran were predicted not to fit"
    )
    if found.ranking is not None:
        ranking = found.ranking
        echo(
            f"ranking      Spearman {ranking.spearman:.2f}, regret {_percent(ranking.mean_regret)} (worst "
            f"{_percent(ranking.worst_regret)}), best among the first three {_percent(ranking.top_three)}; "
            f"{ranking.groups} groups of {ranking.alternatives} alternatives"
        )
    if found.scaling is not None:
        scaling = found.scaling
        echo(
            f"scaling      efficiency within {scaling.points:.1f} points; throughput given the smallest run "
            f"{_percent(scaling.given_first.mean)}; {scaling.rows} rows"
        )
        by_family = ", ".join(
            f"{one.family} {_percent(one.scaling.given_first.mean)}"
            for one in found.families
            if one.scaling is not None
        )
        echo(f"             given the smallest run, by family: {by_family}")
    _show_skipped(found)


def _show_skipped(found: Validation) -> None:
    for row in found.skipped[:_LISTED]:
        echo(f"skipped      {row.row.id}: {row.skipped}")
    if len(found.skipped) > _LISTED:
        echo(f"skipped      and {len(found.skipped) - _LISTED} more: --rows lists them")


def _line(each: FamilyScores) -> str:
    time = each.time
    numbers = "".join(
        f"{_percent(value):>8}" for value in ((time.mean, time.median, time.p90, time.bias) if time else (None,) * 4)
    )
    ranking = f"{each.ranking.spearman:.2f}" if each.ranking else "-"
    memory = _percent(each.memory.mean if each.memory else None)
    return (
        f"{each.family:<12}{time.rows if time else 0:>5}{numbers}{_percent(each.baseline):>10}{memory:>9}{ranking:>10}"
    )


def _scores(errors: ErrorScores) -> str:
    return f"{_percent(errors.mean)} mean, {_percent(errors.median)} median, {_percent(errors.p90)} p90"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
