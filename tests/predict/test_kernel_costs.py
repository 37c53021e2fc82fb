"""How compiled blocks are fused: what is read, what is written, what is kept for the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.devices import load_cluster
from paceline.cluster.kernels import Family, Operation
from paceline.predict.formulas.constants import Constants
from paceline.predict.replay.kernel_costs import KernelCosts, _kept, fuse_blocks
from paceline.predict.replay.program import Event, Issue, Run

SIZE = 100
_FAMILIES: tuple[Family, ...] = ("matmul", "attention", "attention_backward")


def _run(
    name: str,
    reads: list[int],
    writes: list[int],
    *,
    family: Family = "pointwise",
    phase: str = "forward",
    block: str = "block 0",
) -> Run:
    operation = Operation(
        name=name,
        family=family,
        sizes=(1, 1, 1) if family == "matmul" else (),
        reads=tuple((tensor, SIZE) for tensor in reads),
        writes=tuple((tensor, SIZE) for tensor in writes),
        phase=phase,
    )
    return Run(operation, block)


def _names(events: list[Event]) -> list[str]:
    return [event.operation.name for event in events if isinstance(event, Run)]


def bytes_not_kept(events: list[Event]) -> int:
    """Returns how many bytes less compiled blocks keep for their backward than they do as they stand."""
    return sum(_kept(events).values()) - sum(_kept(fuse_blocks(events)).values())


def test_neighbours_are_one_kernel_that_goes_through_memory_once() -> None:
    events = [_run("a", [0], [1]), _run("b", [1], [2]), _run("mm", [2, 9], [3], family="matmul")]
    (fused, product) = fuse_blocks(events)
    assert isinstance(fused, Run)
    assert isinstance(product, Run)
    assert (fused.operation.reads, fused.operation.writes) == (((0, SIZE),), ((2, SIZE),))
    assert product.operation.name == "mm"


def test_what_is_outside_a_block_stays_as_it_is() -> None:
    events: list[Event] = [
        _run("a", [0], [1], block=""),
        _run("b", [1], [2], block=""),
        Issue(number=1, kind="all_reduce", num_bytes=8, ranks=(0, 1), lane="x"),
    ]
    assert fuse_blocks(events) == events


def test_a_function_waits_for_the_product_that_its_result_is_multiplied_with() -> None:
    events = [
        _run("gate", [0], [1], family="matmul"),
        _run("silu", [1], [2], family="curve"),
        _run("up", [0], [3], family="matmul"),
        _run("mul", [2, 3], [4]),
        _run("down", [4], [5], family="matmul"),
    ]
    assert _names(fuse_blocks(events)) == ["gate", "up", "fused", "down"]


def test_what_only_fused_kernels_of_the_backward_read_is_made_again() -> None:
    events = [
        _run("gate", [0], [1], family="matmul"),
        _run("silu", [1], [2], family="curve"),
        _run("mul", [2, 3], [4]),
        _run("down", [4], [5], family="matmul"),
        _run("weight", [4, 6], [7], family="matmul", phase="backward"),
        _run("mul_back", [2, 6], [8], phase="backward"),
        _run("silu_back", [8, 1], [9], phase="backward"),
    ]
    found = fuse_blocks(events)
    forward, backward = (each for each in found if isinstance(each, Run) and each.operation.name == "fused")
    assert dict(forward.operation.writes) == {4: SIZE}
    assert set(dict(backward.operation.reads)) == {1, 6}  # the gate, of which the function is made again
    assert bytes_not_kept(events) == SIZE


def test_what_autocast_converts_for_each_layer_is_converted_once() -> None:
    events = [
        _run("_to_copy", [0], [1], family="convert"),
        _run("query", [1], [2], family="matmul"),
        _run("_to_copy", [0], [3], family="convert"),
        _run("key", [3], [4], family="matmul"),
        _run("back", [1, 5], [6], family="matmul", phase="backward"),
        _run("back", [3, 5], [7], family="matmul", phase="backward"),
    ]
    assert _names(fuse_blocks(events)) == ["fused", "query", "key", "back", "back"]
    assert bytes_not_kept(events) == SIZE


def test_a_batch_norm_reads_its_batch_for_statistics_and_once_more_to_use_them() -> None:
    events = [
        _run("convolution", [0, 1], [2], family="matmul"),
        _run("native_batch_norm", [2], [3], family="norm"),
        _run("relu", [3], [4]),
        _run("convolution", [4, 5], [6], family="matmul"),
        _run("convolution_backward", [7, 5], [8], family="matmul", phase="backward"),
        _run("threshold_backward", [8, 4], [9], phase="backward"),
        _run("native_batch_norm_backward", [9, 2], [10], family="norm_backward", phase="backward"),
        _run("convolution_backward", [10, 1], [11], family="matmul", phase="backward"),
    ]
    found = [event.operation for event in fuse_blocks(events) if isinstance(event, Run)]
    norm, backward = ([each for each in found if each.name in ("statistics", "fused")][at : at + 2] for at in (0, 2))
    assert [(set(dict(each.reads)), set(dict(each.writes))) for each in norm] == [({2}, set()), ({2}, {4})]
    assert [(set(dict(each.reads)), set(dict(each.writes))) for each in backward] == [
        ({8, 4, 2}, set()),
        ({8, 4, 2}, {10}),
    ]
    assert [each.family for each in (norm[0], backward[0])] == ["norm", "reduction"]
    assert [each.name for each in found].count("statistics") == 2


def test_statistics_of_a_batch_cost_nothing_of_their_own_on_a_cpu() -> None:
    run = _run("statistics", [0], [], family="reduction")
    times = [
        KernelCosts(load_cluster(name).device, Constants(), is_compiled=True)(run)
        for name in ("1x cpu-host", "1x h200")
    ]
    assert times[0] == (0.0, 0.0)
    assert min(times[1]) > 0


def test_a_batch_norm_reads_twice_on_a_gpu_that_was_not_measured() -> None:
    def seconds(name: str, cluster: str) -> float:
        device = replace(load_cluster(cluster).device, memory_rates={})
        return KernelCosts(device, Constants(), is_compiled=False)(_run(name, [0], [1], family="norm"))[0]

    assert seconds("native_batch_norm", "1x h200") == pytest.approx(1.5 * seconds("native_layer_norm", "1x h200"))
    assert seconds("native_batch_norm", "1x cpu-host") == seconds("native_layer_norm", "1x cpu-host")


def _cast(source: int, first: int, *, phase: str = "forward") -> list[Run]:
    """Returns what float8.py does to a tensor of bf16: its maximum, a scale, the cast, and a transposed copy."""
    maximum, scale, cast, copy = range(first, first + 4)
    rows = [
        Operation(name="amax", family="reduction", reads=((source, SIZE),), writes=((maximum, 4),), phase=phase),
        Operation(name="where", family="pointwise", reads=((maximum, 4),), writes=((scale, 4),), phase=phase),
        Operation(
            name="mul", family="pointwise", reads=((source, SIZE), (scale, 4)), writes=((cast, SIZE // 2),), phase=phase
        ),
        Operation(
            name="clone",
            family="strided",
            dtype="fp8",
            reads=((cast, SIZE // 2),),
            writes=((copy, SIZE // 2),),
            phase=phase,
        ),
    ]
    return [Run(row, "block 0") for row in rows]


def test_a_kernel_ends_where_it_has_reduced_a_whole_tensor_to_one_number() -> None:
    events = [*_cast(0, 1, phase="backward"), _run("mm", [3, 4], [5], family="matmul", phase="backward")]
    largest, cast, product = (event.operation for event in fuse_blocks(events) if isinstance(event, Run))
    assert dict(largest.reads) == {0: SIZE}
    assert dict(cast.reads)[0] == SIZE  # which goes through the tensor once more
    assert dict(cast.writes) == {3: SIZE // 2, 4: SIZE // 2}
    assert product.name == "mm"


def test_layers_that_read_one_tensor_cast_it_once() -> None:
    events = [
        *_cast(0, 1),
        _run("query", [3, 90], [10], family="matmul"),
        *_cast(0, 11),
        _run("key", [13, 91], [20], family="matmul"),
        _run("query back", [4, 92], [30], family="matmul", phase="backward"),
        _run("key back", [14, 93], [31], family="matmul", phase="backward"),
    ]
    found = [event.operation for event in fuse_blocks(events) if isinstance(event, Run)]
    products = {each.name: set(dict(each.reads)) for each in found if each.family == "matmul"}
    assert products["query"] == {3, 90}
    assert products["key"] == {3, 91}
    # The transposed copy is made in the backward, once, from what is kept anyhow.
    assert products["query back"] == {4, 92}
    assert products["key back"] == {4, 93}
    (again,) = (each for each in found if each.phase == "backward" and each.family != "matmul")
    assert (set(dict(again.reads)), set(dict(again.writes))) == ({0, 1}, {4})  # the tensor, and its maximum
    assert bytes_not_kept(events) == SIZE - 4


def test_a_tensor_that_was_changed_in_place_is_cast_as_it_is() -> None:
    events = [
        _run("product", [7, 8], [0], family="matmul"),
        _run("relu_", [0], [0]),
        *_cast(0, 1),
        _run("product back", [4, 92], [30], family="matmul", phase="backward"),
    ]
    found = [event.operation for event in fuse_blocks(events) if isinstance(event, Run)]
    (again,) = (each for each in found if each.phase == "backward" and each.family != "matmul")
    assert (set(dict(again.reads)), set(dict(again.writes))) == ({0, 1}, {4})


def test_what_is_widened_is_read_in_the_dtype_that_it_has() -> None:
    events: list[Event] = [
        _run("product", [7, 8], [0], family="matmul"),
        Run(Operation(name="_to_copy", family="convert", reads=((0, SIZE),), writes=((1, 2 * SIZE),)), "block 0"),
        _run("other", [7, 9], [4], family="matmul"),
        Run(
            Operation(name="mul", family="pointwise", reads=((1, 2 * SIZE), (4, SIZE)), writes=((5, SIZE),)), "block 0"
        ),
    ]
    found = [event.operation for event in fuse_blocks(events) if isinstance(event, Run)]
    assert [each.name for each in found] == ["product", "other", "fused"]
    assert dict(found[-1].reads) == {0: SIZE, 4: SIZE}


def test_statistics_are_kept_and_not_made_again_from_all_that_they_are_of() -> None:
    events = [
        Run(Operation(name="norm", family="norm", reads=((0, SIZE),), writes=((1, SIZE), (2, SIZE // 10))), "block 0"),
        _run("mm", [1, 9], [3], family="matmul"),
        _run("norm_back", [4, 0], [5], phase="backward"),
        Run(
            Operation(
                name="scale",
                family="pointwise",
                reads=((5, SIZE), (2, SIZE // 10)),
                writes=((6, SIZE),),
                phase="backward",
            ),
            "block 0",
        ),
    ]
    forward, _, backward = (event.operation for event in fuse_blocks(events) if isinstance(event, Run))
    assert dict(forward.writes)[2] == SIZE // 10
    assert dict(backward.reads) == {4: SIZE, 0: SIZE, 2: SIZE // 10}


def test_a_transposing_cast_takes_longer_than_a_strided_copy_of_as_many_bytes() -> None:
    costs = KernelCosts(load_cluster("1x h200").device, Constants(), is_compiled=True)
    plain, recast = (_run(name, [0], [1], family="strided") for name in ("fused", "recast"))
    assert costs(recast)[0] > 1.5 * costs(plain)[0]


@pytest.mark.parametrize("name", ["1x cpu-host", "1x h200", "1x dgx-a100"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_kernel_is_faster_than_the_peak_that_an_mfu_is_a_share_of(name: str, dtype: str) -> None:
    device = replace(load_cluster(name).device, factor=0.01)  # an entry that was fitted to a run of another machine
    price = KernelCosts(device, Constants(), is_compiled=False)
    sizes = {"matmul": (512, 512, 512), "attention": (8, 4, 128, 32), "attention_backward": (8, 4, 128, 32)}
    for family in _FAMILIES:
        kernel = Operation(name=family, family=family, dtype=dtype, sizes=sizes[family])
        assert kernel.flops / price(Run(kernel))[0] <= device.peak(dtype) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("1x h200", 0.5, 0.6), ("1x h100-sxm", 0.4, 0.6), ("1x dgx-a100", 0.3, 0.7)]
)
def test_long_attention_reaches_what_kernels_do_alone(name: str, least: float, most: float) -> None:
    """Not the rate of whole published runs, nor the mean of short ones; and half of the square is no limit."""
    device = load_cluster(name).device
    costs = KernelCosts(device, Constants(attention=0.33), is_compiled=False)
    for family, share in (("attention", 1.0), ("attention_backward", 0.8)):
        kernel = Operation(name=family, family=family, dtype="bf16", sizes=(1, 16, 262_144, 128))
        assert share * least * device.peak("bf16") < kernel.flops / costs(Run(kernel))[0] < most * device.peak("bf16")
