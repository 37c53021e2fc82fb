"""The tables of ``paceline bench``: a record's rows for people.

A column is written as ``title: template``, or ``<title: template`` for one that is aligned to the left. The template
names values of a row, with format specifications as in f-strings and these besides:

    B    a number of bytes               N    a large number
    Y    yes or no                       ?    before another: nothing where the value is 0

A cell is empty where a value that it names is None or missing.
"""

from __future__ import annotations

from string import Formatter
from typing import Any

from paceline.cli.bench_options import Rows
from paceline.units import format_bytes, format_count

_RATIO = ("ratio: {ratio:.3f}", "quartiles: {ratio_low:.3f}-{ratio_high:.3f}")


def show_steps(rows: Rows) -> None:
    """Shows arms, their steps, and their ratios to their peers."""
    columns = ("<model: {model}", "<ranks: {ranks}", "<arm: {arm}", "step: {median_ms:.2f} ms", *_RATIO)
    _print_table(rows, *columns, "<of: {peer}", "items/s: {items_per_s:,.0f}", "peak: {peak_bytes:?B}")


def show_predictions(rows: Rows) -> None:
    """Shows predicted beside measured, and the mean of the errors below."""
    shown = []
    for row in rows:
        if "error" in row:
            shown.append({"model": row["model"], "arm": row["arm"], "predicted": row["error"]})
            continue
        has_memory = bool(row["measured_peak_bytes"])
        shown.append(
            row
            | {
                "predicted": f"{row['predicted_ms']:.2f} ms",
                "step_percent": 100 * row["step_error"],
                "memory_percent": 100 * row["memory_error"] if "memory_error" in row else None,
                "predicted_peak_bytes": row["predicted_peak_bytes"] if has_memory else None,
            }
        )
    _print_table(
        shown,
        *("<model: {model}", "<arm: {arm}"),
        *("predicted: {predicted}", "measured: {measured_ms:.2f} ms", "off by: {step_percent:+.1f} %"),
        *("memory predicted: {predicted_peak_bytes:B}", "measured: {measured_peak_bytes:?B}"),
        "off by: {memory_percent:+.1f} %",
    )
    for key, name in (("step_error", "step time"), ("memory_error", "memory")):
        errors = [abs(row[key]) for row in rows if key in row]
        if errors:
            mean = sum(errors) / len(errors)
            print(f"{name}: off by {100 * mean:.1f} % on average, {100 * max(errors):.1f} % at most")


def show_memory(rows: Rows) -> None:
    """Shows the largest model of each option."""
    measured = ("device_bytes", "host_bytes", "tokens_per_s")
    _print_table(
        [row | {name: row[name] or 0 for name in measured} for row in rows],
        *("<option: {row}", "layers: {layers}", "parameters: {parameters:N}", "device: {device_bytes:B}"),
        *("host: {host_bytes:B}", "tokens/s: {tokens_per_s:,.0f}", "<limit: {limit}"),
    )


def show_comm(rows: Rows) -> None:
    """Shows arms size by size."""
    columns = ("<ranks: {ranks}", "<size: {bytes:B}", "<arm: {arm}", "time: {median_us:,.1f} us")
    _print_table(rows, *columns, "Gbit/s: {gbps:.2f}", "faster than Gloo: {speedup:.2f} x")


def show_checkpoints(rows: Rows) -> None:
    """Shows saves and loads beside DCP's, and the goals of ours."""
    _print_table(
        rows,
        *("<what: {what}", "<ranks: {ranks}", "<arm: {arm}", "time: {median_ms:,.1f} ms", *_RATIO, "goal: {goal:g}"),
        *("stall: {stall_ms:,.1f} ms", "of at once: {stall_of_at_once:.3f}", "goal: {goal_stall:?g}"),
        "memory: {memory_of_shard:.2f}",
    )
    print("ratio: to DCP in the same round   memory: growth while saving, of the shard; goal 1.1   goals: at most")


def show_ledger(rows: Rows) -> None:
    """Shows what the ledger costs."""
    _print_table(
        [row | {"without_us": 1e6 * row["without_s"], "with_us": 1e6 * row["with_s"]} for row in rows],
        *("<what: {what}", "without: {without_us:,.2f} us", "with: {with_us:,.2f} us", "ratio: {ratio:.4f}"),
        "middle half: {ratio_low:.4f}-{ratio_high:.4f}",
    )


