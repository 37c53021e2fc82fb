"""Picture of lesson 4: what a rank holds over a step, with and without activation checkpointing, counted on a real one.

A small GPT trains on the CPU. Every tensor that an operation makes is noted, and its memory is counted at the end of
each block's forward and backward, as long as it is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from paceline.models.gpt import GPT, gpt_config
from pictures_svg import MARGIN, WIDTH, Picture

BLOCKS = 8
_SAMPLES, _TOKENS = 8, 128
_LEFT, _TALL = MARGIN + 76, 150.0
_KINDS = (("f", "moments"), ("b", "gradients"), ("c", "activations"))


class Moment(NamedTuple):
    """What is held beside the parameters at the end of a block's forward (F3), second forward (R3) or backward (B3)."""

    name: str
    moments: int
    gradients: int
    activations: int


class Alive(TorchDispatchMode):
    """Notes the memory of all tensors that are made, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return found

    def num_bytes(self) -> int:
        self._made = {key: (ref, size) for key, (ref, size) in self._made.items() if not ref.expired()}
        return sum(size for _, size in self._made.values())


def count_step(is_checkpointed: bool) -> list[Moment]:
    """Runs two steps, and counts in the second."""
    torch.manual_seed(0)
    shape = {"mlp": "gelu", "norm": "layer", "positions": "learned", "mlp_width": 256, "kv_heads": 4}
    model = GPT(gpt_config("gpt-nano", layers=BLOCKS, vocab_size=64, context=_TOKENS, **shape))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 64, (_SAMPLES, _TOKENS + 1))
    held: list[Moment] = []
    alive = Alive()

    def note(name: str, *_: object) -> None:
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        moments = sum(each.nbytes for state in optimizer.state.values() for each in state.values() if each.ndim)
        held.append(Moment(name, moments, gradients, alive.num_bytes() - gradients))

    def run_again(number: int, forward: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        def counted(*given: torch.Tensor) -> torch.Tensor:
            found = forward(*given)
            if len(held) >= BLOCKS:  # in backward
                note(f"R{number}")
            return found

        with set_checkpoint_early_stop(False):  # else what follows forward in ``counted`` would not run
            found: torch.Tensor = checkpoint(counted, *given, use_reentrant=False)
        return found

    for number, block in enumerate(model.layers):
        block.register_full_backward_hook(partial(note, f"B{number}"))
        block.register_forward_hook(partial(note, f"F{number}"))
        if is_checkpointed:
            block.forward = partial(run_again, number, block.forward)
    for _ in range(2):
        held.clear()
        optimizer.zero_grad()
        with alive:
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        del logits
        optimizer.step()
    return held


def draw_memory_over_time() -> str:
    """Draws memory-time.svg."""
    picture = Picture(
        "What a rank holds during one step",
        "A column is the end of a block's forward (F) or backward (B); time runs to the right. Forward piles up "
        "activations, and backward frees them while gradients grow. With checkpointing a block keeps only its input, "
        "and its forward runs again (R) just before its backward: one block at a time has all of its activations.",
        f"a step of a GPT of {BLOCKS} blocks on the CPU, all tensors counted",
    )
    y = picture.legend(MARGIN, picture.top + 8, _KINDS)
    steps = [("without checkpointing", count_step(is_checkpointed=False)), ("with checkpointing", count_step(True))]
    highest = max(sum(moment[1:]) for _, held in steps for moment in held)
    for title, held in steps:
        y = _draw_step(picture, y, title, held, highest)
    return picture.svg(y)


def _draw_step(picture: Picture, y: float, title: str, held: list[Moment], highest: int) -> float:
    top, most = y + 22, max(sum(moment[1:]) for moment in held)
    picture.text(MARGIN, y + 8, title, "name ink")
    picture.text(WIDTH - MARGIN, y + 8, f"at most {most / 2**20:.1f} MiB beside the parameters", "small soft end")
    width, floor = (WIDTH - MARGIN - _LEFT) / len(held), top + _TALL * most / highest
    for place, moment in enumerate(held):
        base, x = floor, _LEFT + place * width
        for (kind, _), size in zip(_KINDS, moment[1:], strict=True):
            tall = size / highest * _TALL
            picture.box(x, base - tall, width - 2, tall, kind)
            base -= tall
        picture.text(x + width / 2 - 1, floor + 14, moment.name, "tiny soft mid")
    picture.line(_LEFT, floor, WIDTH - MARGIN, floor)
    return floor + 36
