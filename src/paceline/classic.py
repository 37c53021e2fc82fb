"""The class names of earlier versions, which are classes of ``paceline_classic``.

Scripts take them from here. The package itself has them too, for scripts that were written before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    import paceline

    if name not in __dir__():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__dir__())}")
    return getattr(paceline, name)


def __dir__() -> list[str]:
    import paceline

    return sorted(name for name, home in paceline._HOMES.items() if home.startswith("paceline_classic."))
