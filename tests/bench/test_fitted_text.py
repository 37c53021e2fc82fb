"""What ``bench/fit_constants.py`` writes is what ``predict/formulas`` reads."""

from __future__ import annotations

from dataclasses import replace

import yaml

from fitted_text import domain_in, domain_of, format_blocks, format_constants, format_domain
from paceline.plan.layout import Layout
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.constants import fitted_constants, kind_of, parse_blocks, read_constants

SHAPE = ModelShape(
    layers=24, width=2048, heads=16, kv_heads=16, mlp_width=8192, vocab_size=51200, mlp="gelu", tied=True
)
RUN = Running(global_batch=64, micro_batch=2, seq_len=2048, compute="bf16")
WORK = Workload(model=SHAPE, layout=Layout(strategy="fsdp").for_ranks(8), run=RUN)


def test_constants_are_written_and_read_back() -> None:
    sets = fitted_constants()
    assert ("ampere", "eager") in sets
    written, domain = format_constants(sets), format_domain(domain_in(sets))
    assert read_constants(yaml.safe_load(written), yaml.safe_load(domain)) == {
        key: replace(each, blocks={}) for key, each in sets.items()
    }


def test_the_shipped_blocks_are_written_and_read_back() -> None:
    known = {key: each.blocks for key, each in fitted_constants().items() if each.blocks}
    assert parse_blocks(format_blocks(known)) == known


def test_a_domain_is_written_and_read_back() -> None:
    key = ("ampere", "eager", kind_of(WORK))
    found = domain_of({key: [WORK, replace(WORK, run=replace(RUN, seq_len=4096, compute="fp16"))]})
    assert found[key].precisions == ("bf16", "fp16")
    assert found[key].sizes["length"] == (2048, 4096)
    one = {key[0]: {key[1]: {"rows": 2}}}
    assert domain_in(read_constants(one, yaml.safe_load(format_domain(found)))) == found
