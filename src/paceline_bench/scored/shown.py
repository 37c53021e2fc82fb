"""The scores of predictions as ``paceline validate`` prints them."""

from __future__ import annotations

from paceline.terminal import echo
from paceline.units import format_percent
from paceline_bench.scored.validation import ErrorScores, FamilyScores, Validation

_WIDTHS = (8, 8, 8, 9, 9, 8, 10, 9)


def show_scores(found: Validation) -> None:
    """Prints a line for each family, and below them what holds for all."""
    skipped = len(found.skipped)
    of_split = f", split {found.split}" if found.split else ""
    echo(f"{found.source}{of_split}: {len(found.rows)} rows, {skipped} without a score\n")
    echo(f"{'':<17}{'held out':<34}beside other rows of the family")
    widths = zip(("mean", "p90", "bias", "in band", "mean", "bias", "constant", "memory"), _WIDTHS, strict=True)
    echo(f"{'family':<12}{'rows':>5}{''.join(f'{name:>{width}}' for name, width in widths)}{'Spearman':>10}")
    for each in found.families:
        echo(_line(each))
    echo("\nheld out     by constants that were fitted without any row of the family")
    echo("constant     the error of one FLOP/s figure for each device and precision,")
    echo("             fitted on the very rows it is scored on")
    if found.time is not None and found.held_out is not None:
        apart, beside = map(format_percent, (found.held_out_mean_over_families, found.mean_over_families))
        echo(f"step time    {apart} mean over families, each held out; {_scores(found.held_out)} over rows")
        echo(f"             {beside} with constants fitted beside other rows; {_scores(found.time)} over rows")
        within, held = map(format_percent, (found.coverage, found.held_out_coverage))
        echo(f"bands        {within} of rows are in the band of their prediction; of those held out {held}")
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
            f"ranking      Spearman {ranking.spearman:.2f}, regret {format_percent(ranking.mean_regret)} (worst "
            f"{format_percent(ranking.worst_regret)}), best among the first three {format_percent(ranking.top_three)}; "
            f"{ranking.groups} groups of {ranking.alternatives} alternatives"
        )
    if found.scaling is not None:
        scaling = found.scaling
        echo(
            f"scaling      efficiency within {scaling.points:.1f} points; throughput given the smallest run "
            f"{format_percent(scaling.given_first.mean)}; {scaling.rows} rows"
        )
        known = [(one.family, one.scaling.given_first.mean) for one in found.families if one.scaling is not None]
        by_family = ", ".join(f"{family} {format_percent(mean)}" for family, mean in known)
        echo(f"             given the smallest run, by family: {by_family}")


def _line(each: FamilyScores) -> str:
    apart, time = each.held_out, each.time
    numbers = (
        *((apart.mean, apart.p90, apart.bias) if apart else (None,) * 3),
        each.held_out_coverage,
        *((time.mean, time.bias) if time else (None,) * 2),
        each.baseline,
        each.memory.mean if each.memory else None,
    )
    cells = "".join(f"{format_percent(value):>{width}}" for value, width in zip(numbers, _WIDTHS, strict=True))
    ranking = f"{each.ranking.spearman:.2f}" if each.ranking else "-"
    return f"{each.family:<12}{time.rows if time else 0:>5}{cells}{ranking:>10}"


def _scores(errors: ErrorScores) -> str:
    mean, median, p90 = map(format_percent, (errors.mean, errors.median, errors.p90))
    return f"{mean} mean, {median} median, {p90} p90"
