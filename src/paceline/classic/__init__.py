"""The class names of the documents that the product grew from, on top of everything else.

Scripts take them from here. The package itself has them too, for scripts that were written before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.classic.analysis import DistributedTrainingAnalyzer as DistributedTrainingAnalyzer
    from paceline.classic.communication import CommunicationOptimizer as CommunicationOptimizer
    from paceline.classic.communication import auto_scale_batch_size as auto_scale_batch_size
    from paceline.classic.communication import cleanup_distributed as cleanup_distributed
    from paceline.classic.communication import compress_gradients as compress_gradients
    from paceline.classic.monitor import DistributedMonitor as DistributedMonitor
    from paceline.classic.simulated import MockDistributedTrainer as MockDistributedTrainer
    from paceline.classic.simulated import SimulatedTrainer as SimulatedTrainer
    from paceline.classic.trainer import DistributedConfig as DistributedConfig
    from paceline.classic.trainer import DistributedTrainer as DistributedTrainer
    from paceline.classic.trainer import EnhancedDistributedTrainer as EnhancedDistributedTrainer


def __getattr__(name: str) -> Any:
    import paceline

    if name not in __dir__():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__dir__())}")
    return getattr(paceline, name)


def __dir__() -> list[str]:
    import paceline

    return sorted(name for name, home in paceline._HOMES.items() if home.startswith(f"{__name__}."))
