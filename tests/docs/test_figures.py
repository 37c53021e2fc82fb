"""Figures on pages are those of the records that the pages name.

- Every measured figure (``page_figures.py`` says what that is) is a number of a record that its page names, in the unit
  of its field, rounded as it is written; or it stands in ``EXCEPTIONS`` with the reason.
- The figures of ``CLAIMS``, which pages lead with, are those of one field of one row. ``test_beside_pytorch.py`` has
  those of ``docs/beside-pytorch.md`` and of the README's table beside PyTorch.
- Tables that scripts write are what the scripts print today.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from page_figures import ROOT, agrees, figures, numbers, pages, read_record, records_named

import paceline
from paceline_bench.scored.measured_table import read_shipped

GPU_RECORDS = ("gpu-h200", "gpu-h200-1b", "gpu-h200-10m", "gpu-h200-resnet")
# Parts of pages that scripts write, by the lines around them. Tests below compare them with the scripts.
WRITTEN = {
    "docs/convert.md": [
        (f"<!-- {name}: begin (bench/peers_loops.py) -->", f"<!-- {name}: end -->") for name in ("peers", "mistakes")
    ],
    "README.md": [("<!-- one GPU: begin (scripts/speed_table.py) -->", "<!-- one GPU: end -->")],
    "docs/prediction.md": [("<!-- scores -->", "<!-- end of scores -->")],
}
FORMULA, SETTING, EXAMPLE = "a formula's value", "a setting of the code", "an example"
VALIDATED = "paceline validate prints it: tests/cli/test_validate_command.py"
TRIED = "a fit that was tried, and is not in the repository"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "README.md": {"6.6 %": VALIDATED, "5.9 %": VALIDATED},
    "docs/planning.md": {"6.6 %": VALIDATED, "5.9 %": VALIDATED},
    "docs/chaos.md": {"0.2 ms": SETTING},
    "docs/checkpoint-tools.md": {"95.8 %": EXAMPLE, "93.6 %": EXAMPLE},
    "docs/collectives.md": {"1.2 GB": SETTING},
    "docs/config.md": {"4.096 us": "the unit of NCCL_IB_TIMEOUT"},
    "docs/deployment.md": {"1.25 times": SETTING},
    "docs/dry-run.md": {"1.5 times": EXAMPLE},
    "docs/experts.md": {"1.25 times": SETTING, "1.24 times": "71.7 / 57.9"},
    "docs/gpu.md": {"57.6 ms": "predicted: a test below", "11.7 GiB": "predicted: a test below"},
    "docs/long-sequences.md": {
        **dict.fromkeys(("3.81 s", "3.86 s", "13.58 s"), "predicted: tests/predict/test_long_context.py"),
        "22.5 GiB": FORMULA,
    },
    "docs/links.md": {"95.6 %": FORMULA, "4.4 %": FORMULA},
    "docs/monitoring.md": {"0.6 MB": FORMULA, "0.1 MB": FORMULA},
    "docs/muon.md": {"1.5 times": SETTING},
    "docs/prediction.md": {
        **dict.fromkeys(("6.6 %", "94.2 %", "93.3 %"), VALIDATED),
        **dict.fromkeys(
            ("95.3 ms", "114.1 ms", "45.4 ms", "371.6 ms", "414.9 ms", "21.4 ms", "0.0 %", "1.4 %", "3.1 %"),
            "predicted: tests/bench/test_foresight.py",
        ),
        **dict.fromkeys(
            ("11.3 %", "8.8 %", "9.2 %", "9.9 %", "11.6 %", "9.7 %", "10.2 %", "0.5 %", "5.9 %", "5.5 %", "6.3 %"),
            TRIED,
        ),
        **dict.fromkeys(("10.9 %", "7.7 %", "16.5 %", "16.2 %", "7.6 %", "5.8 %", "8.4 %", "19.1 %"), TRIED),
        **dict.fromkeys(("7.4 %", "10.3 %", "8.0 %", "8.2 %", "13.4 %", "7.2 %", "16.6 %", "14.4 %", "10.8 %"), TRIED),
        **dict.fromkeys(("7.9 %", "7.3 %", "10.7 %", "12.3 %", "12.1 %", "13.2 %"), TRIED),
        **dict.fromkeys(("4.9 %", "7.8 %", "9.5 %", "8.9 %", "15.8 %", "7.1 %", "11.5 %", "11.8 %", "6.8 %"), TRIED),
        "1.4 times": SETTING,
    },
    "docs/report.md": {"1.67 times": FORMULA},
    "docs/schedules.md": {
        **dict.fromkeys(("27.3 %", "15.8 %", "11.1 %", "5.9 %"), FORMULA),
        **dict.fromkeys(("40.0 %", "30.8 %"), EXAMPLE),
    },
    "docs/simulation.md": {"1.5 times": EXAMPLE},
    "docs/verdicts.md": {"1.5 s": SETTING},
    "docs/zero.md": {"5.5 GB": FORMULA},
}


def _without_written(page: str, text: str) -> str:
    """Blanks what scripts write, so that lines keep their numbers."""
    for begin, end in WRITTEN.get(page, []):
        before, rest = text.split(begin, 1)
        inside, after = rest.split(end, 1)
        text = before + "\n" * inside.count("\n") + after
    return text


def _unknown(page: str, text: str) -> Iterator[str]:
    known = [pair for name in records_named(text) for pair in numbers(read_record(name))]
    excused = EXCEPTIONS.get(page, {})
    for figure in figures(_without_written(page, text)):
        if str(figure) not in excused and not any(agrees(figure, key, value) for key, value in known):
            yield f"{page}:{figure.line}: {figure}"


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_measured_figures_are_in_a_record_that_the_page_names(path: Path) -> None:
    page = path.relative_to(ROOT).as_posix()
    found = list(_unknown(page, path.read_text(encoding="utf-8")))
    told = "no record in bench/results that the page names has them; name the record, or give the reason in EXCEPTIONS"
    assert not found, f"{', '.join(found)}: {told}"


def test_exceptions_are_on_their_pages() -> None:
    for page, excused in EXCEPTIONS.items():
        there = {str(figure) for figure in figures((ROOT / page).read_text(encoding="utf-8"))}
        assert set(excused) <= there, f"{page} has no {set(excused) - there} any more: remove the exception"


def test_a_figure_of_no_record_is_found() -> None:
    text = "A step takes 56.6 ms and 123.4 ms (`bench/results/gpu-h200.json`).\n\n```\n7.77 ms\n```\n"
    assert [each.split(": ")[1] for each in _unknown("docs/made-up.md", text)] == ["123.4 ms"]
    assert list(_unknown("docs/made-up.md", "It takes 56.2 ms.")) == ["docs/made-up.md:1: 56.2 ms"]


# Single figures.


@dataclass(frozen=True, slots=True)
class Claim:
    """A field of the one row of a record that ``where`` picks, as a page writes it; ``scale`` goes to its unit."""

    page: str
    record: str
    where: dict[str, Any]
    name: str
    written: str
    scale: float = 1.0


def _mlp(arm: str) -> tuple[str, dict[str, Any], str]:
    return "engines-cpu-mlp", {"model": "mlp", "ranks": 2, "arm": arm}, "ratio"


_SHARED, _ZERO, _FSDP, _FAULTS = "docs/shared-memory.md", "docs/zero.md", "docs/fsdp.md", "docs/faults.md"
_SAVE = {"what": "save", "arm": "paceline at once"}
_LOAD = {"what": "load 2 to 3", "arm": "paceline, hashes compared"}
_RESTART = {"arm": "paceline train, kept processes"}
_MEMORY_RESTART = {"arm": "paceline train, kept processes, snapshots in memory"}
_FSDP_1B = ("engines-h200", {"model": "gpt-1.1b", "arm": "paceline fsdp bf16_master"})
_STEP_500 = ("gpu-h200-losses", {"step": 500}, "difference", "{:.2f} % below", -100)
CLAIMS = (
    Claim(_SHARED, *_mlp("paceline ddp"), "torch DDP on Gloo | {:.3f} |"),
    Claim(_SHARED, *_mlp("paceline ddp shared memory"), "| **{:.3f}** | | our `fsdp`"),
    Claim(_SHARED, *_mlp("paceline fsdp"), "FSDP2 on Gloo | {:.3f} |"),
    Claim(_SHARED, *_mlp("paceline fsdp shared memory"), "| **{:.3f}** | | our `zero1`"),
    Claim(_SHARED, *_mlp("torch ddp on our group"), "{:.3f} (DDP)"),
    Claim(_SHARED, *_mlp("torch fsdp2 on our group"), "{:.3f} (FSDP2)"),
    Claim(_SHARED, *_mlp("paceline zero1 shared memory"), "| **{:.3f}** | | our `zero2`"),
    Claim(_SHARED, *_mlp("paceline zero2 shared memory"), "| **{:.3f}** | ## What can go wrong"),
    Claim(_ZERO, *_mlp("paceline zero1 shared memory"), "that share memory, a step takes {:.3f} and"),
    Claim(_ZERO, *_mlp("paceline zero2 shared memory"), "and {:.3f} times as long for the MLP"),
    Claim(_ZERO, *_mlp("paceline zero1"), "On Gloo it takes {:.3f} and"),
    Claim(_ZERO, *_mlp("paceline zero2"), "and {:.3f} times as long, because"),
    Claim(_FSDP, *_FSDP_1B, "ratio", "{:.3f} of FSDP2's time"),
    Claim(_FSDP, *_FSDP_1B, "peak_bytes", "peaks at {:.2f} GiB", 2**-30),
    Claim("docs/pipeline.md", "pipeline-cpu", {"arm": "paceline gpipe"}, "ratio", "| GPipe | **{:.3f}** |"),
    Claim("docs/pipeline.md", "pipeline-cpu", {"arm": "paceline 1f1b"}, "ratio", "| 1F1B | **{:.3f}** |"),
    Claim(_FAULTS, "checkpoint-cpu", _SAVE, "ratio", "{:.2f} times as long"),
    Claim(_FAULTS, "checkpoint-cpu", _LOAD, "ratio", "{:.2f} times torch's"),
    Claim(_FAULTS, "restart-cpu", _RESTART, "median_s", "first new step it takes {:.1f} s"),
    Claim(_FAULTS, "restart-cpu", _RESTART, "ratio", "{:.2f} times what torchrun needs"),
    Claim("docs/survive.md", "restart-cpu", _RESTART, "median_s", "saves as often: {:.2f} s with"),
    Claim("docs/survive.md", "restart-cpu", _MEMORY_RESTART, "median_s", "{:.2f} s with snapshots in memory,"),
    Claim("docs/survive.md", "restart-cpu", {"arm": "torchrun, bare DDP script"}, "median_s", "{:.1f} s for torchrun"),
    Claim(_FAULTS, "ledger-cpu", {"what": "operation"}, "with_s", "{:.0f} us an operation", 1e6),
    Claim("README.md", *_STEP_500),
    Claim("docs/gpu.md", *_STEP_500),
    Claim("docs/huggingface.md", "load-cpu", {"arm": "paceline"}, "ratio", "{:.2f} x the time"),
    Claim("docs/muon.md", "muon-h200", {"arm": "muon"}, "median_ms", "{:.1f} ms"),
)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}-{claim.record}-{claim.written}")
def test_a_page_leads_with_what_one_row_of_a_record_says(claim: Claim) -> None:
    rows = read_record(claim.record)["rows"]
    (row,) = [row for row in rows if all(row.get(key) == value for key, value in claim.where.items())]
    written = claim.written.format(claim.scale * row[claim.name])
    assert written in _words(claim.page), f"{claim.page} does not say {written!r}: {claim}"


def _words(page: str) -> str:
    """Returns a page as one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_the_errors_before_a_start_are_the_largest_of_their_records() -> None:
    gpu, cpu = (read_record(name)["rows"] for name in ("predict-h200", "predict-cpu"))
    step, memory, cpu_step = (
        f"{100 * max(abs(row[name]) for row in rows):.1f} %"
        for rows, name in ((gpu, "step_error"), (gpu, "memory_error"), (cpu, "step_error"))
    )
    text = _words("docs/planning.md")
    assert f"For GPTs on one H200 it is at most {step} in step time and {memory} in memory" in text
    assert f"at most {cpu_step} on two CPU ranks" in text


