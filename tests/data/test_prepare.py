"""Preparing tokens: all documents once and in order, whatever the pieces; going on; sources that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.data import prepare as module
from paceline.data.documents import cut_pieces, read_piece
from paceline.data.prepare import PrepareOptions, prepare
from paceline.data.token_files import check_shards, open_tokens, read_manifest
from paceline.data.tokenizers import CharTokenizer, open_tokenizer
from paceline.errors import DataError

LINES = [f"line {number} of näh text " * (number % 5) for number in range(60)]


def threads(workers: int, mp_context: Any) -> ThreadPoolExecutor:
    assert mp_context.get_start_method() == "spawn"
    return ThreadPoolExecutor(workers)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads in place of processes, and small pieces."""
    monkeypatch.setattr(module, "ProcessPoolExecutor", threads)
    monkeypatch.setattr(module, "_LEAST_PIECE", 100)
    monkeypatch.setattr(module, "_AT_ONCE", 50)


def write_sources(folder: Path) -> list[Path]:
    folder.mkdir()
    (folder / "a.txt").write_text("\n".join(LINES), encoding="utf-8")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    table = pyarrow.table({"text": LINES, "other": list(range(60))})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=7)
    return sorted(folder.iterdir())


def options_for(tmp_path: Path, **changes: Any) -> PrepareOptions:
    values: dict[str, Any] = {"sources": (tmp_path / "in",), "output": tmp_path / "out", "tokenizer": "bytes"}
    return PrepareOptions(**{**values, "workers": 2, **changes})


def all_tokens(folder: Path) -> list[int]:
    opened = open_tokens(str(folder), dtype=None, vocab_size=None, verify="full").tokens
    tokens: list[int] = opened.read(np.array([0]), len(opened))[0].tolist()
    return tokens


EXPECTED = [
    *"\n".join(LINES).encode(),
    256,
    *[token for _ in range(2) for line in LINES for token in [*line.encode(), 256]],
]


@pytest.mark.parametrize("piece_bytes", [1, 50, 97, 10**6])
def test_pieces_of_any_size_hold_each_document_once(tmp_path: Path, piece_bytes: int) -> None:
    sources = write_sources(tmp_path / "in")
    pieces = cut_pieces(sources, piece_bytes)
    found: list[str] = [""]
    for piece in pieces:
        for each in read_piece(piece, "text", lambda what: pytest.fail(what())):
            found[-1] += each.text
            found += [""] if each.ends else []
    assert found == ["\n".join(LINES), *LINES, *LINES, ""]


@pytest.mark.parametrize("tokenizer", ["bytes", "char"])
def test_a_folder_has_all_documents_in_order(tmp_path: Path, tokenizer: str) -> None:
    write_sources(tmp_path / "in")
    told: list[int] = []
    manifest = prepare(options_for(tmp_path, tokenizer=tokenizer), told.append)
    assert len(manifest.shards) == len(told) > 5
    assert (manifest.documents, manifest.skipped) == (121, 0)
    tokens = all_tokens(tmp_path / "out")
    if tokenizer == "bytes":
        assert tokens == EXPECTED
    else:
        known = open_tokenizer(tmp_path / "out")
        assert isinstance(known, CharTokenizer)
        assert known.decode(tokens) == "\n".join(LINES) + 2 * "".join(LINES)
    assert not (tmp_path / "out" / ".progress").exists()
    with pytest.raises(DataError, match="holds tokens already"):
        prepare(options_for(tmp_path, tokenizer=tokenizer))
    assert prepare(options_for(tmp_path, tokenizer="bytes", may_replace=True)).tokenizer == "bytes"
    assert all_tokens(tmp_path / "out") == EXPECTED


