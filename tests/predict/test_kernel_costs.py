"""How compiled blocks are fused: what is read, what is written, what is kept for the backward."""

from __future__ import annotations

from paceline.cluster.operations import Family, Operation
from paceline.predict.replay.events import Event, Issue, Run
from paceline.predict.replay.kernel_costs import _kept, fuse_blocks

SIZE = 100


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
