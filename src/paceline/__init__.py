"""Paceline trains PyTorch models on many devices, and tells you before you start how it will go.

The public names, and nothing else. They are loaded on first use, so that ``import paceline`` and the command line
do not pay for torch before it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.analysis import DistributedTrainingAnalyzer as DistributedTrainingAnalyzer
    from paceline.comm.optimizer import CommunicationOptimizer as CommunicationOptimizer
    from paceline.comm.torch_dist import connect as connect
    from paceline.comm.virtual import run_virtual as run_virtual
    from paceline.launch.beside import watch as watch
    from paceline.models.mlp import MLPClassifier as MLPClassifier
    from paceline.parallel.apply import parallelize as parallelize
    from paceline.parity.certificate import verify as verify
    from paceline.planning import plan as plan
    from paceline.simulate.trainer import MockDistributedTrainer as MockDistributedTrainer
    from paceline.simulate.trainer import SimulatedTrainer as SimulatedTrainer
    from paceline.train.facade import DistributedConfig as DistributedConfig
    from paceline.train.facade import DistributedTrainer as DistributedTrainer

_HOMES = {
    "connect": "paceline.comm.torch_dist",
    "run_virtual": "paceline.comm.virtual",
    "parallelize": "paceline.parallel.apply",
    "watch": "paceline.launch.beside",
    "verify": "paceline.parity.certificate",
    "plan": "paceline.planning",
    "DistributedConfig": "paceline.train.facade",
    "DistributedTrainer": "paceline.train.facade",
    "SimulatedTrainer": "paceline.simulate.trainer",
    "MockDistributedTrainer": "paceline.simulate.trainer",
    "DistributedTrainingAnalyzer": "paceline.analysis",
    "CommunicationOptimizer": "paceline.comm.optimizer",
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