# Tables.


def _gpu_rows() -> Iterator[str]:
    runs = (
        ("gpt_124m.yaml", "gpu-h200", "gpt-124m", "paceline train"),
        ("gpt_1b.yaml", "gpu-h200-1b", "gpt-1.1b", "paceline train"),
        ("gpt_1b.yaml train.precision=fp8", "gpu-h200-1b", "gpt-1.1b", "paceline train fp8"),
        ("gpt_10m_chars.yaml", "gpu-h200-10m", "gpt-10m", "paceline train"),
        ("resnet50.yaml", "gpu-h200-resnet", "resnet50", "paceline train"),
    )
    for config, record, model, arm in runs:
        rows = read_record(record)["rows"]
        (row,) = [each for each in rows if (each["model"], each["arm"]) == (model, arm)]
        unit = "tokens" if "tokens_per_s" in row else "images"
        step = f"{row['step_ms']:.{2 if row['step_ms'] < 10 else 1}f} ms"
        rate = f"{row[f'{unit}_per_s']:,.0f} {unit}/s"
        yield f"| `paceline train configs/{config}` | {step} | {rate} | {row['peak_bytes'] / 2**30:.1f} GiB |"


@pytest.mark.parametrize("row", list(_gpu_rows()))
def test_the_table_of_one_gpu_is_that_of_the_records(row: str) -> None:
    assert row in (ROOT / "docs/gpu.md").read_text(encoding="utf-8")


