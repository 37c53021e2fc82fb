"""Kept figures of dry runs and simulations: kernels of operators, what engines issue, clocks as text and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kept_cases import dry_config
from kept_figures import assert_kept, told

from paceline.cluster.devices import load_cluster
from paceline.cluster.kernels import Operation
from paceline.config import config_from_dict
from paceline.predict.replay.program import Issue, OnHost, Program, Run, Wait, counted
from paceline.rehearse.dryrun.held import HeldMemory, mark_host_work
from paceline.rehearse.dryrun.operators import KnownCalls, Operators, dtype_name, is_free, tensors_of
from paceline.rehearse.dryrun.record import record_stages
from paceline.rehearse.simulate.prices import KernelPrices, Rates

CPU = torch.device("cpu")


def figures() -> dict[str, object]:
    parts = (_of_operators(), _of_calls(), _of_memory(), _of_hosts(), _of_recordings())
    return {name: value for part in parts for name, value in part}


def test_recordings_have_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*sizes, device="meta", dtype=dtype)


def _numbers() -> Callable[[torch.Tensor], int]:
    known: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def number(tensor: torch.Tensor) -> int:
        kept.append(tensor)
        return known.setdefault(id(tensor), len(known))

    return number


def _kernel(kernel: Operation) -> str:
    parts = (
        kernel.name,
        kernel.family,
        kernel.dtype,
        kernel.sizes,
        kernel.batch,
        kernel.layout,
        kernel.is_causal,
        kernel.tensors,
    )
    return f"{parts} {kernel.reads} -> {kernel.writes}"


def _of_operators() -> Iterator[tuple[str, object]]:
    aten = torch.ops.aten
    a, b, square, half = meta(4, 6), meta(6, 8), meta(8, 8), meta(4, 6, dtype=torch.bfloat16)
    image, weight = meta(2, 3, 8, 8), meta(5, 3, 3, 3)
    moved = meta(2, 5, 6, 6)
    cases: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
        "mm": (aten.mm.default, (a, b), meta(4, 8)),
        "mm turned": (aten.mm.default, (meta(6, 4).t(), meta(8, 6).t()), meta(4, 8)),
        "mm half turned": (aten.mm.default, (a, meta(8, 6).t()), meta(4, 8)),
        "addmm": (aten.addmm.default, (meta(8), a, b), meta(4, 8)),
        "bmm": (aten.bmm.default, (meta(3, 4, 6), meta(3, 6, 8)), meta(3, 4, 8)),
        "baddbmm": (aten.baddbmm.default, (meta(3, 4, 8), meta(3, 4, 6), meta(3, 6, 8)), meta(3, 4, 8)),
        "linear": (aten.linear.default, (meta(2, 4, 6), meta(8, 6)), meta(2, 4, 8)),
        "half": (aten.mul.Tensor, (half, half), meta(4, 6, dtype=torch.bfloat16)),
        "expanded": (aten.add.Tensor, (a, meta(1, 6).expand(4, 6)), meta(4, 6)),
        "none expanded": (aten.add.Tensor, (a, meta(0, 1).expand(0, 6)), meta(4, 6)),
        "convolution": (
            aten.convolution.default,
            (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
            moved,
        ),
        "copy": (aten.copy_.default, (a, half), a),
        "fill": (aten.fill_.Scalar, (a, 1.0), a),
        "embedding": (aten.embedding.default, (square, meta(5, dtype=torch.int64)), meta(5, 8)),
        "reduction": (aten.mean.dim, (a, [-1]), meta(4)),
        "softmax": (aten._log_softmax.default, (a, -1, False), meta(4, 6)),
        "curve": (aten.silu.default, (a,), meta(4, 6)),
        "list": (aten._foreach_add_.Scalar, ([a, square], 1.0), None),
        "convert": (aten._to_copy.default, (a,), half),
        "view": (aten.view.default, (a, [24]), meta(24)),
        "nothing": (aten.empty.memory_format, ([2],), meta(2)),
        "random": (aten.bernoulli_.float, (a, 0.5), a),
        "made": (aten.ones.default, ([4],), meta(4)),
        "read alone": (aten.equal.default, (a, a), None),
    }
    for name, (func, args, result) in cases.items():
        found = Operators(_numbers()).kernels(func, args, {}, result)
        yield f"operator {name}", [[_kernel(each) for each in found], is_free(func)]
    back = (meta(2, 3, 8, 8), meta(5, 3, 3, 3), None)
    arguments = (moved, image, weight, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    for place, results in enumerate((back, (None, *back[1:]), (back[0], None, None))):
        found = Operators(_numbers()).kernels(aten.convolution_backward.default, arguments, {}, results)
        yield f"operator backward {place}", [_kernel(each) for each in found]
    four = meta(2, 3, 5, 8)
    for is_causal, is_back, key in ((True, False, four), (True, True, meta(2, 3, 7, 8)), (False, False, four)):
        kernel = Operators(_numbers()).attention([four, key, key, four], is_causal=is_causal, is_back=is_back)
        yield f"attention {is_causal} {is_back}", _kernel(kernel)
    yield (
        "attention of three",
        _kernel(Operators(_numbers()).attention([meta(3, 5, 8)] * 4, is_causal=True, is_back=False)),
    )
    yield (
        "dtypes",
        [dtype_name(each) for each in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)],
    )
    yield "tensors", [len(list(tensors_of(tree))) for tree in (a, [a, (b, {"x": a})], {"y": [a, 3]}, 3, (None, a))]
    for rates in (Rates(), Rates(runs_ahead=True, launch_s=1e-3)):
        sizes = [
            (1e9, 10.0, torch.float32),
            (1e9, 1e12, torch.bfloat16),
            (1e9, 1.0, torch.float64),
            (0.0, 0.0, torch.float16),
        ]
        yield (
            f"rates {rates.runs_ahead}",
            [[rates.seconds(*each) for each in sizes], rates.price(aten.mm.default, (a, b), {}, meta(4, 8))],
        )
    for name in ("h100-sxm", "cpu-host"):
        prices = KernelPrices(load_cluster(f"1x {name}").device)
        seconds = [
            prices.price(func, args, {}, result) for func, args, result in (cases["mm"], cases["curve"], cases["view"])
        ]
        attend = aten._scaled_dot_product_flash_attention_for_cpu.default
        large = meta(2, 8, 512, 64)
        seconds += [
            prices.price(attend, (large, large, large, 0.0, causal), {}, (large, meta(2, 8, 512)))
            for causal in (True, False)
        ]
        yield f"prices {name}", [seconds, prices.work_s, prices.launch_s, prices.name]


def _of_calls() -> Iterator[tuple[str, object]]:
    aten, calls = torch.ops.aten, KnownCalls()
    a, b = meta(4, 6), meta(4, 6)
    cases: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("add", aten.add.Tensor, (a, b)),
        ("same", aten.add.Tensor, (a, a)),
        ("in place", aten.add_.Tensor, (a, b)),
        ("several", aten.max.dim, (a, 1)),
        ("number", aten.add.Scalar, (a, 2)),
        ("other number", aten.add.Scalar, (a, 2.0)),
        ("list", aten.cat.default, ([a, b], 0)),
        ("real", aten.add.Tensor, (torch.ones(2), torch.ones(2))),
        ("view", aten.view.default, (a, [24])),
    ]
    for name, func, args in cases:
        found = []
        for _ in range(3):
            call = calls.call(func, args, {})
            kernels = calls.kernels(func, args, {}, call) if name not in ("real", "view") else ()
            shapes = [list(each.shape) for each in call.returned]
            found.append(
                [
                    shapes,
                    len(call.tensors),
                    call.known is not None,
                    [_kernel(each) for each in kernels],
                    call.result is args[0],
                ]
            )
        yield f"call {name}", found
    other = calls.call(aten.sum.dim_IntList, (a, [0]), {"dtype": torch.float64})
    plain = calls.call(aten.sum.dim_IntList, (a, [0]), {})
    yield (
        "options",
        [
            str(other.result.dtype),
            str(plain.result.dtype),
            str(calls.call(aten.sum.dim_IntList, (a, [0]), {"dtype": torch.float64}).result.dtype),
        ],
    )
    strided = calls.call(aten.clone.default, (meta(6, 4).t(),), {})
    yield (
        "strides",
        [
            list(strided.result.stride()),
            list(calls.call(aten.clone.default, (meta(6, 4).t(),), {}).result.stride()),
            list(calls.call(aten.clone.default, (meta(4, 6),), {}).result.stride()),
        ],
    )


def _of_memory() -> Iterator[tuple[str, object]]:
    memory = HeldMemory()
    kept = {name: meta(size) for name, size in (("weights", 10), ("states", 20), ("given", 3))}
    memory.claim([kept["weights"]], "parameters")
    memory.claim([kept["weights"], kept["states"]], "optimizer")
    memory.note(kept.values())
    elastic = meta(7)
    memory.follow(elastic, "temporary")
    memory.start()
    phases = ["forward", "forward", "backward", "backward", "optimizer"]
    lives, again, passes = meta(100), meta(50), meta(30)
    memory.note([lives])
    memory.place = 1
    memory.note([passes])
    elastic.untyped_storage().resize_(0)
    memory.look()
    del passes
    memory.place = 2
    memory.note([again])
    memory.place = 3
    del lives
    elastic.untyped_storage().resize_(28)
    memory.look()
    memory.place = 4
    late = meta(9)
    memory.note([late, torch.ones(3)])
    memory.claim([late], "host")
    events, resident = memory.events(phases, {2}, {1: [5, 6]})
    yield (
        "held",
        [
            [f"{act} {place} {event}" for act, place, event in events],
            resident,
            memory.has_host,
            sorted(memory.host_storages),
            memory.is_on_host(late),
        ],
    )
    memory.leave_out()
    events, resident = memory.events(phases, set(), {})
    yield "left out", [len(events), resident]
    del again, late


def _of_hosts() -> Iterator[tuple[str, object]]:
    """What the host does itself, of kernels on tensors of both."""

    def run(name: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Run:
        return Run(
            Operation(
                name=name,
                family="pointwise",
                reads=tuple((each, 10 + each) for each in reads),
                writes=tuple((each, 100 + each) for each in writes),
            )
        )

    places = {number: number for number in range(20)} | {11: 1}
    events: list[Any] = [
        Issue(5, "all_gather", 64, (0, 1), "world"),
        run("add", (2,), (3,)),
        run("copy_", (3,), (1,)),
        run("add", (1,), (4,)),
        run("copy_", (1,), (6,)),
        run("mul", (6,), (7,)),
        run("copy_", (4,), (8,)),
        Issue(6, "reduce_scatter", 64, (0, 1), "world"),
        Wait(5),
        Wait(6),
        Wait(77),
        run("mul", (1, 7), (9,)),
        run("mul", (7, 1), (11,)),
        run("_fused_adamw_", (1, 4, 0), (1,)),
        OnHost("x", 3),
        run("fill_", (), (1,)),
        run("copy_", (7,), (1,)),
        run("copy_", (1,), (9,)),
        run("copy_", (0,), (1,)),
    ]
    found, starts = mark_host_work(events, {0, 1}, places, 3)
    yield "on the host", [[_event(each) for each in found], starts]


def _event(event: Any) -> str:
    return f"{event.block} {_kernel(event.operation)}" if isinstance(event, Run) else str(event)


def _program(program: Program) -> object:
    """What is our own in a recording: what the engine issues; and products, which every torch computes alike."""
    issued = Counter(
        f"{event.kind} {event.num_bytes} {event.ranks} {event.phase} {event.lane} {event.algorithm}"
        for event, times in counted(program.events, program.order)
        if isinstance(event, Issue)
        for _ in range(times)
    )
    products = Counter(
        f"{kernel.sizes} {kernel.layout} {kernel.phase} {kernel.dtype} {event.block}"
        for event, times in counted(program.events, program.order)
        if isinstance(event, Run) and (kernel := event.operation).family == "matmul"
        for _ in range(times)
    )
    states = {name: program.resident.get(name) for name in ("parameters", "gradients", "optimizer")}
    told_of = [
        program.rank,
        program.stage,
        program.stages,
        program.samples,
        program.elements,
        program.element,
        program.model_flops,
        program.dtype,
        program.graphs,
        program.is_compiled,
    ]
    work = sum(event.num_bytes for event in program.events if isinstance(event, OnHost))
    turns = [f"{turn.kind}{turn.stage}.{turn.microbatch} {turn.like} {turn.arrived}" for turn in program.order]
    return [dict(issued), dict(products), states, told_of, work, turns]


def _of_recordings() -> Iterator[tuple[str, object]]:
    cases: dict[str, dict[str, Any]] = {
        "ddp": {"train": {"accumulate": 1, "global_batch": 4}},
        "zero1 half": {
            "parallel": {"strategy": "zero1"},
            "train": {"precision": "bf16", "accumulate": 5, "global_batch": 20},
        },
        "fsdp again": {
            "parallel": {"strategy": "fsdp"},
            "memory": {"checkpoint_activations": "full"},
            "train": {"precision": "bf16_master"},
        },
        "offload": {"parallel": {"strategy": "fsdp"}, "memory": {"offload": ["optimizer"]}, "train": {"accumulate": 4}},
        "pipeline": {"parallel": {"pipeline": 2}, "train": {"accumulate": 6, "global_batch": 24}},
        "tensor": {"parallel": {"tensor": 2, "sequence_parallel": True}, "model": {"tied": False}},
        "compiled": {"model": {"compile": "blocks"}, "train": {"ema_decay": 0.9}, "comm": {"algorithm": "ring"}},
        "classes": {
            "model": {"kind": "mlp", "hidden_dim": 16},
            "data": {"kind": "synthetic_images", "size": 4},
            "parallel": {"ranks": 2, "device": "cpu"},
            "train": {"accumulate": 3, "global_batch": 12},
        },
    }
    for name, sections in cases.items():
        is_own = name == "classes"
        config = config_from_dict({"name": "dry", **sections}) if is_own else dry_config(**sections)
        ranks = config.parallel.decided_ranks
        for program in record_stages(config, ranks=ranks):
            yield f"recorded {name} {program.stage}", _program(program)
    whole = record_stages(dry_config(**cases["pipeline"]), ranks=4, rank=1, is_whole=True)
    yield (
        "whole",
        [
            [program.rank for program in whole],
            [len(program.order) for program in whole],
            [program.model_flops for program in whole],
        ],
    )
    yield (
        "refused",
        [
            told(
                lambda: record_stages(
                    dry_config(parallel={"strategy": "auto"}, comm={"compression": {"policy": "threshold"}}), ranks=4
                )
            ),
            told(lambda: record_stages(dry_config(), ranks=4, rank=4)),
        ],
    )
