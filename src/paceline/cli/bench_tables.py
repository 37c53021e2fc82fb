"""The tables of ``paceline bench``: a record's rows for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = list[dict[str, Any]]


def show_steps(rows: Rows) -> None:
    """Shows arms, their steps, and their ratios to their peers."""
    from paceline.units import format_bytes

    titles = ("model", "ranks", "arm", "step", "ratio", "quartiles", "of", "items/s", "peak")
    cells = [
        (
            row["model"],
            str(row["ranks"]),
            row["arm"],
            f"{row['median_ms']:.2f} ms",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}",
            row["peer"],
            f"{row['items_per_s']:,.0f}" if "items_per_s" in row else "",
            format_bytes(row["peak_bytes"]) if row.get("peak_bytes") else "",
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("model", "ranks", "arm", "of"))


def show_predictions(rows: Rows) -> None:
    """Shows predicted beside measured, and the mean of the errors below."""
    from paceline.units import format_bytes

    titles = ("model", "arm", "predicted", "measured", "off by", "memory predicted", "measured", "off by")
    cells = []
    for row in rows:
        head = (row["model"], row["arm"])
        if "error" in row:
            cells.append((*head, row["error"], "", "", "", "", ""))
            continue
        peak = row["measured_peak_bytes"]
        memory = (format_bytes(row["predicted_peak_bytes"]), format_bytes(peak)) if peak else ("", "")
        off = f"{100 * row['memory_error']:+.1f} %" if "memory_error" in row else ""
        times = (f"{row['predicted_ms']:.2f} ms", f"{row['measured_ms']:.2f} ms", f"{100 * row['step_error']:+.1f} %")
        cells.append((*head, *times, *memory, off))
    _print_table(titles, cells, left=("model", "arm"))
    for key, name in (("step_error", "step time"), ("memory_error", "memory")):
        errors = [abs(row[key]) for row in rows if key in row]
        if errors:
            mean = sum(errors) / len(errors)
            print(f"{name}: off by {100 * mean:.1f} % on average, {100 * max(errors):.1f} % at most")


def show_memory(rows: Rows) -> None:
    """Shows the largest model of each option."""
    from paceline.units import format_bytes, format_count

    titles = ("option", "layers", "parameters", "device", "host", "tokens/s", "limit")
    cells = [
        (
            row["row"],
            str(row["layers"]),
            format_count(row["parameters"]),
            format_bytes(row["device_bytes"] or 0),
            format_bytes(row["host_bytes"] or 0),
            f"{row['tokens_per_s'] or 0:,.0f}",
            row["limit"],
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("option", "limit"))


def show_comm(rows: Rows) -> None:
    """Shows arms size by size."""
    from paceline.units import format_bytes

    titles = ("ranks", "size", "arm", "time", "Gbit/s", "faster than Gloo")
    cells = [
        (
            str(row["ranks"]),
            format_bytes(row["bytes"]),
            row["arm"],
            f"{row['median_us']:,.1f} us",
            f"{row['gbps']:.2f}",
            f"{row['speedup']:.2f} x",
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("ranks", "size", "arm"))


def show_checkpoints(rows: Rows) -> None:
    """Shows saves and loads beside DCP's, and the goals of ours."""
    titles = ("what", "ranks", "arm", "time", "ratio", "quartiles", "goal", "stall", "of at once", "goal", "memory")
    cells = [
        (
            row["what"],
            str(row["ranks"]),
            row["arm"],
            f"{row['median_ms']:,.1f} ms",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}",
            f"{row['goal']:g}",
            f"{row['stall_ms']:,.1f} ms" if "stall_ms" in row else "",
            f"{row['stall_of_at_once']:.3f}" if "stall_ms" in row else "",
            f"{row['goal_stall']:g}" if row.get("goal_stall") else "",
            f"{row['memory_of_shard']:.2f}" if "stall_ms" in row else "",
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("what", "ranks", "arm"))
    print("ratio: to DCP in the same round   memory: growth while saving, of the shard; goal 1.1   goals: at most")