def test_a_second_call_goes_on_where_the_first_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sources(tmp_path / "in")
    encode, made = module._encode_piece, []

    def failing(number: int, piece: Any, **others: Any) -> Any:
        made.append(number)
        if len(made) == 4:
            raise KeyboardInterrupt
        return encode(number, piece, **others)

    monkeypatch.setattr(module, "_encode_piece", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(options_for(tmp_path, workers=1))
    kept = len(list((tmp_path / "out").glob("tokens-*.bin")))
    assert kept >= 3
    with pytest.raises(DataError, match="was begun with other sources or options"):
        prepare(options_for(tmp_path, field="other", workers=1))
    made.clear()
    made += [-1] * 10
    manifest = prepare(options_for(tmp_path, workers=1))
    assert len(made) - 10 == len(manifest.shards) - kept
    assert all_tokens(tmp_path / "out") == EXPECTED


def test_the_corrected_command_goes_through_after_one_that_failed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = [json.dumps({"text" if number < 30 else "body": line}) for number, line in enumerate(LINES)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"line 31 cannot be used(.|\n)*its fields are 'body'"):
        prepare(options_for(tmp_path, workers=1))
    with pytest.raises(DataError, match="no tokenizer"):
        prepare(options_for(tmp_path, tokenizer=str(tmp_path), on_error="skip"))
    assert prepare(options_for(tmp_path, on_error="skip")).skipped == 30
    assert all_tokens(tmp_path / "out") == [token for line in LINES[:30] for token in [*line.encode(), 256]]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', r"a\.jsonl: line 2 cannot be used: its 'text' is no text"),
        (
            "a.jsonl",
            b'\n{"tex": "x", "id": 1}\n',
            r"a\.jsonl: line 2 cannot be used: it has no field 'text'; its fields are 'tex', 'id' \(--field\)",
        ),
        ("a.jsonl", b"[]\n", "line 1 cannot be used: it is a list, and a document an object"),
        ("a.jsonl", b"{broken\n", "line 1 cannot be used: .* at column 2"),
        ("a.txt", b"ok\ncaf\xe9 au lait\n", "is not UTF-8: .* at byte 6, in line 2\n"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1 cannot be used: .* surrogates not allowed"),
        ("b c.txt", b"caf\xe9", r"iconv -f LATIN1 -t UTF-8 '\S+/b c.txt' > '\S+/b c-utf8.txt'"),
        (
            "a.txt",
            "\ufefftext".encode("utf-16-le"),
            r"is not UTF-8 but UTF-16: .*\n.*\n.*iconv -f UTF-16 -t UTF-8 \S+a.txt",
        ),
        ("a.txt", "\ufefftext".encode("utf-32-be"), "is not UTF-8 but UTF-32"),
        ("a.txt", b"", "is empty"),
        ("a.parquet", b"PAR1 and no more", "cannot be read as parquet"),
    ],
)
def test_a_source_that_cannot_be_read_is_told_with_its_place(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        prepare(options_for(tmp_path))
    if name == "a.jsonl" and content.startswith(b'{"text"'):
        assert prepare(options_for(tmp_path, on_error="skip", may_replace=True)).skipped == 1


def test_the_command_prepares_and_inspects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    sources = write_sources(tmp_path / "in")
    out = str(tmp_path / "out")
    call = ["data", "prepare", str(sources[1]), "--tokenizer", "char", "--output", out]
    shown = CliRunner().invoke(app, call, catch_exceptions=False).output
    assert "tokens of 60 documents" in shown
    facts = json.loads(CliRunner().invoke(app, ["data", "inspect", out, "--verify", "--json"]).output)
    assert (facts["documents"], facts["tokenizer"]) == (60, "char")
    assert "whole, by size" in CliRunner().invoke(app, ["data", "inspect", out]).output
    check_shards(tmp_path / "out", read_manifest(tmp_path / "out"), "full")


def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    """Processes import the script that started them: without a guard, that would start them again."""
    write_sources(tmp_path / "in")
    script, told = tmp_path / "own.py", "one of 1 processes that encode text ended before its work"
    script.write_text(
        "from pathlib import Path\nfrom paceline.data.prepare import PrepareOptions, prepare\n"
        f"sources, output = (Path({str(tmp_path / 'in')!r}),), Path({str(tmp_path / 'out')!r})\n"
        "prepare(PrepareOptions(sources=sources, output=output, tokenizer='bytes'))\n"
    )
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=60)
    assert told in shown.stderr
    assert '__name__ == "__main__"' in shown.stderr


@pytest.mark.exhaustive
def test_processes_make_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ProcessPoolExecutor", ProcessPoolExecutor)
    write_sources(tmp_path / "in")
    prepare(options_for(tmp_path))
    assert all_tokens(tmp_path / "out") == EXPECTED


def test_what_was_never_prepared_is_told_apart_from_a_damaged_folder(tmp_path: Path) -> None:
    np.save(tmp_path / "raw.npy", np.arange(4, dtype=np.uint16))
    for path in (tmp_path, tmp_path / "raw.npy", tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"has no manifest\.json(.|\n)*set data\.path and data\.vocab_size"):
            read_manifest(path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json cannot be read(.|\n)*prepare the data again"):
        read_manifest(tmp_path)
