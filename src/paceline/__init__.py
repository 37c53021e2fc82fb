"""Paceline trains PyTorch models on many devices, and tells you before you start how it will go.

The public names, and nothing else. They are loaded on first use, so that ``import paceline`` and the command line
do not pay for torch before it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.classic.analysis import DistributedTrainingAnalyzer as DistributedTrainingAnalyzer
    from paceline.classic.communication import CommunicationOptimizer as CommunicationOptimizer
    from paceline.classic.simulated import MockDistributedTrainer as MockDistributedTrainer
    from paceline.classic.simulated import SimulatedTrainer as SimulatedTrainer
    from paceline.classic.trainer import DistributedConfig as DistributedConfig
    from paceline.classic.trainer import DistributedTrainer as DistributedTrainer
    from paceline.comm.torch_dist import connect as connect
    from paceline.comm.virtual.communicator import run_virtual as run_virtual
    from paceline.engines.apply import parallelize as parallelize
    from paceline.models.mlp import MLPClassifier as MLPClassifier
    from paceline.rehearse.planning import plan as plan
    from paceline.run.self_watch import watch as watch
    from paceline.verify.certificate import verify as verify

_HOMES = {
    "connect": "paceline.comm.torch_dist",
    "run_virtual": "paceline.comm.virtual.communicator",
    "parallelize": "paceline.engines.apply",
    "watch": "paceline.run.self_watch",
    "verify": "paceline.verify.certificate",
    "plan": "paceline.rehearse.planning",
    "DistributedConfig": "paceline.classic.trainer",
    "DistributedTrainer": "paceline.classic.trainer",
    "SimulatedTrainer": "paceline.classic.simulated",
    "MockDistributedTrainer": "paceline.classic.simulated",
    "DistributedTrainingAnalyzer": "paceline.classic.analysis",
    "CommunicationOptimizer": "paceline.classic.communication",
    "MLPClassifier": "paceline.models.mlp",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