def show_ledger(rows: Rows) -> None:
    """Shows what the ledger costs."""
    titles = ("what", "without", "with", "ratio", "middle half")
    cells = [
        (
            row["what"],
            f"{1e6 * row['without_s']:,.2f} us",
            f"{1e6 * row['with_s']:,.2f} us",
            f"{row['ratio']:.4f}" if "ratio" in row else "",
            f"{row['ratio_low']:.4f}-{row['ratio_high']:.4f}" if "ratio" in row else "",
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("what",))


def show_restarts(rows: Rows) -> None:
    """Shows how long a killed rank stopped a run."""
    titles = ("arm", "kill to first step", "of torchrun", "least to most", "steps lost")
    cells = [
        (
            row["arm"],
            f"{row['median_s']:.2f} s",
            f"{row['ratio']:.2f}",
            f"{row['least_s']:.2f}-{row['most_s']:.2f}",
            f"{row['steps_lost']:g}",
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("arm",))


def show_compression(rows: Rows) -> None:
    """Shows what each policy saves and costs."""
    from paceline.units import format_bytes

    titles = ("policy", "setting", "feedback", "sent", "fewer", "loss", "difference", "owed", "compute", "pays below")
    cells = [
        (
            row["policy"],
            row["setting"],
            "yes" if row["error_feedback"] else "no",
            format_bytes(round(row["sent_bytes"])),
            f"{row['bytes_ratio']:.1f} x" if row["bytes_ratio"] else "",
            f"{row['loss']:.4f}",
            f"{row['loss_difference']:+.4f}",
            f"{row['residual_norm']:.3g}",
            f"{row['compute_ms']:.2f} ms",
            f"{row['pays_below_gbps']:.2f} Gbit/s" if row["pays_below_gbps"] else "",
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("policy", "setting", "feedback"))


def show_convergence(rows: Rows) -> None:
    """Shows where training ends under each policy."""
    titles = ("config", "policy", "setting", "feedback", "fewer", "loss", "percent", "accuracy", "points", "close")
    cells = [
        (
            row["config"],
            row["policy"],
            row["setting"],
            "yes" if row["error_feedback"] else "no",
            f"{row['bytes_ratio']:.1f} x" if row["bytes_ratio"] else "",
            f"{row['loss']:.4f}",
            f"{row['loss_percent']:+.2f}",
            f"{row['accuracy']:.4f}" if row["accuracy"] is not None else "",
            f"{row['accuracy_points']:+.2f}" if row["accuracy_points"] is not None else "",
            f"{'yes' if row['is_close'] else 'no'}, by {row['judged_by']}",
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("config", "policy", "setting", "feedback", "close"))


def show_pipeline(rows: Rows) -> None:
    """Shows the parts of the pipeline benchmark that were asked for, each as a table of its own."""
    parts = {name: [row for row in rows if row["part"] == name] for name in _PIPELINE_PARTS}
    for name, show in _PIPELINE_PARTS.items():
        if parts[name]:
            show(parts[name])


def _show_features(rows: Rows) -> None:
    from paceline.units import format_bytes

    titles = ("feature", "model", "samples/s", "step", "tensors a rank", "peak a rank", "kind")
    cells = [
        (
            row["feature"],
            row["model"],
            f"{row['samples_per_s']:,.2f}",
            f"{row['step_ms']:.2f} ms",
            format_bytes(max(row["tensor_bytes"])),
            format_bytes(max(row["peak_rss_bytes"])),
            row["kind"],
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("feature", "model", "kind"))


def _show_modelled(rows: Rows) -> None:
    from paceline.units import format_bytes

    titles = ("feature", "model", "GPUs", "samples/s", "step", "state a GPU", "kind")
    cells = [
        (
            row["feature"],
            row["model"],
            str(row["gpus"]),
            f"{row['samples_per_s']:,.1f}" if row["samples_per_s"] else "",
            f"{row['step_ms']:.2f} ms" if row["step_ms"] else "",
            format_bytes(row["state_bytes"]) if row["state_bytes"] else "",
            str(row.get("missing", row["kind"])),
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("feature", "model", "GPUs", "kind"))


def _show_bubbles(rows: Rows) -> None:
    titles = ("schedule", "ranks", "microbatches", "bubble", "formula", "overhead", "formula", "in flight")
    cells = [
        (
            row["schedule"],
            str(row["ranks"]),
            str(row["microbatches"]),
            f"{row['bubble']:.4f}",
            "" if row["bubble_formula"] is None else f"{row['bubble_formula']:.4f}",
            f"{row['overhead']:.4f}",
            "" if row["overhead_formula"] is None else f"{row['overhead_formula']:.4f}",
            f"{row['most_in_flight_share']:g}",
        )
        for row in rows
    ]
    _print_table(titles, cells, left=("schedule",))


_PIPELINE_PARTS = {
    "speed": show_steps,
    "features": _show_features,
    "modelled": _show_modelled,
    "bubbles": _show_bubbles,
}


def _print_table(titles: tuple[str, ...], cells: Sequence[Sequence[str]], left: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right")
    for row in cells:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # nobody to fold the lines for
    console.print(table)
