"""How much of the theory ranks reach that share each sequence, predicted: bench/shared_sequences.py --output FILE.

Theory is the step of one device, all of whose work is shared out evenly and waits for nothing. GPT-1.1B, one row a
step, fully sharded, blocks computed twice, on the H200s of one node and of eight. A row is one text (causal), or packed
with documents whose lengths are drawn (lognormal, sigma 1) around a mean.

Rows are dealt as the engine deals them (schedule/ring.py), and the rank that ends last counts: its work, messages that
its work does not hide, and what it adds to sums. ``documents`` is the mean of eight rows, ``least`` the least of them.
``is_chosen``, ``is_chosen apart``: what ``parallel.context_method: auto`` takes, and what it does for packed
documents that do not see one another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from paceline.cluster.devices import Cluster, load_cluster
from paceline.cluster.sequence_costs import sequence_waits, share_of_pairs, typical_documents
from paceline.config import Config, config_from_dict, layout_of
from paceline.predict.formulas.block import _MERGED, BlockModel
from paceline.predict.formulas.engine_costs import price
from paceline.schedule.ring import SequenceSplit, cut_parts, deal_documents, meets_of, tokens_of
from paceline.search.request import task_of, with_context_method
from paceline_bench.timing import BenchRecord

LAYERS, FORWARDS, BACKWARD = 20, 2, 2.5  # of a block that is computed twice; backward in forwards
PLACES = [("1x dgx-h200", 8, 131_072), ("8x dgx-h200", 64, 524_288), ("8x dgx-h200", 64, 1_048_576)]
MEANS, ROWS = (2048, 8192, 32_768), 8


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


def priced(config: Config, cluster: Cluster, ranks: int, share: float = 1.0) -> tuple[float, list[Any]]:
    """Returns a step's seconds where attention has a share of all pairs, and nothing in place of the waits of a ring.

    And of its attention the work, split, ranks, costs, and what adding the results of all queries of a rank takes.
    """
    asked: list[Any] = []
    split_of, attention = BlockModel.sequence_split, BlockModel._attention

    def note(*given: Any) -> tuple[float, float]:
        asked[:] = given
        return 0.0, 0.0

    def note_merging(model: BlockModel, *given: Any) -> Any:
        found = split_of(model, *given)
        query, keys = (
            model._memory_seconds(_MERGED * model.tokens * width)
            for width in (model.model.query_width, model.model.kv_width)
        )
        asked.append((query, query + keys))
        return replace(found[0], method="ulysses"), *found[1:]  # whose results are not added up

    block = vars(sys.modules[BlockModel.__module__])
    block["sequence_waits"], BlockModel.sequence_split = note, note_merging
    BlockModel._attention = lambda model: tuple(share * each for each in attention(model))
    try:
        workload = task_of(config, ranks).workload(layout_of(config, ranks, min(ranks, cluster.node.devices)))
        return price(workload, cluster).seconds, asked
    finally:
        block["sequence_waits"], BlockModel.sequence_split = sequence_waits, split_of
        BlockModel._attention = attention


@cache
def alone(place: str, tokens: int, share: float) -> float:
    return priced(config_of(tokens, 1, "ring"), load_cluster(place), 1, share)[0]


def reached(place: str, ranks: int, tokens: int, method: str, starts: tuple[int, ...]) -> float:
    """Returns the step of one device over so many, over that of ranks that share each row."""
    cluster, share = load_cluster(place), share_of_pairs(tokens, starts)
    seconds, (work, split, group, cost, merging) = priced(config_of(tokens, ranks, method), cluster, ranks, share)
    seconds += _waits(sequence_waits(replace(work, documents=starts), split, group, cost))
    return alone(place, tokens, share) / ranks / (seconds + _merged(tokens, split, starts) * _waits(merging))


def rows_of(place: str, ranks: int, tokens: int) -> Iterator[dict[str, Any]]:
    cluster = load_cluster(place)
    packed = {"kind": "tokens", "path": "rows.npy", "context": tokens, "end_token": 0, "documents": "apart"}
    chosen, apart = (
        with_context_method(config_of(tokens, ranks, "auto", data), cluster, ranks).parallel.context_method
        for data in (None, packed)
    )
    for method in ("ring", "both") if ranks > 16 else ("ring", "both", "ulysses"):  # of 16 heads
        _, (_, split, *_) = priced(config_of(tokens, ranks, method), cluster, ranks)
        row = {"place": place, "ranks": ranks, "tokens": tokens, "method": method, "is_chosen": method == chosen}
        row |= {"is_chosen apart": method == apart, "ring": split.ring, "ulysses": split.ulysses}
        row["causal"] = round(reached(place, ranks, tokens, method, (0,)), 3)
        for mean in MEANS:
            found = [
                reached(place, ranks, tokens, method, typical_documents(tokens, mean, seed)) for seed in range(ROWS)
            ]
            row[f"documents, {mean:,}"] = round(sum(found) / ROWS, 3)
            row[f"least, {mean:,}"] = round(min(found), 3)
        yield row


def _waits(found: tuple[float, float]) -> float:
    return LAYERS * (FORWARDS * found[0] + found[1])


def _merged(tokens: int, split: SequenceSplit, starts: tuple[int, ...]) -> float:
    """Returns how many results of queries a rank adds up, over the queries that it has; the most of any rank."""
    if len(starts) < 2:
        return split.ring if split.ring > 1 else 0.0
    (shares,) = deal_documents(tokens, split.ring, [starts])
    cuts = [cut_parts(share) for share in shares]
    merged = [tokens_of(own) for own in cuts]
    for rank, own in enumerate(cuts):
        for other in cuts[:rank] + cuts[rank + 1 :]:
            merged[rank] += sum(len(queries) for meet in meets_of(own, other) for queries, _ in meet.pairs)
    return max(merged) * split.ring / tokens


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
