"""The benchmarks of making tokens and of reading them: what their rows say, and that the arms do the same work."""

from __future__ import annotations

from pathlib import Path

import pytest

from measures.data import (
    LoaderTurn,
    PrepareWorkload,
    TokensWorkload,
    bench_prepare,
    bench_tokens,
    make_rows,
    write_library_text,
)


def turn(seconds: float, memory_bytes: int | None = None) -> LoaderTurn:
    return LoaderTurn(
        seconds=seconds, processor_s=2 * seconds + (memory_bytes is not None), tokens=7, memory_bytes=memory_bytes
    )


def test_a_ratio_is_a_share_of_the_tokenizers_speed_in_the_same_round() -> None:
    rows = make_rows(
        "bpe", 8_000_000, {"tokenizer": [turn(1.0), turn(6.0)], "paceline": [turn(2.0, 10), turn(8.0, 20)]}
    )
    own, ours = rows
    assert (own["ratio"], own["goal"], own["memory_bytes"]) == (1.0, None, None)
    assert (ours["ratio"], ours["ratio_low"], ours["ratio_high"]) == (0.625, 0.5, 0.75)
    assert (ours["processor_ratio"], ours["goal"], ours["memory_bytes"]) == (round((2 / 5 + 12 / 17) / 2, 4), 0.8, 20)
    assert (ours["median_s"], ours["mb_per_s"]) == (5.0, 1.6)
    assert make_rows("char", 1, {"tokenizer": [turn(1.0)], "paceline": [turn(2.0, 10)]})[1]["goal"] is None


@pytest.mark.exhaustive
def test_the_text_is_that_of_the_library_and_as_long_as_asked(tmp_path: Path) -> None:
    content = write_library_text(tmp_path / "text", 300_000).read_bytes()
    assert 300_000 - 4 < len(content) <= 300_000
    assert content.decode("utf-8").count("def ") > 100


@pytest.mark.exhaustive
def test_a_run_on_tokens_says_what_it_waits_for() -> None:
    (row,) = bench_tokens(TokensWorkload(model="gpt-nano", context=16, steps=3, workers=(0,), mib=1))
    assert row["num_steps"] == 3
    assert 0 < row["data_share"] < 1
    assert row["data_ms"] <= row["most_data_ms"]


@pytest.mark.exhaustive
def test_both_arms_make_the_same_tokens() -> None:
    rows = bench_prepare(PrepareWorkload(mib=1, rounds=1))
    for own, ours in zip(rows[::2], rows[1::2], strict=True):
        assert own["tokens"] == pytest.approx(ours["tokens"], rel=1e-3)
        assert ours["memory_bytes"] < 2**30
