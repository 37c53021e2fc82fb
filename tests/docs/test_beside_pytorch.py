"""The figures of docs/beside-pytorch.md and of the README are those of the records that they name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
from page_figures import ROOT, read_record

GIB = 2**30
MLP, GPT, CPU = "engines-cpu-mlp", "engines-cpu-gpt", "engines-cpu"


def row(record: str, model: str, arm: str, ranks: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = read_record(record)["rows"]
    (found,) = [each for each in rows if (each["model"], each["arm"], each["ranks"]) == (model, arm, ranks)]
    return found


def ratio(record: str, model: str, arm: str, ranks: int = 2) -> str:
    return f"{row(record, model, arm, ranks)['ratio']:.3f}"


def peak(model: str, arm: str) -> str:
    return f"{row('engines-h200', model, arm, 1)['peak_bytes'] / GIB:.2f}"


def h200(model: str) -> str:
    return ratio("engines-h200", model, "paceline fsdp bf16_master", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A place of a page, from the words that it begins with to a full stop or the end of a row, and its figures."""

    begins: str
    figures: tuple[str, ...]
    page: str = "docs/beside-pytorch.md"


SHARED, GLOO, ONE = "2-core ARM, shared memory", "2-core ARM, Gloo", "| 1 rank, same machine"
CLAIMS = [
    Claim(begins=f"{SHARED} (the default) | MLP 784", figures=(ratio(MLP, "mlp", "paceline ddp shared memory"),)),
    Claim(begins=f"{SHARED} (the default) | GPT 10.7M", figures=(ratio(CPU, "gpt-11m", "paceline ddp shared memory"),)),
    Claim(begins=GLOO, figures=(ratio(MLP, "mlp", "paceline ddp"), ratio(CPU, "gpt-11m", "paceline ddp"))),
    Claim(begins=ONE, figures=(ratio(MLP, "mlp", "paceline ddp", 1), ratio(CPU, "gpt-11m", "paceline ddp", 1))),
    Claim(
        begins="On our process group",
        figures=(
            ratio(MLP, "mlp", "torch ddp on our group"),
            ratio(MLP, "mlp", "torch fsdp2 on our group"),
            ratio(GPT, "gpt-11m", "torch fsdp2 on our group"),
        ),
    ),
    Claim(
        begins=f"{SHARED} / Gloo | the MLP",
        figures=(
            ratio(MLP, "mlp", "paceline fsdp shared memory"),
            ratio(MLP, "mlp", "paceline fsdp"),
            ratio(MLP, "mlp", "torch fsdp2 root only"),
        ),
    ),
    Claim(
        begins=f"{SHARED} / Gloo | GPT",
        figures=(ratio(GPT, "gpt-11m", "paceline fsdp shared memory"), ratio(GPT, "gpt-11m", "paceline fsdp")),
    ),
    *(
        Claim(
            begins=f"1 rank, H200 | {name}",
            figures=(h200(model), peak(model, "paceline fsdp bf16_master"), peak(model, "torch fsdp2 bf16_master")),
        )
        for name, model in (("GPT 124M", "gpt-124m"), ("GPT 1.1B", "gpt-1.1b"))
    ),
    Claim(
        begins="For the MLP, ZeRO 1 and 2",
        figures=tuple(
            ratio(MLP, "mlp", f"paceline {stage}{backend}")
            for backend in (" shared memory", "")
            for stage in ("zero1", "zero2")
        ),
    ),
    Claim(
        begins="For the GPT they take",
        figures=tuple(
            ratio(CPU, "gpt-11m", f"paceline {stage}{backend}")
            for backend in (" shared memory", "")
            for stage in ("zero1", "zero2")
        ),
    ),
    Claim(
        begins="8 microbatches of 64 tokens) takes",
        figures=tuple(ratio("pipeline-cpu", "gpt-11m", f"paceline {name}") for name in ("gpipe", "1f1b")),
    ),
    Claim(
        begins="The trainer with its timing",
        figures=tuple(ratio("loop-cpu", model, "trainer") for model in ("mlp", "gpt-11m")),
    ),
    Claim(
        begins="microseconds a larger part of them",
        figures=tuple(ratio("loop-cpu-1", model, "trainer", 1) for model in ("mlp", "gpt-11m")),
    ),
    Claim(
        page="README.md",
        begins=f"{SHARED} | MLP / GPT 10.7M | torch DDP",
        figures=(ratio(MLP, "mlp", "paceline ddp shared memory"), ratio(CPU, "gpt-11m", "paceline ddp shared memory")),
    ),
    Claim(
        page="README.md",
        begins=f"{SHARED} | MLP / GPT 10.7M, sharded",
        figures=(
            ratio(MLP, "mlp", "paceline fsdp shared memory"),
            ratio(GPT, "gpt-11m", "paceline fsdp shared memory"),
        ),
    ),
    Claim(page="README.md", begins="1 rank, H200 | GPT 124M / 1.1B", figures=(h200("gpt-124m"), h200("gpt-1.1b"))),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.begins)
def test_a_figure_is_that_of_its_record(claim: Claim) -> None:
    text = (ROOT / claim.page).read_text(encoding="utf-8")
    assert text.count(claim.begins) == 1
    start = text.index(claim.begins)
    place = re.split(r"\.\s|;|\|\n", text[start:], maxsplit=1)[0]
    assert tuple(re.findall(r"\b\d+\.\d{2,3}\b", place)) == claim.figures


def speedups(arm: str) -> str:
    """Returns the least and the largest speed-up over Gloo of an arm from 1 to 64 MiB."""
    rows = [each for each in read_record("comm-cpu-2")["rows"] if each["arm"] == arm]
    found = [each["speedup"] for each in rows if 2**20 <= each["bytes"] <= 2**26]
    return f"{min(found):.1f} to {max(found):.1f} times"


def test_all_reduces_through_shared_memory_are_those_of_the_record() -> None:
    text = " ".join((ROOT / "docs/beside-pytorch.md").read_text(encoding="utf-8").split())
    segment = "shared_memory native, tensor in the segment"
    rows = read_record("comm-cpu-2")["rows"]
    (smallest,) = [each for each in rows if (each["arm"], each["bytes"]) == (segment, 1024)]
    assert f"of 1 to 64 MiB on two ranks is {speedups('shared_memory')} as fast as Gloo's" in text
    assert f"in the common segment it is {speedups(segment)} as fast" in text
    assert f"one of 1 KiB takes {smallest['median_us']:.0f} us" in text