def show_restarts(rows: Rows) -> None:
    """Shows how long a killed rank stopped a run."""
    columns = ("<arm: {arm}", "kill to first step: {median_s:.2f} s", "of torchrun: {ratio:.2f}")
    _print_table(rows, *columns, "least to most: {least_s:.2f}-{most_s:.2f}", "steps lost: {steps_lost:g}")


def show_compression(rows: Rows) -> None:
    """Shows what each policy saves and costs."""
    _print_table(
        [row | {"sent_bytes": round(row["sent_bytes"])} for row in rows],
        *("<policy: {policy}", "<setting: {setting}", "<feedback: {error_feedback:Y}", "sent: {sent_bytes:B}"),
        *("fewer: {bytes_ratio:?.1f} x", "loss: {loss:.4f}", "difference: {loss_difference:+.4f}"),
        *("owed: {residual_norm:.3g}", "compute: {compute_ms:.2f} ms", "pays below: {pays_below_gbps:?.2f} Gbit/s"),
    )


def show_convergence(rows: Rows) -> None:
    """Shows where training ends under each policy."""
    _print_table(
        rows,
        *("<config: {config}", "<policy: {policy}", "<setting: {setting}", "<feedback: {error_feedback:Y}"),
        *("fewer: {bytes_ratio:?.1f} x", "loss: {loss:.4f}", "percent: {loss_percent:+.2f}"),
        *("accuracy: {accuracy:.4f}", "points: {accuracy_points:+.2f}", "<close: {is_close:Y}, by {judged_by}"),
    )


def show_pipeline(rows: Rows) -> None:
    """Shows the parts of the pipeline benchmark that were asked for, each as a table of its own."""
    for name, show in _PIPELINE_PARTS.items():
        part = [row for row in rows if row["part"] == name]
        if part:
            show(part)


def _show_features(rows: Rows) -> None:
    largest = ("tensor_bytes", "peak_rss_bytes")
    _print_table(
        [row | {name: max(row[name]) for name in largest} for row in rows],
        *("<feature: {feature}", "<model: {model}", "samples/s: {samples_per_s:,.2f}", "step: {step_ms:.2f} ms"),
        *("tensors a rank: {tensor_bytes:B}", "peak a rank: {peak_rss_bytes:B}", "<kind: {kind}"),
    )


def _show_modelled(rows: Rows) -> None:
    _print_table(
        [{"missing": row["kind"]} | row for row in rows],
        *("<feature: {feature}", "<model: {model}", "<GPUs: {gpus}", "samples/s: {samples_per_s:?,.1f}"),
        *("step: {step_ms:?.2f} ms", "state a GPU: {state_bytes:?B}", "<kind: {missing}"),
    )


def _show_bubbles(rows: Rows) -> None:
    _print_table(
        rows,
        *("<schedule: {schedule}", "ranks: {ranks}", "microbatches: {microbatches}"),
        *("bubble: {bubble:.4f}", "formula: {bubble_formula:.4f}"),
        *("overhead: {overhead:.4f}", "formula: {overhead_formula:.4f}", "in flight: {most_in_flight_share:g}"),
    )


_PIPELINE_PARTS = {
    "speed": show_steps,
    "features": _show_features,
    "modelled": _show_modelled,
    "bubbles": _show_bubbles,
}


class _CellFormatter(Formatter):
    """Fills the template of a column; raises KeyError for a value that is not there."""

    def format_field(self, value: Any, format_spec: str) -> str:
        spec = format_spec.removeprefix("?")
        if value is None or (spec != format_spec and not value):
            raise KeyError
        if spec == "Y":
            return "yes" if value else "no"
        named = {"B": format_bytes, "N": format_count}.get(spec)
        return format(value, spec) if named is None else named(value)


def _print_table(rows: Rows, *columns: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    split = [column.partition(": ") for column in columns]
    for title, _, _ in split:
        table.add_column(title.removeprefix("<"), justify="left" if title.startswith("<") else "right")
    for row in rows:
        table.add_row(*(_cell(template, row) for _, _, template in split))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # nobody to fold the lines for
    console.print(table)


def _cell(template: str, row: dict[str, Any]) -> str:
    try:
        return _CellFormatter().vformat(template, (), row)
    except KeyError:
        return ""
