"""Attention inside documents of one long row, each way that there is: python bench/packed_rows.py --output FILE.

One layer's queries, keys and values, a row of 32,768 tokens in documents of 1,024, in bf16 on a GPU:

    causal         the whole row as one document: what keeping documents apart saves; it computes something else
    mask           SDPA with a mask of the row squared, which is made once, as for all layers of a model
    blocks         SDPA document by document
    varlen         flash attention that is told where documents begin
    varlen anew    the same for a new tensor of documents: the first layer, which waits for the device
    flex           flex attention in a graph of the compiler, with its blocks made in the same graph

Forward alone, and with backward; outputs are compared with those of ``blocks``. ``way`` is what a model would take.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models import document_attention as ways
from paceline_bench.timing import BenchRecord, Turns, interleave

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
_MOST_OFF = 0.1  # three steps of bf16 at 4, the largest outputs; what crosses a document is off by about 1


def make_ways(documents: Tensor, names: list[str]) -> dict[str, Way]:
    """Returns each way to attend inside documents, by its name."""
    mask = ways.document_mask(documents, is_causal=True) if "mask" in names else None
    compiled = torch.compile(ways.attend_documents, fullgraph=True)
    found: dict[str, Way] = {
        "causal": lambda *x: ways.attend_masked(*x, None, True, 0.0, None),
        "mask": lambda *x: ways.attend_masked(*x, mask, False, 0.0, None),
        "blocks": lambda *x: ways._by_blocks(*x, documents, True, 0.0, None),
        "varlen": lambda *x: ways._by_varlen(*x, documents, True, None),
        "varlen anew": lambda *x: ways._by_varlen(*x, documents.clone(), True, None),
        "flex": lambda *x: compiled(*x, documents, True),
    }
    return {name: found[name] for name in names}


def run(way: Way, inputs: list[Tensor], weights: Tensor | None) -> None:
    """Goes forward; with the weights of a loss, back too."""
    with torch.set_grad_enabled(weights is not None):
        output = way(*inputs)
        if weights is not None:
            torch.autograd.grad(output, inputs, weights)


def peak_bytes(step: Callable[[], None]) -> int:
    """Returns the most memory that a step takes beside what is there before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description="Time attention inside documents of one row.")
    for name, value in (("tokens", 32768), ("document", 1024), ("heads", 16), ("kv-heads", 16), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ways", default="causal,mask,blocks,varlen,varlen anew,flex")
    parser.add_argument("--output", type=Path, help="else the record is printed alone")
    asked = parser.parse_args()
    device, names = torch.device("cuda" if torch.cuda.is_available() else "cpu"), asked.ways.split(",")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = [
        torch.randn(1, heads, asked.tokens, asked.width, device=device, dtype=dtype, requires_grad=True)
        for heads in (asked.heads, asked.kv_heads, asked.kv_heads)
    ]
    places = torch.arange(asked.tokens, device=device)
    documents = (places - places % asked.document).unsqueeze(0)
    weights, made = torch.randn_like(inputs[0]), make_ways(documents, names)
    with torch.no_grad():
        expected = made["blocks"](*inputs)
        for name in names[names[0] == "causal" :]:
            error = (made[name](*inputs) - expected).abs().max().item()
            if error > _MOST_OFF:
                raise SystemExit(f"{name} is {error:g} off\n  every way computes the same\n  see its tests")
    rows: list[dict[str, Any]] = []
    turns = Turns(rounds=asked.rounds, steps_per_turn=3, warm_up=3)
    for passes, back in (("forward", None), ("forward and backward", weights)):
        arms = {name: partial(run, way, inputs, back) for name, way in made.items()}
        for timing in interleave(arms, turns, baseline="mask" if "mask" in arms else names[0], device=device):
            peak = peak_bytes(arms[timing.arm]) if device.type == "cuda" else None
            rows.append({"passes": passes, **timing.to_json(), "peak_bytes": peak})
    config = {name: value for name, value in vars(asked).items() if name not in ("output", "ways")}
    config["way"] = ways.choose_way(inputs[0], documents, 0.0)
    record = BenchRecord(name="packed rows", command=" ".join(["python", *sys.argv]), rows=rows, config=config)
    if asked.output is not None:
        record.write(asked.output)
    print(record.to_json())


if __name__ == "__main__":
    main()
