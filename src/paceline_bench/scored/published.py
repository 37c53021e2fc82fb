"""Predicts published measurements: turns a row of a table into a workload and a cluster, and predicts its metric.

A row that cannot be predicted says why, naming its line and column; the others are not affected.

Texts are read by these rules, the same for every table: a framework is *compiled* where the row says so (not where
functions alone are scripted), *eager* under DDP, FSDP or ZeRO, else *megatron*; attention is fused but for fp16 under
megatron and for Volta, whose code is older; Megatron's loss is fused with eight-bit layers and on Blackwell; a
recompute that is "not stated" is none, but for the question whether a run fits; a microbatch or a number of chunks
that is not stated and the ranks that share a layer's experts are chosen by prediction. Tables may have three columns
more, of runs with experts: ``ep``, the ranks that hold different experts of a layer; ``dispatcher``, ``flex`` where a
row goes to each place once, ``alltoall`` where it goes to each expert, ``overlapped`` where another microbatch computes
meanwhile; ``graphs``, what the host launches as CUDA graphs. Where they are not stated, rows go by ``flex``, overlapped
in a pipeline of more chunks than its bubble asks for, and hosts of GB200 and GB300 have graphs of ``layers``. A word
that none of this knows is refused; of a sentence, what is known in it counts. Models that tables name without printing
their sizes have their shapes in known_models.yaml.

Predictions are made in seconds, and the rest is derived. ``tflops_per_gpu`` counts the recomputed forward where
everything is recomputed (Megatron's formula of 2021) and model FLOPs else; ``mfu_pct`` counts model FLOPs; both count
attention in full, as their sources do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, TypeVar, get_args

from paceline.bounded_yaml import load_yaml
from paceline.cluster.devices import Catalog, Cluster
from paceline.errors import UsageError
from paceline.plan.layout import Layout, Strategy
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import Compute, Framework, Graphs, Running, Workload
from paceline.predict.formulas.constants import ConstantSets
from paceline.predict.formulas.step import Prediction, model_flops, predict
from paceline.predict.memory.memory import footprint
from paceline.units import GIB
from paceline_bench.scored.measured_table import NOT_STATED, Row, RowError

METRICS = ("img_per_s", "mem_gib", "mfu_pct", "seq_per_s", "step_time_s", "tflops_per_gpu", "tokens_per_s_per_gpu")
# Lengths of an encoder's texts fall off as exp(-length / this), cut at the sequence's length. Of 512 tokens 289 are
# left: counted in full, V100s would have done 21 TFLOP/s in fp32, which end at 15.7 (split calib).
_DOCUMENT_TOKENS = 400

# From which year on containers of Megatron have cuDNN 9.5 and later, whose attention on Hopper is that of today.
_CUDNN_YEAR = 2025

# Of a step: where a pipeline's bubble is smaller, fewer chunks would have done for it.
_SMALL_BUBBLE = 0.005
_DISPATCHERS = ("flex", "flex overlapped", "alltoall", "alltoall overlapped")
WordT = TypeVar("WordT", bound=str)
_COUNTS = ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "n_gpus", "dp", "tp", "pp", "cp"]
_NO_RECOMPUTE = re.compile(r"(none|no|any|n/a|not stated)\b")
_NOT_COMPILED = re.compile(r"(no|none|false|n/a|not stated|eager)\b")
_COMPILED = re.compile(r"(yes|true|compiled?|torch\.?compile|inductor|xla|dynamo)\b")
_SCRIPTED = re.compile(r"(nvfuser|jit|torchscript)\b")  # which fuse chains of a few functions: the rest runs eagerly
_NOT_SHARDED = re.compile(r"(none|no|ddp|n/a|not stated)\b")
_STAGE = re.compile(r"zero(?:[-_ ]?(?:stage[-_ ]?)?(\d+)|\b)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """What a row is predicted from. ``chooses_...``: the row does not state it, and prediction chooses."""

    workload: Workload
    cluster: Cluster
    metric: str
    chooses_micro_batch: bool = False
    chooses_chunks: bool = False
    chooses_recompute: bool = False
    expert_ranks: tuple[int, ...] = (1,)


def read_case(row: Row) -> PublishedRun:
    """Turns a row into a workload and a cluster. Raises RowError, naming the column, where that cannot be."""
    if row.metric not in METRICS:
        raise RowError(f"column metric_name: {row.metric!r} is none of {', '.join(METRICS)}")
    for column in ("params_b", "global_batch"):  # also where this row's model does not need it
        row.number(column)
    for column in (*_COUNTS, "ep"):
        row.whole(column, 0)
    model, cluster = _model(row), _cluster(row)
    layout, framework = _layout(row, cluster, model), _framework(row)
    micro_batch = _micro_batch(row, model, layout)
    if (
        micro_batch is None
        and layout.pipeline > 1
        and framework != "megatron"
        and (batch := row.number("global_batch"))
    ):
        # torch's pipelines cut a batch into as many microbatches as there are stages (torchtitan's default).
        micro_batch = max(1.0, batch / layout.data // layout.pipeline)
    compute, generation = _compute(row), cluster.device.generation
    has_fused_attention = not (
        generation in ("volta", "turing") or (framework == "megatron" and compute == "fp16") or _is_encoder(row)
    )
    length = row.whole("seq_len", 1 if model.is_sampled else None)
    if _is_encoder(row) and framework != "megatron":  # whose loaders put sentences of like lengths into a batch
        length = round(_DOCUMENT_TOKENS * (1 - math.exp(-length / _DOCUMENT_TOKENS)))
    sharing, precision = row.text["zero_stage_or_fsdp"].lower(), row.text["precision"].lower()
    is_plain = layout.strategy == "ddp" and layout.overlap
    hides = bool(model.experts) and _has_many_chunks(row, layout, micro_batch)
    dispatcher = _word(row, "dispatcher", _DISPATCHERS, _DISPATCHERS[hides])
    is_graphed = model.experts and cluster.device.name.startswith("gb")  # whose hosts, Grace, launch slowly
    graphs = _word(row, "graphs", get_args(Graphs), "layers" if is_graphed else "none")
    run = Running(
        global_batch=row.number("global_batch") or (micro_batch or 1) * layout.data,
        micro_batch=micro_batch or 1,
        seq_len=length,
        compute=compute,
        recomputes_attention="attention" in row.text["activation_recompute"].lower(),
        framework=framework,
        fused_attention=has_fused_attention,
        pure="pure" in precision,
        autocast="amp" in precision,
        fused_loss=framework == "megatron" and (compute in ("fp8", "fp4") or generation == "blackwell"),
        scaling="row" if "rowwise" in precision else "block" if "mxfp8" in precision or "fp4" in precision else "",
        fp8_gather="fp8" in sharing,
        is_flat=not is_plain and "fsdp2" not in sharing,
        keeps_gradients="fsdp2" in sharing,
        overlaps_tensor=framework == "megatron" and layout.overlap,
        attends_as_today=framework == "megatron" and row.whole("year", 0) >= _CUDNN_YEAR,
        sends_copies=dispatcher.startswith("alltoall"),
        hides_dispatch="overlapped" in dispatcher,
        graphs=graphs,
    )
    return PublishedRun(
        workload=Workload(model=model, layout=layout, run=run),
        cluster=cluster,
        metric=row.metric,
        chooses_micro_batch=micro_batch is None,
        chooses_chunks=layout.pipeline > 1 and _chunks(row) is None,
        chooses_recompute=row.text["activation_recompute"].lower() in ("", "not stated"),
        expert_ranks=_expert_degrees(row, model, cluster, layout.data * layout.context_ranks, layout.tensor),
    )


def _has_many_chunks(row: Row, layout: Layout, micro_batch: float | None) -> bool:
    """Whether a pipeline has more chunks than its bubble asks for: they let an all-to-all run behind another chunk."""
    batch = row.number("global_batch")
    if layout.chunks == 1 or not micro_batch or not batch:
        return False
    return (layout.pipeline - 1) * micro_batch * layout.data / batch / layout.chunks < _SMALL_BUBBLE


def _is_encoder(row: Row) -> bool:
    return "bert" in row.text["model_family"].lower()


def _model(row: Row) -> ModelShape:
    name = row.text["model_family"]
    known = known_model(name)
    if known is not None and known.is_sampled:
        return known
    if row.number("layers") is None or row.number("hidden") is None:
        if known is not None:
            return known
        raise RowError(
            f"column {'layers' if row.number('layers') is None else 'hidden'} is empty, and model_family {name!r} is "
            "none whose shape is known"
        )
    hidden = row.whole("hidden")
    heads = row.whole("heads", 0) or max(1, hidden // 128)
    kv_heads = row.whole("kv_heads", heads)
    if hidden % heads:
        raise RowError(f"column heads: {heads} heads do not divide hidden = {hidden}")
    if heads % kv_heads:
        raise RowError(f"column kv_heads: {kv_heads} do not divide heads = {heads}")
    shape = ModelShape(
        layers=row.whole("layers"),
        width=hidden,
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=row.whole("ffn", 4 * hidden),
        vocab_size=row.whole("vocab", 51200),
        causal=not _is_encoder(row),
    )
    # Whether the MLP is gated and the head tied is what comes nearest to the count of parameters.
    billions = row.number("params_b")
    if billions is None:
        gated = any(word in name.lower() for word in ("llama", "qwen", "mistral", "internlm", "nemotron"))
        return replace(shape, mlp="swiglu" if gated else "gelu", tied=not gated)
    choices = [replace(shape, mlp=mlp, tied=tied) for mlp in ("gelu", "swiglu") for tied in (True, False)]
    return min(choices, key=lambda each: abs(each.params - billions * 1e9))


def _cluster(row: Row) -> Cluster:
    devices = row.whole("n_gpus")
    text = row.text["gpus_per_node"]  # a number, or a text such as "4 per tray / 72 per NVLink domain"
    if re.search(r"[a-z]", text.lower()):
        node_devices = max((int(each) for each in re.findall(r"\d+", text)), default=0)
    else:
        node_devices = row.whole("gpus_per_node", 0)
    if not node_devices:
        raise RowError(f"column gpus_per_node: {text!r} holds no number above 0")
    if node_devices > 16:  # a tray of a larger NVLink domain: racks hold 72, of which jobs use 64
        node_devices = 64
    try:
        cluster = Catalog().of_devices(row.text["gpu"], devices, node_devices=node_devices)
    except UsageError as error:
        raise RowError(f"columns gpu, n_gpus: {str(error).splitlines()[0]}") from None
    # The network's rate is in a text such as "8x200 Gb/s per node" or "400 Gb/s RDMA per GPU".
    network = row.text["interconnect"]
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+)\s*Gb/s", network)
    if cluster.between is None or cluster.nodes == 1 or found is None or "reference" in network:
        return cluster
    rate = int(found[2]) * int(found[1] or 1) * 1e9 / 8 * (node_devices if "per GPU" in network else 1)
    kind = "roce" if "roce" in network.lower() else cluster.between.kind
    return replace(cluster, between=replace(cluster.between, bandwidth=rate, kind=kind))


def _layout(row: Row, cluster: Cluster, model: ModelShape) -> Layout:
    tensor, pipeline, context = row.whole("tp", 1), row.whole("pp", 1), row.whole("cp", 1)
    devices = cluster.devices
    data = row.whole("dp", max(1, devices // (tensor * pipeline * context)))
    if data * tensor * pipeline * context != devices:
        ranks = f"{data} x {tensor} x {pipeline} x {context} ranks"
        raise RowError(f"columns dp, tp, pp, cp: {ranks} are not n_gpus = {devices}")
    strategy, group, overlap = _sharing(row, data)
    framework, chunks = _framework(row), _chunks(row) or 1
    is_cut = "sequence" in row.text["activation_recompute"].lower() or framework == "compiled"
    return Layout(
        strategy=strategy,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        context_ranks=context,
        expert=_expert_degrees(row, model, cluster, data * context, tensor)[0],
        shard_ranks=min(group, data * context) if group else data * context,
        overlap=overlap,
        sequence_parallel=tensor > 1 and (is_cut or (framework == "megatron" and overlap)),
        checkpoint_activations=_checkpoint(row),
    )


def _expert_degrees(row: Row, model: ModelShape, cluster: Cluster, ranks: int, tensor: int) -> tuple[int, ...]:
    """What the row states; else as many ranks as can share a layer's experts on a node, and twice, four times ...

    Of tensor-parallel ranks that hold different experts, each of these counts for one.
    """
    if not model.experts:
        return (1,)
    if stated := row.whole("ep", 0):
        own = max(1, stated // tensor)
        if ranks % own or model.experts % own:
            raise RowError(f"column ep: {stated} ranks do not share {model.experts} experts evenly, or not all {ranks}")
        return (own,)
    near = min(ranks, max(1, cluster.node.devices // tensor))
    found = [max(size for size in range(1, min(near, 64) + 1) if near % size == 0 and model.experts % size == 0)]
    while 2 * found[-1] <= min(ranks, 64) and ranks % (2 * found[-1]) == 0 and model.experts % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return tuple(found)


def _chunks(row: Row) -> int | None:
    text = row.text["vpp"].lower()
    is_remark = text not in NOT_STATED and (not _is_word(text) or text.startswith("interleave"))
    return None if is_remark else row.whole("vpp", 0) or None


def _sharing(row: Row, data: int) -> tuple[Strategy, int, bool]:
    """Returns the strategy, the ranks that share states (0: all), and whether gradients go beside the backward."""
    text = row.text["zero_stage_or_fsdp"]
    low = text.lower()
    stage = _STAGE.search(low)
    number = 0 if stage is None else int(stage[1] or 1)
    if number > 3:
        raise RowError(f"column zero_stage_or_fsdp: {text!r} names stage {number}, and stages of ZeRO are 0 to 3")
    within = re.search(r"within (\d+) ranks", low)
    group = min(int(within[1]), data) if within else 0
    if "fsdp" in low or "hsdp" in low or number == 3:
        return ("ddp", 0, False) if data == 1 else ("hybrid", group, True) if group else ("fsdp", 0, True)
    if number == 2:
        return "zero2", 0, True
    if number == 1 or "distributed optimizer" in low:
        return "zero1", group, True
    if stage is None and "megatron" not in low and not _NOT_SHARDED.match(low) and _is_word(low):
        raise RowError(
            f"column zero_stage_or_fsdp: {text!r} names none of none, DDP, ZeRO-1, ZeRO-2, ZeRO-3, FSDP, distributed "
            "optimizer"
        )
    return "ddp", 0, low.startswith("ddp") or stage is not None


def _framework(row: Row) -> Framework:
    text = row.text["compile"].lower()
    if text and not _NOT_COMPILED.match(text):
        if _is_word(text) and not (_COMPILED.match(text) or _SCRIPTED.match(text)):
            raise RowError(f"column compile: {row.text['compile']!r} is neither yes, no, nor a compiler that is known")
        if not _SCRIPTED.match(text):
            return "compiled"
    low = row.text["zero_stage_or_fsdp"].lower()
    if "distributed optimizer" in low or "megatron" in low:
        return "megatron"
    return "eager" if any(word in low for word in ("ddp", "fsdp", "hsdp", "zero")) else "megatron"


def _checkpoint(row: Row) -> str:
    text = row.text["activation_recompute"]
    low = text.lower()
    if low.startswith("full"):
        return "full"
    if low.startswith("selective"):
        return "matmuls"
    if _is_word(low) and not _NO_RECOMPUTE.match(low):
        raise RowError(f"column activation_recompute: {text!r} is none of full, selective, none, not stated")
    return "none"


def _word(row: Row, column: str, known: Sequence[WordT], assumed: WordT) -> WordT:
    """Returns the word of a column that tables may lack; what is assumed where it is empty."""
    text = row.text.get(column, "").lower()
    if text and text not in known:
        raise RowError(f"column {column}: {text!r} is none of {', '.join(known)}")
    return next((word for word in known if word == text), assumed)


def _is_word(text: str) -> bool:
    """Whether a text is one word, of which all must be known; more of them are somebody's remark."""
    return bool(text) and " " not in text


