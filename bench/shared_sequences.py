"""How much of the theory ranks reach that share each sequence, predicted: bench/shared_sequences.py --output FILE.

Theory is the step of one device, all of whose work is shared out evenly and waits for nothing. GPT-1.1B, one row a
step, fully sharded, blocks computed twice, on the H200s of one node and of eight. A row is one text (causal), or packed
with documents whose lengths are drawn (lognormal, sigma 1) around a mean.

Rows are cut as the engine cuts them (schedule/ring.py): the work of the rank that has most counts. In order, as many
keys travel between neighbours as the longest document has, and no work hides them here. ``in zigzag`` is the same row
as it was cut before. ``is_chosen``, ``is_chosen apart``: what ``parallel.context_method: auto`` takes, and what it does
for packed documents that do not see one another.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.cluster.devices import Cluster, load_cluster
from paceline.cluster.sequence_costs import sequence_waits
from paceline.config import Config, config_from_dict, layout_of
from paceline.predict.formulas.block import _MERGED, BlockModel
from paceline.predict.formulas.engine_costs import price
from paceline.schedule.ring import SequenceSplit, deal, order_of
from paceline.search.request import task_of, with_context_method
from paceline_bench.timing import BenchRecord

LAYERS, FORWARDS, BACKWARD = 20, 2, 2.5  # of a block that is computed twice; backward in forwards
PLACES = [("1x dgx-h200", 8, 131_072), ("8x dgx-h200", 64, 524_288), ("8x dgx-h200", 64, 1_048_576)]
MEANS = (2048, 8192, 32_768)


def config_of(tokens: int, ranks: int, method: str, data: dict[str, Any] | None = None) -> Config:
    parallel: dict[str, Any] = {"device": "cuda", "ranks": ranks}
    if ranks > 1:
        parallel |= {"context": ranks, "context_method": method, "strategy": "fsdp"}
    return config_from_dict(
        {
            "model": {"kind": "gpt", "size": "gpt-1.1b", "context": tokens, "vocab_size": 32_000, "compile": True},
            "data": data or {"kind": "synthetic_tokens", "context": tokens, "vocab_size": 32_000},
            "train": {"global_batch": 1, "precision": "bf16_master"},
            "parallel": parallel,
            "memory": {"checkpoint_activations": "full"},
        }
    )


def documents_of(tokens: int, mean: int) -> list[int]:
    """Returns where the documents of a row begin."""
    drawn, starts = random.Random(0), [0]
    while (end := starts[-1] + max(64, int(drawn.lognormvariate(0, 1) * mean / 1.65))) < tokens:
        starts.append(end)
    return starts


def priced(config: Config, cluster: Cluster, ranks: int) -> tuple[float, list[Any]]:
    """Returns a step's seconds, and of its attention the work, split, ranks, costs, and what each ring step adds."""
    asked: list[Any] = []
    waits: Callable[..., tuple[float, float]] = sequence_waits
    split_of = BlockModel.sequence_split

    def note(*given: Any) -> tuple[float, float]:
        asked[:] = given
        return waits(*given)

    def note_merging(model: BlockModel, *given: Any) -> Any:
        found = split_of(model, *given)
        query, keys = (
            model._memory_seconds(_MERGED * model.tokens * width)
            for width in (model.model.query_width, model.model.kv_width)
        )
        asked.append((query, query + keys))
        return found

    block = vars(sys.modules[BlockModel.__module__])
    block["sequence_waits"], BlockModel.sequence_split = note, note_merging
    try:
        workload = task_of(config, ranks).workload(layout_of(config, ranks, min(ranks, cluster.node.devices)))
        return price(workload, cluster).seconds, asked
    finally:
        block["sequence_waits"], BlockModel.sequence_split = sequence_waits, split_of


