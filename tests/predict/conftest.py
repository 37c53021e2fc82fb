"""A table of measurements with a few rows, which tests change one cell at a time."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest

FIRST = """
id=gpt-1 source=here year=2024 model_family=GPT params_b=1.3 layers=24 hidden=2048 heads=16 kv_heads=16 ffn=8192
vocab=51200 seq_len=2048 global_batch=64 micro_batch=4 gpu=A100-80GB-SXM gpus_per_node=8 n_gpus=8 dp=8 tp=1 pp=1 vpp=1
zero_stage_or_fsdp=FSDP precision=bf16 activation_recompute=none compile=no interconnect=NVLink metric_name=step_time_s
value=1.0 note= cp=1 split=calib inferred=
"""
GPT = {name: value for name, _, value in (cell.partition("=") for cell in FIRST.split())}

MakeTable = Callable[..., Path]


@pytest.fixture
def make_table(tmp_path: Path) -> MakeTable:
    """Writes a table: each argument holds the cells in which a row differs from the first one."""

    def make(*rows: dict[str, str], header: list[str] | None = None) -> Path:
        columns = header or list(GPT)
        file = io.StringIO()
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for number, changes in enumerate(rows, 1):
            writer.writerow({**GPT, "id": f"gpt-{number}", **changes})
        path = tmp_path / "table.csv"
        path.write_text(file.getvalue())
        return path

    return make
