"""The kernels of a call as a dry run notes them, so that what is measured is what is priced later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from paceline.cluster.operations import Operation
from paceline.rehearse.dryrun.operators import Operators


def recorded(call: Callable[[], object]) -> list[Operation]:
    """Runs a call, and returns its kernels as a dry run notes them."""
    recorder = _KernelRecorder()
    with recorder:
        call()
    return recorder.operations


class _KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._operators = Operators(lambda tensor: int(tensor.untyped_storage()._cdata))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        self.operations += self._operators.kernels(func, args, kwargs or {}, result)
        return result
