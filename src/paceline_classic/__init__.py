"""The classes that the product grew from: a trainer, a simulated one, a monitor, an analyzer; on top of all else.

Scripts take them from ``paceline.classic``, and from ``paceline`` if they were written before. They are loaded there on
first use: ``HOMES`` says from which module.
"""

from __future__ import annotations

TYPE_CHECKING = False  # True to type checkers
if TYPE_CHECKING:
    from typing import Any

    from paceline_classic.analysis import DistributedTrainingAnalyzer as DistributedTrainingAnalyzer
    from paceline_classic.communication import CommunicationOptimizer as CommunicationOptimizer
    from paceline_classic.communication import auto_scale_batch_size as auto_scale_batch_size
    from paceline_classic.communication import cleanup_distributed as cleanup_distributed
    from paceline_classic.communication import compress_gradients as compress_gradients
    from paceline_classic.monitor import DistributedMonitor as DistributedMonitor
    from paceline_classic.simulated import MockDistributedTrainer as MockDistributedTrainer
    from paceline_classic.simulated import SimulatedTrainer as SimulatedTrainer
    from paceline_classic.trainer import DistributedConfig as DistributedConfig
    from paceline_classic.trainer import DistributedTrainer as DistributedTrainer
    from paceline_classic.trainer import EnhancedDistributedTrainer as EnhancedDistributedTrainer

HOMES = {
    "DistributedConfig": "paceline_classic.trainer",
    "DistributedTrainer": "paceline_classic.trainer",
    "EnhancedDistributedTrainer": "paceline_classic.trainer",
    "DistributedMonitor": "paceline_classic.monitor",
    "SimulatedTrainer": "paceline_classic.simulated",
    "MockDistributedTrainer": "paceline_classic.simulated",
    "DistributedTrainingAnalyzer": "paceline_classic.analysis",
    "CommunicationOptimizer": "paceline_classic.communication",
    "cleanup_distributed": "paceline_classic.communication",
    "compress_gradients": "paceline_classic.communication",
    "auto_scale_batch_size": "paceline_classic.communication",
}


def __getattr__(name: str) -> Any:
    import importlib  # here, as in ``paceline``

    if name not in HOMES:
        raise AttributeError(f"module 'paceline.classic' has no attribute {name!r}; it offers {', '.join(__dir__())}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(HOMES)
