"""Kept figures of the formulas: published runs with all their parts, and steps of the engines here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from kept_figures import assert_kept, through_json, told

from paceline.cluster.devices import load_cluster
from paceline.plan.layout import Layout, Offload
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.block import BlockModel
from paceline.predict.formulas.constants import constants_for, fitted_constants, outside_of, shape_of
from paceline.predict.formulas.engine_costs import part_params, price, zero_bubble_share
from paceline.predict.formulas.saving import best_interval, lost_share, time_between_failures
from paceline.predict.formulas.step import Prediction, expected_most, model_flops, predict, slowest_device
from paceline_bench.scored.measured_table import INPUTS, Row, RowError, Table, read_shipped
from paceline_bench.scored.published import in_metric, known_model, predict_case, read_case
from paceline_bench.scored.validation import rows_csv, to_json, validate

GPT = ModelShape(layers=24, width=2048, heads=16, kv_heads=8, mlp_width=5504, vocab_size=51200, tied=True)
WIDE = ModelShape(layers=5, width=8192, heads=64, kv_heads=64, mlp_width=32768, vocab_size=50257, mlp="gelu")
EXPERTS = replace(GPT, layers=12, experts=16, active=2, tied=False)
ENCODER = replace(GPT, mlp="gelu", causal=False, layers=12)
IMAGES = known_model("ResNet-50")
CLUSTERS = ("16x a100-sxm-80gb", "4x dgx-h100", "2x dgx-1", "8x l40s", "2x dgx-b200", "8x cpu-host")
_TOLD_OF_ROW = ("model_family", "gpu", "zero_stage_or_fsdp", "precision", "activation_recompute", "metric_name")


def figures() -> dict[str, object]:
    return {
        **dict(_of_rows()),
        **dict(_of_odd_rows()),
        **dict(_of_engines()),
        **dict(_of_frameworks()),
        **dict(_of_parts()),
    }


def test_formulas_give_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def _of_rows() -> Iterator[tuple[str, object]]:
    """Every published row in its metric, the scores; one row of each kind with all its parts."""
    table = read_shipped()
    found = validate(table)
    yield "scores", through_json(to_json(replace(found, rows=())))
    yield "rows", {each.row.id: [each.predicted, each.flops, each.fits] for each in found.rows}
    kinds: dict[tuple[str, ...], Row] = {}
    for row in table.rows:
        kinds.setdefault((row.family, *(row.text[name] for name in _TOLD_OF_ROW[1:])), row)
    for row in kinds.values():
        yield f"row {row.id}", told(lambda row=row: _row_parts(row))
    some = [place for place, row in enumerate(table.rows) if row.family in ("internevo", "titan", "dle", "kempner")]
    fewer = Table(table.source, *(tuple(side[place] for place in some) for side in (table.rows, table.measured)))
    yield "dev rows", through_json(to_json(replace(validate(fewer, "dev"), rows=())))
    each = table.rows[::37]
    small = Table(table.source, each, tuple("OOM" if n % 3 == 1 else "7.5" for n in range(len(each))))
    yield "some rows", {"csv": rows_csv(validate(small)), "scores": through_json(to_json(validate(small)))}


ODD_CELLS: list[dict[str, str]] = [
    *({"params_b": "", "model_family": name} for name in ("Llama 9", "a Qwen", "own")),
    *({column: ""} for column in ("heads", "kv_heads", "ffn", "vocab", "layers", "global_batch", "micro_batch", "vpp")),
    *({"gpus_per_node": text} for text in ("4 per tray / 72 per NVLink domain", "8", "none", "16", "17")),
    *(
        {"n_gpus": "32", "dp": "32", "interconnect": text}
        for text in ("8x200 Gb/s RoCE per node", "400 Gb/s RDMA per GPU")
    ),
    *({"n_gpus": "32", "dp": "32", "interconnect": text} for text in ("reference 100 Gb/s", "100 Gb/s", "fast")),
    *(
        {"zero_stage_or_fsdp": text}
        for text in ("none", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO stage 4", "HSDP", "FSDP2")
    ),
    *(
        {"zero_stage_or_fsdp": text}
        for text in ("ZeRO-1 within 4 ranks", "distributed optimizer", "Megatron-LM", "zero", "magic")
    ),
    *(
        {"precision": text}
        for text in ("fp32", "tf32", "amp_fp16", "pure bf16", "fp8-rowwise", "mxfp8", "nvfp4", "int3")
    ),
    *(
        {"activation_recompute": text}
        for text in ("selective", "selective attention", "full, sequence parallel", "not stated", "odd")
    ),
    *({"compile": text} for text in ("yes", "no", "eager", "inductor", "odd", "some remark")),
    *({"micro_batch": text} for text in ("4096 tokens", "(2)", "not stated", "64", "1")),
    *({"tp": "2", "pp": "2", "dp": "2", "vpp": text} for text in ("1", "3", "interleaved", "some remark", "n/a")),
    *({"dp": "", "tp": tensor, "cp": context} for tensor, context in (("2", "1"), ("1", "4"), ("3", "1"))),
    *({"model_family": name, "seq_len": "512"} for name in ("BERT-large", "Mixtral 8x7B", "ResNet-50", "GNMT v2")),
    *(
        {"hidden": "2050"},
        {"heads": "16", "kv_heads": "5"},
        {"metric_name": "odd"},
        {"gpu": "Z9"},
        {"layers": "2.5"},
        {"dp": "3"},
    ),
    *({"metric_name": name} for name in ("mem_gib", "mfu_pct", "tflops_per_gpu", "seq_per_s", "step_time_s")),
    *({"metric_name": "tflops_per_gpu", "activation_recompute": text} for text in ("full", "selective", "none")),
]


def _of_odd_rows() -> Iterator[tuple[str, object]]:
    """A row with one cell or two changed: what is read of it."""
    usual = dict.fromkeys(INPUTS, "") | {"vocab": "51200", "seq_len": "2048", "global_batch": "64", "micro_batch": "4"}
    usual |= {"id": "gpt-1", "model_family": "GPT", "params_b": "1.3", "layers": "24", "hidden": "2048", "heads": "16"}
    usual |= {"kv_heads": "16", "ffn": "8192", "gpu": "A100-80GB-SXM", "gpus_per_node": "8", "n_gpus": "8", "dp": "8"}
    usual |= {"tp": "1", "pp": "1", "vpp": "1", "cp": "1", "zero_stage_or_fsdp": "FSDP", "precision": "bf16"}
    usual |= {"activation_recompute": "none", "compile": "no", "interconnect": "NVLink", "metric_name": "step_time_s"}
    for cells in ODD_CELLS:
        found: Any = _row_parts(Row(2, {**usual, **cells}))
        yield f"cells {cells}", found if isinstance(found, str) else [found[0], found[1]["said"], found[1]["fits"]]


def _row_parts(row: Row) -> object:
    try:
        case = read_case(row)
    except RowError as error:
        return str(error)
    found = predict_case(case)
    return [in_metric(case, found), _prediction(found)]


def _prediction(found: Prediction) -> dict[str, object]:
    names = ("seconds", "samples_per_s", "tokens_per_s", "communication", "fits", "fitted", "band", "unit", "outside")
    parts = {name: getattr(found, name) for name in names}
    return {**parts, "step": found.step, "memory": found.memory, "said": str(found)}


def _of_engines() -> Iterator[tuple[str, object]]:
    """Steps of the engines here: strategies, models, schedules, offload and tuning on devices of all kinds."""
    strategies: list[tuple[str, dict[str, Any]]] = [
        ("ddp", {"bucket_mb": 100}),
        ("zero1", {}),
        ("zero2", {"accumulate": 4}),
        ("fsdp", {"accumulate": 3}),
        ("fsdp", {"reshard_after_forward": False, "accumulate": 2}),
        ("hybrid", {"shard_ranks": 4, "accumulate": 2}),
        ("ddp", {"pipeline": 4, "accumulate": 8, "schedule": "zb-h1"}),
        ("ddp", {"pipeline": 2, "accumulate": 8, "schedule": "zb-v", "chunks": 2, "tensor": 2}),
        ("fsdp", {"pipeline": 2, "accumulate": 4, "schedule": "interleaved", "chunks": 2}),
        ("zero2", {"tensor": 4, "sequence_parallel": True, "accumulate": 2}),
        ("zero1", {"offload": Offload.of(["optimizer"]), "accumulate": 6}),
        ("zero2", {"offload": Offload.of(["optimizer"]), "accumulate": 5}),
        ("zero2", {"offload": Offload.of(["gradients"]), "accumulate": 3}),
        ("fsdp", {"offload": Offload.of(["optimizer", "parameters"]), "accumulate": 7}),
        ("fsdp", {"offload": Offload.of(["gradients"]), "accumulate": 2}),
        ("hybrid", {"shard_ranks": 2, "offload": Offload.of(["optimizer"]), "accumulate": 2}),
    ]
    models = {"gpt": GPT, "wide": WIDE, "images": IMAGES}
    again = ("none", "full", "matmuls")
    for place, ((strategy, options), (name, model)) in enumerate(product(strategies, models.items())):
        assert model is not None
        if model.is_sampled and (options.get("pipeline", 1) > 1 or options.get("tensor", 1) > 1):
            continue
        cluster = load_cluster(CLUSTERS[place % len(CLUSTERS)])
        compute: Any = "bf16" if place % 4 else "fp32"
        layout = Layout(
            strategy=strategy,
            microbatch=1 + place % 3,
            checkpoint_activations=again[place % 5 % 3],
            precision=compute,
            **options,
        )
        run = Running(seq_len=1024, compute=compute, framework="compiled" if place % 3 == 0 else "eager")
        workload = Workload(model=model, layout=layout.for_ranks(cluster.devices), run=run)
        told_of = f"{place} {strategy} {name} {cluster.name} {compute} {layout.checkpoint_activations}"
        found = told(lambda workload=workload, cluster=cluster: price(workload, cluster))
        yield told_of, [_prediction(found), found.mfu] if isinstance(found, Prediction) else found
        yield f"{told_of} part", part_params(workload)


def _of_frameworks() -> Iterator[tuple[str, object]]:
    """Steps as the frameworks of published runs take them: fusing, experts, context, eight bits, encoders."""
    cases: list[tuple[ModelShape, dict[str, Any], dict[str, Any]]] = [
        (GPT, {"strategy": "ddp", "overlap": False}, {"framework": "megatron", "compute": "bf16"}),
        (GPT, {"strategy": "ddp", "overlap": False}, {"framework": "megatron", "compute": "fp16"}),
        (GPT, {"strategy": "zero1", "tensor": 2, "sequence_parallel": True}, {"framework": "megatron"}),
        (GPT, {"strategy": "zero1", "tensor": 4}, {"framework": "megatron", "overlaps_tensor": True}),
        (GPT, {"strategy": "fsdp", "tensor": 2}, {"framework": "compiled", "split_loss": True}),
        (GPT, {"strategy": "fsdp", "tensor": 2}, {"framework": "compiled", "fp8_gather": True, "compute": "fp8"}),
        (GPT, {"strategy": "fsdp"}, {"compute": "fp8", "scaling": "row", "framework": "compiled"}),
        (GPT, {"strategy": "fsdp"}, {"compute": "fp4", "scaling": "block", "framework": "megatron"}),
        (GPT, {"strategy": "fsdp", "checkpoint_activations": "full"}, {"pure": True}),
        (GPT, {"strategy": "fsdp", "checkpoint_activations": "matmuls"}, {"is_flat": True}),
        (GPT, {"strategy": "fsdp"}, {"is_flat": True, "autocast": True, "fused_loss": True}),
        (WIDE, {"strategy": "ddp", "checkpoint_activations": "full"}, {"framework": "megatron"}),
        (WIDE, {"checkpoint_activations": "matmuls"}, {"framework": "megatron", "recomputes_attention": True}),
        (WIDE, {"strategy": "zero2", "pipeline": 4, "chunks": 1}, {"framework": "megatron", "global_batch": 64}),
        (GPT, {"pipeline": 4, "chunks": 3}, {"framework": "megatron", "global_batch": 96, "compute": "bf16"}),
        (GPT, {"pipeline": 2, "chunks": 1}, {"framework": "eager", "global_batch": 96, "fused_attention": False}),
        (GPT, {"tensor": 4}, {"framework": "megatron", "compute": "fp16", "fused_attention": False}),
        (GPT, {"context_ranks": 4}, {"framework": "megatron", "seq_len": 65536}),
        (GPT, {"context_ranks": 2, "tensor": 2, "strategy": "fsdp"}, {"seq_len": 16384}),
        (EXPERTS, {"expert": 8, "strategy": "zero1"}, {"framework": "megatron"}),
        (EXPERTS, {"expert": 4, "tensor": 2, "strategy": "fsdp"}, {}),
        (EXPERTS, {"expert": 16}, {"framework": "compiled"}),
        (replace(EXPERTS, total_params=9e9, score_dim=96), {"strategy": "fsdp"}, {"framework": "megatron"}),
        (ENCODER, {"strategy": "ddp"}, {"seq_len": 512, "fused_attention": False, "compute": "fp32"}),
        (ENCODER, {"strategy": "zero2", "checkpoint_activations": "full"}, {"seq_len": 512, "compute": "tf32"}),
    ]
    for kind in ("convolution", "planar", "depthwise", "recurrent", "attention"):
        assert IMAGES is not None
        model = replace(IMAGES, kind=kind, samples_each=2.5)
        cases += [(model, {}, {"compute": compute, "seq_len": 1}) for compute in ("fp16", "fp32")]
    clusters = ("2x dgx-a100", "4x dgx-h100", "2x dgx-b200", "16x v100-sxm-32gb")
    for place, (model, options, running) in enumerate(cases):
        cluster = load_cluster(clusters[place % len(clusters)])
        run = Running(**{"seq_len": 2048, "compute": "bf16", "micro_batch": 1 + place % 3, **running})
        layout = Layout(**{"strategy": "ddp", **options}).for_ranks(cluster.devices)
        workload = Workload(model=model, layout=layout, run=run)
        found = predict(workload, cluster)
        yield f"{place} {model.kind} {cluster.name} {options} {running}", [_prediction(found), model_flops(workload)]
        if not model.is_sampled:
            constants, is_fitted = constants_for(fitted_constants(), cluster.device.generation, run.framework)
            costs = BlockModel(workload, cluster, constants).costs()
            parts = (costs.forward, costs.backward, costs.embed, costs.head_forward, costs.head_backward)
            shape = shape_of(workload)
            yield f"{place} block", [parts, is_fitted, shape, outside_of(workload, cluster, fitted_constants())]


def _of_parts() -> Iterator[tuple[str, object]]:
    yield "bubbles", [zero_bubble_share(each) for each in ("none", "selective", "attention", "full")]
    yield "deviates", [expected_most(count) for count in (1, 2, 8, 9, 1024)]
    for name in ("h100-sxm", "cpu-host"):
        device = load_cluster(f"1x {name}").device
        yield f"slowest {name}", [slowest_device(device, count).factor for count in (1, 8, 9, 64, 4096)]
    yield (
        "saving",
        [
            time_between_failures(5e7, 16),
            best_interval(30.0, 3e6),
            lost_share(600.0, save_s=20.0, failure_s=1e5, restart_s=300.0),
            lost_share(600.0, save_s=20.0, failure_s=1e5),
            lost_share(1.0, save_s=20.0, failure_s=1e5),
        ],
    )
    sets = fitted_constants()
    for generation, framework in product(
        ("volta", "ampere", "ada", "hopper", "blackwell", "cpu"), ("eager", "megatron")
    ):
        constants, is_fitted = constants_for(sets, generation, framework)
        yield f"constants {generation} {framework}", [is_fitted, replace(constants, blocks={})]
