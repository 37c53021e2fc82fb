"""The tables of ``paceline bench``: a record's rows for people.

A column is written as ``title: template``, or ``<title: template`` for one that is aligned to the left. The template
names values of a row, with format specifications as in f-strings and these besides:

    B    a number of bytes               N    a large number
    Y    yes or no                       U    seconds, in microseconds
    S    seconds, in a fitting unit      ?    before another: nothing where the value is 0

A list shows its largest value. A cell is empty where a value that it names is None or missing; of templates with ``|``
between them, the first that can be filled counts.
"""

from __future__ import annotations

import contextlib
from string import Formatter
from typing import Any

from paceline.units import format_bytes, format_count, format_seconds

Rows = list[dict[str, Any]]

_RATIO = ("ratio: {ratio:.3f}", "quartiles: {ratio_low:.3f}-{ratio_high:.3f}")
_STEPS = (
    *("<model: {model}", "<ranks: {ranks}", "<arm: {arm}", "step: {median_ms:.2f} ms", *_RATIO),
    *("<of: {peer}", "items/s: {items_per_s:,.0f}", "peak: {peak_bytes:?B}"),
)
_POLICY = ("<policy: {policy}", "<setting: {setting}", "<feedback: {error_feedback:Y}")
_TABLES: dict[str, tuple[str, ...]] = {
    "engines": _STEPS,
    "loop": _STEPS,
    "muon": (
        *("<model: {model}", "<ranks: {ranks}", "<strategy: {strategy}", "<arm: {arm}", "step: {median_ms:.2f} ms"),
        *(*_RATIO, "on cores: {processor_ms:,.0f} ms", "ratio: {processor_ratio:.3f}", "items/s: {items_per_s:,.0f}"),
    ),
    "gpu": (
        *("<model: {model}", "<arm: {arm}", "step: {step_ms:.2f} ms", "ratio: {ratio:.3f}"),
        *("rate: {tokens_per_s:,.0f} tokens/s|{images_per_s:,.0f} images/s", "MFU: {mfu:.1%}", "peak: {peak_bytes:?B}"),
        *("first step: {first_step_s:.1f} s", "again: {second_start_s:.1f} s", "loss: {loss:.4f}"),
        *("of torchao: {fp8_ratio:.3f}", "<not run: {error}"),
    ),
    "gpu losses": (
        *("<model: {model}", "<precision: {precision}", "step: {step}", "loss: {loss:.4f}", "<than: {other}"),
        *("at equal steps: {other_loss:.4f}", "off by: {difference:+.2%}", "after: {seconds:.1f} s"),
        *("at equal time: {other_loss_then:.4f}", "off by: {difference_then:+.2%}"),
    ),
    "predict": (
        *("<model: {model}", "<arm: {arm}", "predicted: {error}|{predicted_ms:.2f} ms"),
        *("measured: {measured_ms:.2f} ms", "off by: {step_error:+.1%}"),
        *("memory predicted: {predicted_peak_bytes:B}", "measured: {measured_peak_bytes:?B}"),
        "off by: {memory_error:+.1%}",
    ),
    "memory": (
        *("<option: {row}", "layers: {layers}", "parameters: {parameters:N}", "device: {device_bytes:B}|0 B"),
        *("host: {host_bytes:B}|0 B", "tokens/s: {tokens_per_s:,.0f}|0", "<limit: {limit}"),
    ),
    "scaling": (
        *("<kind: {kind}", "<scaling: {mode}", "<strategy: {strategy}", "ranks: {ranks}", "batch: {global_batch}"),
        *("step: {step_s:S}", "rate: {units_per_s:,.0f} {unit}/s"),
        *("ideal: {ideal:g} x", "speed-up: {speed_up:.2f} x", "efficiency: {efficiency:.1%}"),
        *("communication: {comm_share:.1%}", "memory: {memory_bytes:B}", "<not run: {error}"),
    ),
    "comm": (
        *("<ranks: {ranks}", "<size: {bytes:B}", "<arm: {arm}", "time: {median_us:,.1f} us", "Gbit/s: {gbps:.2f}"),
        "faster than Gloo: {speedup:.2f} x",
    ),
    "checkpoint": (
        *("<what: {what}", "<ranks: {ranks}", "<arm: {arm}", "time: {median_ms:,.1f} ms", *_RATIO, "goal: {goal:g}"),
        *("stall: {stall_ms:,.1f} ms", "of at once: {stall_of_at_once:.3f}", "goal: {goal_stall:?g}"),
        "memory: {memory_of_shard:.2f}",
    ),
    "load": (
        *("<arm: {arm}", "<ranks: {ranks}", "time: {median_s:.2f} s", *_RATIO, "goal: {goal:g}"),
        *("a rank's memory: {memory_bytes:B}", "ratio: {memory_ratio:.3f}", "goal: {goal_memory:g}"),
        *("private: {private_bytes:B}", "ratio: {private_ratio:.3f}", "<of: {peer}", "<not run: {error}"),
    ),
    "prepare": (
        *("<tokenizer: {tokenizer}", "<arm: {arm}", "time: {median_s:.2f} s", "MB/s: {mb_per_s:.2f}", *_RATIO),
        *(
            "goal: {goal:g}",
            "on cores: {processor_s:.2f} s",
            "of it: {processor_ratio:.3f}",
            "memory: {memory_bytes:B}",
        ),
    ),
    "tokens": (
        *("<model: {model}", "workers: {workers}", "step: {median_ms:.2f} ms", "data: {data_ms:.3f} ms"),
        *("most: {most_data_ms:.3f} ms", "share: {data_share:.2%}", "goal: {goal:.0%}"),
    ),
    "ledger": (
        *("<what: {what}", "without: {without_s:U}", "with: {with_s:U}", "ratio: {ratio:.4f}"),
        "middle half: {ratio_low:.4f}-{ratio_high:.4f}",
    ),
    "restart": (
        *("<arm: {arm}", "kill to first step: {median_s:.2f} s", "of torchrun: {ratio:.2f}"),
        *("least to most: {least_s:.2f}-{most_s:.2f}", "steps lost: {steps_lost:g}"),
    ),
    "compression": (
        *(*_POLICY, "sent: {sent_bytes:B}", "fewer: {bytes_ratio:?.1f} x", "loss: {loss:.4f}"),
        *("difference: {loss_difference:+.4f}", "owed: {residual_norm:.3g}", "compute: {compute_ms:.2f} ms"),
        "pays below: {pays_below_gbps:?.2f} Gbit/s",
    ),
    "convergence": (
        *("<config: {config}", *_POLICY, "fewer: {bytes_ratio:?.1f} x", "loss: {loss:.4f}"),
        *("percent: {loss_percent:+.2f}", "accuracy: {accuracy:.4f}", "points: {accuracy_points:+.2f}"),
        "<close: {is_close:Y}, by {judged_by}",
    ),
    # The parts of the pipeline benchmark.
    "speed": _STEPS,
    "features": (
        *("<feature: {feature}", "<model: {model}", "samples/s: {samples_per_s:,.2f}", "step: {step_ms:.2f} ms"),
        *("tensors a rank: {tensor_bytes:B}", "peak a rank: {peak_rss_bytes:B}", "<kind: {kind}"),
    ),
    "modelled": (
        *("<feature: {feature}", "<model: {model}", "<GPUs: {gpus}", "samples/s: {samples_per_s:?,.1f}"),
        *("step: {step_ms:?.2f} ms", "state a GPU: {state_bytes:?B}", "<kind: {missing}|{kind}"),
    ),
    "bubbles": (
        *("<schedule: {schedule}", "ranks: {ranks}", "microbatches: {microbatches}", "bubble: {bubble:.4f}"),
        *("formula: {bubble_formula:.4f}", "overhead: {overhead:.4f}", "formula: {overhead_formula:.4f}"),
        "in flight: {most_in_flight_share:g}",
    ),
}