def _compute(row: Row) -> Compute:
    low = row.text["precision"].lower()
    names: tuple[Compute, ...] = ("fp4", "fp8", "fp16", "bf16", "tf32", "fp32")
    if found := [name for name in names if name in low]:
        return found[0]
    raise RowError(f"column precision: {row.text['precision']!r} names none of fp32, tf32, fp16, bf16, fp8")


def _micro_batch(row: Row, model: ModelShape, layout: Layout) -> float | None:
    """None where the row does not state it: nothing, or a remark in brackets."""
    text = row.text["micro_batch"]
    if found := re.fullmatch(r"(\d+)\s*tok\w*", text):
        return float(found[1])
    is_stated = not text.startswith("(") and "not stated" not in text.lower()
    count = row.number("micro_batch") if is_stated else None
    if count is None:
        return None
    batch = row.number("global_batch")
    if batch is not None and count * layout.data > batch:
        asked = f"{text} samples on each of {layout.data} data ranks"
        raise RowError(f"columns micro_batch, global_batch: {asked} are more than {batch:g}")
    if not model.is_sampled:
        return count
    # The unit of a batch is a sentence or a segment, that of the model a token.
    return count * (row.whole("seq_len", 0) or model.samples_each) if model.unit == "token" else count


def known_model(name: str) -> ModelShape | None:
    """Returns the shape of a model by the name that a table gives it; None where it is not known."""
    entry = _known_models().get(re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*?\)", "", name.lower())))
    return None if entry is None else ModelShape(**entry | ({"ahead": 0} if "w/o mtp" in name.lower() else {}))


