"""The Triton kernel that stands for a collective: it moves its bytes, and holds its multiprocessors until time is up.

Each program is a channel of NCCL. It copies its blocks evenly over the time that it has, reading the GPU's clock in
between, so that memory is as busy from the beginning to the end as it is with NCCL. Time begins with the first program:
those that get a multiprocessor later, beside other work, copy faster. Import this where there is a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

_BLOCK, _WARPS = 16384, 16  # 16 warps hold so many registers that no large matrix product runs beside them
_MOST = 2**30  # places, each of four bytes, that the kernel counts
_CLOCKS: dict[int, Tensor] = {}  # by stream


@triton.jit(do_not_specialize=["written", "read", "rounds", "nanoseconds"])  # type: ignore[untyped-decorator]
def _hold_kernel(output, tensor, clock, written, read, rounds, nanoseconds, block: tl.constexpr):  # type: ignore[no-untyped-def]
    now = globaltimer()
    first = tl.atomic_cas(clock, tl.zeros_like(now), now)
    start = tl.where(first == 0, now, first)
    span = nanoseconds.to(tl.int64)
    for turn in range(rounds):
        place = (turn * tl.num_programs(0) + tl.program_id(0)) * block + tl.arange(0, block)
        values = tl.load(tensor + place % read, mask=place < max(written, read))
        tl.store(output + place % written, values, mask=place < max(written, read))
        due = start + span * (turn + 1) // rounds
        while now < due:
            now = globaltimer()
    while now < start + span:
        now = globaltimer()
    if tl.atomic_add(clock + 1, 1) == tl.num_programs(0) - 1:  # the last one: the next collective begins anew
        tl.store(clock + 1, tl.zeros_like(now))
        tl.store(clock, tl.zeros_like(now))


def hold(moved: tuple[Tensor, Tensor] | None, seconds: float, channels: int) -> None:
    """Has the current stream take some time, in which the second tensor is copied over the first, again if larger."""
    if moved is None or not all(map(_is_movable, moved)):
        moved = (torch.empty(1, dtype=torch.int32, device="cuda"),) * 2
    output, tensor = (each.view(-1).view(torch.int32) for each in moved)
    rounds = triton.cdiv(max(len(output), len(tensor)), _BLOCK * channels)
    sizes = len(output), len(tensor)
    _hold_kernel[(channels,)](output, tensor, _clock(), *sizes, rounds, int(seconds * 1e9), _BLOCK, num_warps=_WARPS)


def _clock() -> Tensor:
    """Returns what the programs on the current stream share: when the first one began, and how many have ended."""
    stream = torch.cuda.current_stream().cuda_stream
    if stream not in _CLOCKS:
        _CLOCKS[stream] = torch.zeros(2, dtype=torch.int64, device="cuda")
    return _CLOCKS[stream]


def _is_movable(tensor: Tensor) -> bool:
    has_places = tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0 and 0 < tensor.nbytes <= 4 * _MOST
    return has_places and tensor.is_contiguous()
