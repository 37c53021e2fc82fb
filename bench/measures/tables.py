"""The tables of ``python bench``: a record's rows for people, in columns as in ``paceline_bench/output.py``."""

from __future__ import annotations

from paceline_bench.output import RATIO, STEPS, Rows, print_table

_PARTS = ("speed", "features", "modelled", "bubbles")
_POLICY = ("<policy: {policy}", "<setting: {setting}", "<feedback: {error_feedback:Y}")
_TABLES: dict[str, tuple[str, ...]] = {
    "loop": STEPS,
    "muon": (
        *("<model: {model}", "<ranks: {ranks}", "<strategy: {strategy}", "<arm: {arm}", "step: {median_ms:.2f} ms"),
        *(*RATIO, "on cores: {processor_ms:,.0f} ms", "ratio: {processor_ratio:.3f}", "items/s: {items_per_s:,.0f}"),
    ),
    "gpu losses": (
        *("<model: {model}", "<precision: {precision}", "step: {step}", "loss: {loss:.4f}", "<than: {other}"),
        *("at equal steps: {other_loss:.4f}", "off by: {difference:+.2%}", "after: {seconds:.1f} s"),
        *("at equal time: {other_loss_then:.4f}", "off by: {difference_then:+.2%}"),
    ),
    "emulated": (
        *("<case: {case}", "<arm: {arm}", "<compiled: {compiled:Y}", "step: {median_ms:.2f} ms", "ratio: {ratio:.3f}"),
        *("<of: {peer}", "exposed: {exposed_ms:.2f} ms", "hidden: {hidden_share:.1%}", "peak: {peak_bytes:?B}"),
        *("kernels: {kernels}", "idle: {idle_ms:.2f} ms", "off dry run: {off:+.1%}", "<not run: {error}"),
    ),
    "nccl": (
        *("<model: {model}", "<ranks: {ranks}", "<arm: {arm}", "step: {median_ms:.2f} ms", *RATIO, "<of: {peer}"),
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
    "checkpoint": (
        *("<what: {what}", "<ranks: {ranks}", "<arm: {arm}", "time: {median_ms:,.1f} ms", *RATIO, "goal: {goal:g}"),
        *("stall: {stall_ms:,.1f} ms", "of at once: {stall_of_at_once:.3f}", "goal: {goal_stall:?g}"),
        "memory: {memory_of_shard:.2f}",
    ),
    "load": (
        *("<arm: {arm}", "<ranks: {ranks}", "time: {median_s:.2f} s", *RATIO, "goal: {goal:g}"),
        *("a rank's memory: {memory_bytes:B}", "ratio: {memory_ratio:.3f}", "goal: {goal_memory:g}"),
        *("private: {private_bytes:B}", "ratio: {private_ratio:.3f}", "<of: {peer}", "<not run: {error}"),
    ),
    "prepare": (
        *("<tokenizer: {tokenizer}", "<arm: {arm}", "time: {median_s:.2f} s", "MB/s: {mb_per_s:.2f}", *RATIO),
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
        *("least to most: {least_s:.2f}-{most_s:.2f}", "steps lost: {steps_lost:g}", "failed rounds: {failed}"),
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
    "speed": STEPS,
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
        for part in _PARTS:
            if found := [row for row in rows if row["part"] == part]:
                show_table(part, found)
        return
    if name == "predict":  # on a CPU no memory is measured to set the prediction beside
        rows = [row if row.get("measured_peak_bytes") else row | {"predicted_peak_bytes": None} for row in rows]
    print_table(rows, _TABLES[name])
    if name == "checkpoint":
        print("ratio: to DCP in the same round   memory: growth while saving, of the shard; goal 1.1   goals: at most")
    if name == "predict":
        for key, what in (("step_error", "step time"), ("memory_error", "memory")):
            if errors := [abs(row[key]) for row in rows if key in row]:
                mean = sum(errors) / len(errors)
                print(f"{what}: off by {100 * mean:.1f} % on average, {100 * max(errors):.1f} % at most")