@cache
def _known_models() -> dict[str, dict[str, Any]]:
    sections = load_yaml(resources.files("paceline_bench.scored").joinpath("known_models.yaml").read_text())
    return {name: entry for section in sections.values() for name, entry in section.items()}


def predict_case(case: PublishedRun, sets: ConstantSets | None = None) -> Prediction:
    """Predicts a row. What it does not state (microbatch, chunks, expert ranks) is the fastest choice that fits."""
    found = [predict(each, case.cluster, sets) for each in _choices(case)]
    chosen = min(found, key=lambda each: (not each.fits, each.seconds / each.workload.global_batch))
    if chosen.fits:
        return chosen
    memory = footprint(_saving(case, chosen.workload))
    fits = memory.device_bytes <= case.cluster.device.memory_bytes
    return replace(chosen, memory=memory, fits=True) if fits else chosen


def _saving(case: PublishedRun, workload: Workload) -> Workload:
    """Returns it without what the row leaves open: it may recompute, and split the loss."""
    workload = replace(workload, run=replace(workload.run, split_loss=True))
    if case.chooses_recompute:
        workload = replace(workload, layout=replace(workload.layout, checkpoint_activations="full"))
    return workload


def _choices(case: PublishedRun) -> list[Workload]:
    workload = case.workload
    local = workload.global_batch / workload.layout.data
    sizes = [1, 2, 4, 8, 16] if case.chooses_micro_batch else [workload.micro_batch]
    layers = 1 if workload.model.is_sampled else workload.model.layers
    each = max(1, layers // workload.layout.pipeline)
    chunks = [count for count in (1, 2, 3, 4) if each % count == 0] if case.chooses_chunks else [workload.layout.chunks]
    found = [
        replace(workload, run=replace(workload.run, micro_batch=size), layout=replace(workload.layout, chunks=count))
        for size in sizes
        if not case.chooses_micro_batch or (size <= local and local % size == 0)
        for count in chunks
    ] or [workload]

    def holding_experts(workload: Workload) -> Workload:
        """Returns it with as many expert-parallel ranks as it takes to fit; the least number where none does."""
        spread = [replace(workload, layout=replace(workload.layout, expert=ranks)) for ranks in case.expert_ranks]
        memory = case.cluster.device.memory_bytes
        return next((each for each in spread if footprint(_saving(case, each)).device_bytes <= memory), workload)

    return [holding_experts(each) for each in found]


def in_metric(case: PublishedRun, prediction: Prediction) -> float:
    workload = prediction.workload
    run, devices = workload.run, workload.layout.ranks
    match case.metric:
        case "mem_gib":
            memory = prediction.memory
            shown = {"all": memory.device_bytes, "activations": memory.activations, "states": memory.states}
            return shown[run.shown] / GIB
        case "step_time_s":
            return prediction.seconds
        case "img_per_s" | "seq_per_s":
            return prediction.samples_per_s
        case "tokens_per_s_per_gpu":
            return prediction.samples_per_s * (1 if workload.model.is_sampled else run.seq_len) / devices
        case "tflops_per_gpu":
            flops = model_flops(workload, in_full=True)
            if workload.recompute == "full" and not workload.model.is_sampled:
                head = 6 * run.seq_len * workload.model.vocab_size * workload.model.width
                flops = head + (flops - head) * 4 / 3
            return prediction.samples_per_s * flops / devices / 1e12
        case _:
            rate = prediction.samples_per_s * model_flops(workload, in_full=True) / devices
            return 100 * rate / case.cluster.device.peak(run.compute)