def test_the_tables_of_predictions_are_those_of_the_records() -> None:
    text = (ROOT / "docs/prediction.md").read_text(encoding="utf-8")
    for row in read_record("predict-h200")["rows"]:
        name = f"{row['model']}, {row['strategy']}, {'compiled' if row['is_compiled'] else 'eager'}"
        memory = " | ".join(f"{row[key] / 2**30:.1f} GiB" for key in ("predicted_peak_bytes", "measured_peak_bytes"))
        assert f"| {name} | {_times(row)} | {memory} | {100 * row['memory_error']:+.1f} % |" in text
    for row in read_record("predict-cpu")["rows"]:
        way = {"gloo": "Gloo", "shared_memory": "shared memory"}[row["backend"]]
        assert f"| {row['model']}, {row['strategy']}, {way} | {_times(row)} |" in text


def _times(row: dict[str, Any]) -> str:
    error = f"{100 * row['step_error']:+.1f} %"
    return f"{row['predicted_ms']:,.1f} ms | {row['measured_ms']:,.1f} ms | {error}"


def test_the_table_of_one_gpu_is_what_the_script_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    speed = importlib.import_module("speed_table")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert speed.with_table(readme, speed.table(*map(read_record, GPU_RECORDS))) == readme


@pytest.mark.exhaustive  # it predicts all published runs; the headline is compared by default, in tests/cli
def test_the_table_of_scores_is_what_the_script_prints() -> None:
    scores = importlib.import_module("score_table")
    assert scores.scores(read_shipped()) in (ROOT / "docs/prediction.md").read_text(encoding="utf-8")


def test_the_prediction_on_the_page_of_one_gpu_is_what_predict_says() -> None:
    found = paceline.predict(ROOT / "configs/gpt_124m.yaml", "1x h200", ranks=1)
    memory = (found.total_memory - found.memory["framework"]) / 2**30
    told = f"predicts {found.seconds * 1e3:.1f} ms, and {memory:.1f} GiB without the framework's share"
    assert told in _words("docs/gpu.md")
