"""Paceline trains PyTorch models on many devices, and tells you before you start how it will go.

The public names, and nothing else. They are loaded on first use, so that ``import paceline`` and the command line
do not pay for torch before it is needed.
"""

from __future__ import annotations

import sys
from types import ModuleType

from paceline_classic import HOMES

__version__ = "0.1.0"

TYPE_CHECKING = False  # True to type checkers; typing takes longer to load than all of this
if TYPE_CHECKING:
    from typing import Any

    from paceline import classic as classic
    from paceline import errors as errors
    from paceline import learn as learn
    from paceline.checkpoint.writer import load as load
    from paceline.checkpoint.writer import save as save
    from paceline.comm.base import Communicator as Communicator
    from paceline.comm.objects import gather as gather
    from paceline.comm.objects import mean as mean
    from paceline.comm.torch_dist import disconnect as disconnect
    from paceline.comm.virtual.communicator import run_virtual as run_virtual
    from paceline.config.load import load_config as load_config
    from paceline.data.own_loader import loader as loader
    from paceline.data.own_loader import shard as shard
    from paceline.engines.apply import parallelize as parallelize
    from paceline.engines.engine import Engine as Engine
    from paceline.models.attention import attention as attention
    from paceline.models.attention import positions as positions
    from paceline.models.mlp import MLPClassifier as MLPClassifier
    from paceline.plan.layout import Compression as Compression
    from paceline.plan.layout import Layout as Layout
    from paceline.plan.layout import Offload as Offload
    from paceline.rehearse.planning import plan as plan
    from paceline.rehearse.prediction import predict as predict
    from paceline.run.own_loop import connect as connect
    from paceline.run.own_loop import run_ranks as run_ranks
    from paceline.run.own_loop import setup_distributed as setup_distributed
    from paceline.run.own_loop import watch as watch
    from paceline.run.own_loop import watch_ranks as watch_ranks
    from paceline.run.own_run import Run as Run
    from paceline.run.train import train as train
    from paceline.train.muon.muon import Muon as Muon
    from paceline.train.run_state import WeightAverage as WeightAverage
    from paceline.verify.certificate import verify as verify
    from paceline_classic import *  # noqa: F403

_NAMES = {
    "paceline.run.own_loop": ("connect", "run_ranks", "watch_ranks", "watch", "setup_distributed"),
    "paceline.run.own_run": ("Run",),
    "paceline.comm.torch_dist": ("disconnect",),
    "paceline.comm.base": ("Communicator",),
    "paceline.engines.apply": ("parallelize",),
    "paceline.plan.layout": ("Layout", "Offload", "Compression"),
    "paceline.engines.engine": ("Engine",),
    "paceline.data.own_loader": ("loader", "shard"),
    "paceline.comm.objects": ("mean", "gather"),
    "paceline.train.run_state": ("WeightAverage",),
    "paceline.train.muon.muon": ("Muon",),
    "paceline.checkpoint.writer": ("save", "load"),
    "paceline.comm.virtual.communicator": ("run_virtual",),
    "paceline.verify.certificate": ("verify",),
    "paceline.config.load": ("load_config",),
    "paceline.run.train": ("train",),
    "paceline.rehearse.planning": ("plan",),
    "paceline.rehearse.prediction": ("predict",),
    "paceline": ("errors", "learn", "classic"),
    "paceline.models.attention": ("attention", "positions"),
    "paceline.models.mlp": ("MLPClassifier",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names} | HOMES

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    import importlib  # here: a command that Ctrl-C ends while Python loads this file ends with a traceback

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}; it offers {', '.join(__all__)}")
    is_module = home == "paceline"
    value = importlib.import_module(f"{home}.{name}") if is_module else getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Face(ModuleType):
    """Keeps a function public where a room has the same name: ``paceline.plan`` is the function, always.

    Python sets a package's attribute when a module below it is imported; here the public name wins.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in _HOMES and _HOMES[name] != "paceline":
            return
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, ...]:
        """Lets a function of a notebook that names this module travel to other processes: they import it."""
        return __import__, (self.__name__,)


sys.modules[__name__].__class__ = _Face