def rows_of(place: str, ranks: int, tokens: int) -> Iterator[dict[str, Any]]:
    cluster = load_cluster(place)
    alone, _ = priced(config_of(tokens, 1, "ring"), cluster, 1)
    packed = {"kind": "tokens", "path": "rows.npy", "context": tokens, "end_token": 0, "documents": "apart"}
    chosen, apart = (
        with_context_method(config_of(tokens, ranks, "auto", data), cluster, ranks).parallel.context_method
        for data in (None, packed)
    )
    for method in ("ring", "both") if ranks > 16 else ("ring", "both", "ulysses"):  # of 16 heads
        seconds, (work, split, group, cost, merging) = priced(config_of(tokens, ranks, method), cluster, ranks)
        row = {"place": place, "ranks": ranks, "tokens": tokens, "method": method, "is_chosen": method == chosen}
        row["is_chosen apart"] = method == apart
        row |= {"ring": split.ring, "ulysses": split.ulysses, "causal": round(alone / ranks / seconds, 3)}
        computed = LAYERS * (FORWARDS + BACKWARD) * work.compute_s
        before = _waits(sequence_waits(work, split, group, cost))
        for mean in MEANS:
            starts = documents_of(tokens, mean)
            share = sum((end - start) ** 2 for start, end in pairwise([*starts, tokens])) / tokens**2
            theory = alone / ranks - computed * (1 - share)
            mine = replace(work, compute_s=work.compute_s * share)
            longest = max(end - start for start, end in pairwise([*starts, tokens]))
            for name, order in {"in zigzag": "zigzag", "documents": order_of(tokens, split.ring, [starts])}.items():
                is_near = order == "contiguous"
                found = _near(mine, split, group, cost, longest) if is_near else None
                after = _waits(found or sequence_waits(mine, split, group, cost))
                after -= (split.ring - 2) * _waits(merging) if is_near else 0.0  # results of two steps in place of all
                step = seconds - before + after - computed * (1 - share * _unevenness(tokens, split, order, starts))
                row[f"{name}, {mean:,}"] = round(theory / step, 3)
        yield row


def _near(work: Any, split: SequenceSplit, ranks: Any, cost: Any, longest: int) -> tuple[float, float]:
    """Returns the same where keys and values of one document travel to the next share, and their gradients back."""
    exchanged, _ = sequence_waits(work, replace(split, ring=1), ranks, cost)
    heads = max(1, work.kv_heads // split.ulysses)
    num_bytes = 2 * work.batch * longest * heads * work.width * work.itemsize
    links = [(rank, ranks[(place + split.ulysses) % len(ranks)]) for place, rank in enumerate(ranks)]
    keys, gradients = (max(cost("send", size, link) for link in links) for size in (num_bytes, 2 * num_bytes))
    return exchanged + keys, exchanged + keys + gradients


def _waits(found: tuple[float, float]) -> float:
    return LAYERS * (FORWARDS * found[0] + found[1])


def _unevenness(tokens: int, split: SequenceSplit, order: Any, starts: list[int]) -> float:
    """Returns how much the rank with most work has, in means: queries times the keys before them in their document."""
    ends, works = [*starts[1:], tokens], list[float]()
    for share in deal(tokens, split.ring, order, starts):
        pairs = 0.0
        for chunk, _ in share:
            for start, end in zip(starts, ends, strict=True):
                first, last = max(chunk.start, start) - start, min(chunk.stop, end) - start
                pairs += (last**2 - first**2) / 2 if last > first else 0.0
        works.append(pairs)
    return max(works) * len(works) / sum(works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None)
    asked = parser.parse_args()
    rows = [row for place in PLACES for row in rows_of(*place)]
    for row in rows:
        print(row)
    if asked.output is not None:
        command = " ".join(["python", "bench/shared_sequences.py", *sys.argv[1:]])
        config = {"model": "gpt-1.1b", "kind": "predicted by formula, nothing was run"}
        BenchRecord(name="shared-sequences", command=command, rows=rows, config=config).write(asked.output)


if __name__ == "__main__":
    main()
