"""Tables of measurements: what is read from each column, and what is said about odd ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.plan.layout import Layout
from paceline_bench.scored.measured_table import INPUTS, RowError, read_table
from paceline_bench.scored.published import PublishedRun, predict_case, read_case

MakeTable = Callable[..., Path]


def _sharing(layout: Layout) -> str:
    """What data-parallel ranks share; "none" where the gradients are sent when the backward is done."""
    return layout.strategy if layout.overlap else "none"


def test_a_row_becomes_a_workload_on_a_cluster(make_table: MakeTable) -> None:
    row = {"n_gpus": "16", "dp": "4", "tp": "2", "pp": "2", "vpp": "3", "compile": "yes", "precision": "fp8-rowwise"}
    table = read_table(
        make_table({**row, "interconnect": "NVLink + 4x100 Gb/s RoCE per node", "zero_stage_or_fsdp": "FSDP2"})
    )
    case = read_case(table.rows[0])
    layout, run = case.workload.layout, case.workload.run
    assert (layout.data, layout.tensor, layout.pipeline, layout.chunks, layout.strategy) == (4, 2, 2, 3, "fsdp")
    assert (run.compute, run.scaling, run.framework, run.fused_attention) == ("fp8", "row", "compiled", True)
    assert (case.cluster.nodes, case.cluster.node.devices) == (2, 8)
    assert case.cluster.between is not None
    assert case.cluster.between.bandwidth == 50e9
    assert case.workload.microbatches == 4


def test_a_pipeline_of_torch_has_as_many_microbatches_as_stages_where_a_table_states_none(
    make_table: MakeTable,
) -> None:
    row = {"n_gpus": "16", "dp": "4", "tp": "1", "pp": "4", "micro_batch": "(local batch 16)", "global_batch": "64"}
    table = read_table(make_table({**row, "zero_stage_or_fsdp": "FSDP2"}, {**row, "zero_stage_or_fsdp": "none"}))
    torch, megatron = (read_case(row) for row in table.rows)
    assert (torch.workload.micro_batch, torch.workload.microbatches, torch.chooses_micro_batch) == (4, 4, False)
    assert megatron.chooses_micro_batch


def test_results_are_kept_apart_from_inputs(make_table: MakeTable) -> None:
    table = read_table(make_table({"value": "3.5", "note": "fast"}))
    assert not {"value", "note"} & set(table.rows[0].text)
    assert table.measured == ("3.5",)


@pytest.mark.parametrize(
    ("billions", "gated", "tied"), [("1.313", False, True), ("1.418", False, False), ("1.716", True, True)]
)
def test_the_count_of_parameters_tells_gated_and_tied(
    make_table: MakeTable, billions: str, gated: bool, tied: bool
) -> None:
    model = read_case(read_table(make_table({"params_b": billions})).rows[0]).workload.model
    assert (model.gated, model.tied) == (gated, tied)


@pytest.mark.parametrize(
    ("cells", "framework", "sharding", "group"),
    [
        ({"zero_stage_or_fsdp": "none"}, "megatron", "none", 8),
        ({"zero_stage_or_fsdp": "DDP"}, "eager", "ddp", 8),
        ({"zero_stage_or_fsdp": "ZeRO-1 within 4 ranks (hybrid)"}, "eager", "zero1", 4),
        ({"zero_stage_or_fsdp": "distributed optimizer (ZeRO-1)"}, "megatron", "zero1", 8),
        ({"zero_stage_or_fsdp": "FSDP2", "compile": "yes"}, "compiled", "fsdp", 8),
    ],
)
def test_texts_name_the_framework_and_what_is_sharded(
    make_table: MakeTable, cells: dict[str, str], framework: str, sharding: str, group: int
) -> None:
    workload = read_case(read_table(make_table(cells)).rows[0]).workload
    assert (workload.run.framework, _sharing(workload.layout), workload.layout.shard_ranks) == (
        framework,
        sharding,
        group,
    )


@pytest.mark.parametrize(
    ("pp", "vpp", "chooses"), [("2", "n/a", True), ("2", "", True), ("2", "1", False), ("1", "n/a", False)]
)
def test_chunks_that_are_not_stated_are_chosen(make_table: MakeTable, pp: str, vpp: str, chooses: bool) -> None:
    dp = str(8 // int(pp))
    case = read_case(read_table(make_table({"dp": dp, "pp": pp, "vpp": vpp})).rows[0])
    assert (case.chooses_chunks, case.workload.layout.chunks) == (chooses, 1)


@pytest.mark.parametrize(
    ("cells", "is_fused"),
    [
        ({"zero_stage_or_fsdp": "none"}, False),
        ({"zero_stage_or_fsdp": "none", "gpu": "H100-80GB-SXM", "precision": "fp8"}, True),
        ({"zero_stage_or_fsdp": "none", "gpu": "B200"}, True),
        ({"zero_stage_or_fsdp": "FSDP2", "gpu": "B200"}, False),
    ],
)
def test_losses_of_megatron_are_fused_where_its_layers_are_young(
    make_table: MakeTable, cells: dict[str, str], is_fused: bool
) -> None:
    assert read_case(read_table(make_table(cells)).rows[0]).workload.run.fused_loss is is_fused


def test_models_without_printed_sizes_are_known_by_name(make_table: MakeTable) -> None:
    blank = dict.fromkeys(("params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")
    table = read_table(
        make_table(
            {**blank, "model_family": "Qwen3_30B_a3B"}, {**blank, "seq_len": "", "model_family": "ResNet-50 v1.5"}
        )
    )
    experts = read_case(table.rows[0]).workload.model
    assert (experts.experts, round(experts.active_matmul_params / 1e9)) == (128, 3)
    assert read_case(table.rows[1]).workload.model.is_sampled


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"n_gpus": "eight"}, "column n_gpus: 'eight' is not a number"),
        ({"n_gpus": ""}, "column n_gpus is empty"),
        ({"tp": "1.5"}, "column tp: 1.5 is not a whole number"),
        ({"seq_len": "-1"}, "column seq_len: -1 is not above 0"),
        ({"dp": "3"}, "columns dp, tp, pp, cp: 3 x 1 x 1 x 1 ranks are not n_gpus = 8"),
        ({"gpu": "Z9000"}, "columns gpu, n_gpus: no device is called 'Z9000'"),
        ({"precision": "int3"}, "column precision: 'int3' names none of"),
        ({"metric_name": "smiles"}, "column metric_name: 'smiles' is none of"),
        ({"heads": "15"}, "column heads: 15 heads do not divide hidden = 2048"),
        ({"layers": "", "model_family": "Unheard"}, "column layers is empty, and model_family 'Unheard' is none"),
        ({"gpus_per_node": "many"}, "column gpus_per_node: 'many' holds no number above 0"),
        ({"gpus_per_node": "0"}, "column gpus_per_node: 0 is not above 0"),
        ({"gpus_per_node": "-8"}, "column gpus_per_node: -8 is not above 0"),
        ({"gpus_per_node": ""}, "column gpus_per_node: '' holds no number above 0"),
        ({"activation_recompute": "banana"}, "column activation_recompute: 'banana' is none of full, selective"),
        ({"compile": "maybe"}, "column compile: 'maybe' is neither yes, no"),
        ({"zero_stage_or_fsdp": "zero9"}, "column zero_stage_or_fsdp: 'zero9' names stage 9"),
        ({"zero_stage_or_fsdp": "mostly"}, "column zero_stage_or_fsdp: 'mostly' names none of none, DDP, ZeRO-1"),
        ({"kv_heads": "100", "heads": "32"}, "column kv_heads: 100 do not divide heads = 32"),
        ({"kv_heads": "3"}, "column kv_heads: 3 do not divide heads = 16"),
        ({"vpp": "x"}, "column vpp: 'x' is not a number"),
        ({"vpp": "0"}, "column vpp: 0 is not above 0"),
        (
            {"micro_batch": "16"},
            "columns micro_batch, global_batch: 16 samples on each of 8 data ranks are more than 64",
        ),
        ({"micro_batch": "some"}, "column micro_batch: 'some' is not a number"),
        ({"micro_batch": "-2"}, "column micro_batch: -2 is not above 0"),
        ({"model_family": "ResNet-50 v1.5", "vocab": "many"}, "column vocab: 'many' is not a number"),
    ],
)
def test_an_odd_cell_is_named_by_its_column(make_table: MakeTable, cells: dict[str, str], told: str) -> None:
    with pytest.raises(RowError) as caught:
        read_case(read_table(make_table(cells)).rows[0])
    assert told in str(caught.value)


MIXED = (*INPUTS, "value", "ep", "dispatcher", "graphs")  # columns of a table of runs with experts


def _of_experts(make_table: MakeTable, **cells: str) -> PublishedRun:
    model = dict.fromkeys(("params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")
    model |= {"model_family": "Qwen3_30B_a3B", "zero_stage_or_fsdp": "distributed optimizer"}
    return read_case(read_table(make_table(model | cells, header=list(MIXED))).rows[0])


def test_a_table_may_state_how_experts_are_shared_and_run(make_table: MakeTable) -> None:
    plain = _of_experts(make_table)
    assert (plain.workload.layout.expert, plain.workload.run.graphs) == (8, "none")
    assert not plain.workload.run.sends_copies
    assert not plain.workload.run.hides_dispatch
    stated = _of_experts(make_table, ep="4", dispatcher="alltoall overlapped", graphs="layers")
    assert (stated.expert_ranks, stated.workload.layout.expert, stated.workload.run.graphs) == ((4,), 4, "layers")
    assert stated.workload.run.sends_copies
    assert stated.workload.run.hides_dispatch
    # Two tensor-parallel ranks hold different experts.
    assert _of_experts(make_table, ep="8", tp="2", dp="4").workload.layout.expert == 4


def test_what_a_table_does_not_say_of_experts_follows_from_device_and_pipeline(make_table: MakeTable) -> None:
    def graphs(gpu: str, **cells: str) -> str:
        return _of_experts(make_table, gpu=gpu, **cells).workload.run.graphs

    assert [graphs(name) for name in ("GB200", "GB300", "B300", "H100-80GB-SXM")] == [
        "layers",
        "layers",
        "none",
        "none",
    ]
    assert graphs("GB300", graphs="none") == "none"
    # Of 512 samples on 4 data ranks: 128 microbatches. The bubble is 1 / 128 of a step, or 1 / 512 with four chunks.
    pipelined = {"pp": "2", "dp": "4", "micro_batch": "1", "global_batch": "512"}
    hides = [
        _of_experts(make_table, **pipelined, vpp=chunks).workload.run.hides_dispatch for chunks in ("n/a", "1", "4")
    ]
    assert hides == [False, False, True]
    assert not _of_experts(make_table, **pipelined | {"global_batch": "64"}, vpp="4").workload.run.hides_dispatch
    assert not _of_experts(make_table, **pipelined, vpp="4", dispatcher="flex").workload.run.hides_dispatch
    dense = read_case(read_table(make_table({**pipelined, "vpp": "4", "gpu": "GB300"})).rows[0]).workload.run
    assert (dense.hides_dispatch, dense.graphs) == (False, "none")


def test_a_model_that_predicts_further_ahead_takes_a_layer_and_a_head_more(make_table: MakeTable) -> None:
    sizes = {"gpu": "GB300", "n_gpus": "256", "dp": "32", "pp": "8", "global_batch": "4096", "micro_batch": "1"}
    both, one = (_of_experts(make_table, model_family=name, **sizes) for name in ("DeepSeekV3", "DeepSeekV3 (w/o MTP)"))
    assert (both.workload.model.ahead, one.workload.model.ahead) == (1, 0)
    assert 1.02 < predict_case(both).step.compute / predict_case(one).step.compute < 1.5


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"ep": "3"}, "column ep: 3 ranks do not share 128 experts evenly, or not all 8"),
        ({"ep": "16"}, "column ep: 16 ranks do not share 128 experts evenly, or not all 8"),
        ({"dispatcher": "pigeon"}, "column dispatcher: 'pigeon' is none of flex, flex overlapped, alltoall, "),
        ({"graphs": "all"}, "column graphs: 'all' is none of none, layers, step"),
    ],
)
def test_an_odd_cell_of_experts_is_named_by_its_column(make_table: MakeTable, cells: dict[str, str], told: str) -> None:
    with pytest.raises(RowError) as caught:
        _of_experts(make_table, **cells)
    assert told in str(caught.value)


def test_expert_ranks_are_read_also_of_a_model_without_experts(make_table: MakeTable) -> None:
    with pytest.raises(RowError, match="column ep: "):
        read_case(read_table(make_table({"ep": "many"}, header=list(MIXED))).rows[0])


def test_of_a_remark_counts_what_is_known_in_it(make_table: MakeTable) -> None:
    remarks = {"compile": "per block, with graphs", "activation_recompute": "every second layer", "vpp": "interleaved"}
    case = read_case(read_table(make_table(remarks)).rows[0])
    assert (case.workload.run.framework, case.workload.recompute, case.workload.layout.chunks) == (
        "compiled",
        "none",
        1,
    )
    shared = read_case(read_table(make_table({"zero_stage_or_fsdp": "HSDP"})).rows[0]).workload
    assert (shared.layout.strategy, shared.run.framework) == ("fsdp", "eager")
    odd = read_case(read_table(make_table({"zero_stage_or_fsdp": "as the paper has it"})).rows[0]).workload
    assert _sharing(odd.layout) == "none"


@pytest.mark.parametrize(
    ("cells", "micro_batch", "chooses"),
    [
        ({"micro_batch": "(local batch 32; PP microbatch not stated)"}, 1, True),
        ({"micro_batch": ""}, 1, True),
        ({"micro_batch": "16", "global_batch": ""}, 16, False),
        ({"micro_batch": "8"}, 8, False),
    ],
)
def test_a_microbatch_may_be_a_number_or_a_remark(
    make_table: MakeTable, cells: dict[str, str], micro_batch: int, chooses: bool
) -> None:
    case = read_case(read_table(make_table(cells)).rows[0])
    assert (case.workload.run.micro_batch, case.chooses_micro_batch) == (micro_batch, chooses)


@pytest.mark.parametrize(
    ("cells", "recompute", "framework", "sharding"),
    [
        ({"activation_recompute": "full (activation checkpointing)"}, "full", "eager", "fsdp"),
        ({"activation_recompute": "selective(op)", "compile": "torch.compile"}, "selective", "compiled", "fsdp"),
        ({"activation_recompute": "none", "compile": "nvFuser"}, "none", "eager", "fsdp"),
        ({"activation_recompute": "any", "compile": "false"}, "none", "eager", "fsdp"),
        ({"activation_recompute": "not stated", "zero_stage_or_fsdp": ""}, "none", "megatron", "none"),
        ({"zero_stage_or_fsdp": "zero2"}, "none", "eager", "zero2"),
        ({"zero_stage_or_fsdp": "ZeRO stage 3"}, "none", "eager", "fsdp"),
        ({"zero_stage_or_fsdp": "ZeRO-1 over all DP"}, "none", "eager", "zero1"),
        ({"zero_stage_or_fsdp": "Megatron-FSDP 64", "compile": "n/a"}, "none", "megatron", "fsdp"),
    ],
)
def test_texts_that_are_known_may_say_more(
    make_table: MakeTable, cells: dict[str, str], recompute: str, framework: str, sharding: str
) -> None:
    workload = read_case(read_table(make_table(cells)).rows[0]).workload
    assert (workload.recompute, workload.run.framework, _sharing(workload.layout)) == (recompute, framework, sharding)


def test_chunks_that_a_remark_tells_of_are_chosen(make_table: MakeTable) -> None:
    cells = {"dp": "4", "pp": "2", "vpp": "interleaved where pp>1 (factor not stated)"}
    case = read_case(read_table(make_table(cells)).rows[0])
    assert (case.chooses_chunks, case.workload.layout.chunks) == (True, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("id;value;gpu\na;1;A100\n", "separated by ;, not by commas"),
        ("id\tvalue\na\t1\n", "separated by tabs, not by commas"),
        ("id,value,vpp,vpp\na,1,1,2\n", "the header has vpp more than once"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_table(path)


def test_a_header_without_rows_is_refused(make_table: MakeTable) -> None:
    with pytest.raises(UsageError, match="has a header and no rows"):
        read_table(make_table())


def test_a_table_without_its_columns_is_refused(make_table: MakeTable, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the header lacks model_family, params_b"):
        read_table(make_table({}, header=["id", "value"]))
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(UsageError, match=r"cannot be read: .* it is a device, and not a file"):
        read_table(Path("/dev/zero"))
    path = make_table({}, {})
    path.write_text(path.read_text() + "gpt-3,here\n")
    with pytest.raises(UsageError, match="line 4: 2 cells under 32 columns"):
        read_table(path)
    with pytest.raises(UsageError, match="line 3, column id: gpt-1 is on line 2 already"):
        read_table(make_table({}, {"id": "gpt-1"}))


def test_a_split_that_is_not_there_is_refused_with_those_that_are(make_table: MakeTable) -> None:
    table = read_table(make_table({"split": "calib"}, {"split": "dev"}))
    assert [row.id for row in table.of_split("dev").rows] == ["gpt-2"]
    with pytest.raises(UsageError, match="splits of this file: calib, dev"):
        table.of_split("blind")


def test_of_an_encoders_sequence_the_filled_part_is_computed(make_table: MakeTable) -> None:
    bert = {"model_family": "BERT-Large", "seq_len": "512", "zero_stage_or_fsdp": "DDP"}
    table = read_table(make_table(bert, {**bert, "seq_len": "128"}, {**bert, "zero_stage_or_fsdp": "none"}))
    lengths = [read_case(row).workload.run.seq_len for row in table.rows]
    assert lengths[0] < 512 * 0.6
    assert 128 * 0.8 < lengths[1] < 128
    assert lengths[2] == 512