def show_table(name: str, rows: Rows) -> None:
    """Shows the rows of a benchmark; those that are of several parts, part by part."""
    if name == "pipeline":
        for part in ("speed", "features", "modelled", "bubbles"):
            if found := [row for row in rows if row["part"] == part]:
                show_table(part, found)
        return
    if name == "predict":  # on a CPU no memory is measured to set the prediction beside
        rows = [row if row.get("measured_peak_bytes") else row | {"predicted_peak_bytes": None} for row in rows]
    _print_table(rows, _TABLES[name])
    if name == "gpu":
        print("ratio: to the best plain loop of the same round   MFU: of the bf16 peak   again: at the second start")
    if name == "scaling":
        print("communication: share of a step in which ranks wait for it, or for stages   memory: of the largest rank")
    if name == "checkpoint":
        print("ratio: to DCP in the same round   memory: growth while saving, of the shard; goal 1.1   goals: at most")
    if name == "predict":
        for key, what in (("step_error", "step time"), ("memory_error", "memory")):
            if errors := [abs(row[key]) for row in rows if key in row]:
                mean = sum(errors) / len(errors)
                print(f"{what}: off by {100 * mean:.1f} % on average, {100 * max(errors):.1f} % at most")


class _CellFormatter(Formatter):
    """Fills the template of a column; raises KeyError for a value that is not there."""

    def format_field(self, value: Any, format_spec: str) -> str:
        spec = format_spec.removeprefix("?")
        if value is None or (spec != format_spec and not value):
            raise KeyError
        value = max(value) if isinstance(value, list) else value
        if named := {"B": format_bytes, "N": format_count, "Y": _yes, "U": _microseconds, "S": format_seconds}.get(
            spec
        ):
            return named(value)
        text = format(value, spec)
        return text.replace("%", " %") if spec.endswith("%") else text


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.2f} us"


def _print_table(rows: Rows, columns: tuple[str, ...]) -> None:
    from rich.table import Table

    from paceline.terminal import new_console

    table = Table(box=None, padding=(0, 2, 0, 0))
    split = [column.partition(": ") for column in columns]
    for title, _, _ in split:
        table.add_column(title.removeprefix("<"), justify="left" if title.startswith("<") else "right")
    for row in rows:
        table.add_row(*(_cell(template, row) for _, _, template in split))
    console = new_console()
    if not console.is_terminal:
        console.width = 160  # nobody to fold the lines for
    console.print(table)


def _cell(templates: str, row: dict[str, Any]) -> str:
    for template in templates.split("|"):
        with contextlib.suppress(KeyError):
            return _CellFormatter().vformat(template, (), row)
    return ""
