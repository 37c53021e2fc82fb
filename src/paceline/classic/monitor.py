"""Numbers of a training loop of one's own, as lines of JSON and as curves in TensorBoard.

monitor = DistributedMonitor(log_dir="./logs")
for batch in loader:
    ...
    monitor.log_training_step(loss=loss, batch_size=32, step_time=0.1, comm_time=0.01)
"""

from __future__ import annotations

import time
import warnings
import weakref
from pathlib import Path
from typing import SupportsFloat

from paceline.comm.torch_dist import launched_rank
from paceline.records.host import open_gpus
from paceline.records.records import EventRecord
from paceline.records.sinks import Fanout, JsonlSink, Sink, TensorBoardSink


class DistributedMonitor:
    """Logs steps: each rank to ``log_dir/rank-R.jsonl``, rank 0 to TensorBoard as well.

    Rank 0 also measures the GPUs of its host, once a second at most: ``hw.gpu.utilization/0`` and others, which are
    missing where NVML does not answer.

    Sends nothing, so that ranks may log at different steps. Files are closed when the process ends, or by ``close``.
    ``rank`` is the number of this rank, where no launcher says it.
    """

    def __init__(self, log_dir: str | Path = "./logs", rank: int | None = None) -> None:
        self.log_dir = Path(log_dir)
        self.num_steps = 0
        rank = launched_rank() if rank is None else rank
        sinks: list[Sink] = [JsonlSink(self.log_dir / f"rank-{rank}.jsonl")]
        if rank == 0:
            try:
                sinks.append(TensorBoardSink(self.log_dir))
            except ImportError:
                warnings.warn(
                    f"DistributedMonitor writes {self.log_dir}/rank-0.jsonl alone: tensorboard is not installed\n"
                    "  for its curves: pip install tensorboard",
                    stacklevel=2,
                )
        self._gpus = open_gpus()[0] if rank == 0 else None
        self._measured_s = float("-inf")
        self._sink = Fanout(sinks)
        self.close = weakref.finalize(self, self._sink.close)  # once: when asked to, or at the end of the process

    def log_training_step(
        self, loss: SupportsFloat, batch_size: int, step_time: float, comm_time: float = 0.0, step: int | None = None
    ) -> None:
        """Logs a step of this rank: its mean loss, its samples, its seconds, and the seconds waited for other ranks.

        Samples a second are those of ``step_time``. Steps count from 1 where ``step`` is not given.
        """
        self.num_steps = self.num_steps + 1 if step is None else step
        values = {
            "train/loss": float(loss),
            "train/samples": float(batch_size),
            "time/step_s": float(step_time),
            "time/comm_s": float(comm_time),
            "speed/samples_per_s": batch_size / step_time if step_time > 0 else 0.0,
        }
        if self._gpus is not None and time.monotonic() - self._measured_s >= 1.0:
            self._measured_s = time.monotonic()
            values |= self._gpus.read()
        self._sink.write(EventRecord(name="scalars", step=self.num_steps, detail=values, time=time.time()))
