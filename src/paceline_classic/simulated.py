"""The trainer of a machine that one has not got: the run of a config on virtual ranks, as an object.

trainer = SimulatedTrainer(config, cluster="4x a100-sxm")
trainer.setup_model_and_data()
metrics = trainer.train()                  # real losses and accuracy, times of the ranks' clocks
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from paceline.cluster.devices import Cluster, load_cluster
from paceline.config import Config
from paceline.errors import UsageError
from paceline.records.console import ProgressView
from paceline.records.summary import RunRecords
from paceline.rehearse.simulate.recording import write_records, write_trace
from paceline.rehearse.simulate.run import ComputeKind, Conditions, Simulation, check_conditions, prepare, simulate
from paceline.train.assemble import DataAndModel, build_workload
from paceline.train.trainer import Trainer
from paceline_classic.analysis import TrainingMetrics
from paceline_classic.config import DistributedConfig

_GPU = "a100-sxm-80gb"
_STEPS_ALONE = 20


class SimulatedTrainer:
    """Trains on virtual ranks in this process, with a clock for each.

    ``config`` has the ranks: ``DistributedConfig.world_size``, or a config's ``parallel.ranks``. ``cluster`` is whose
    network they have ("4x dgx-h100"). ``compute`` is "measured" here, or "modelled" for the cluster's device. Without
    either, a DistributedConfig with ``backend = "nccl"``, its default, is simulated on as many A100, modelled; any
    other config on processes of one host, measured. ``slow`` multiplies the compute of ranks: {2: 1.5}. ``device`` is
    where it really runs. It evaluates after each epoch, unless a config says otherwise.
    """

    def __init__(
        self,
        config: DistributedConfig | Config,
        *,
        cluster: str | Cluster | None = None,
        compute: ComputeKind | None = None,
        slow: Mapping[int, float] | None = None,
        slow_links: Mapping[int, float] | None = None,
        device: str | None = None,
    ) -> None:
        if not isinstance(config, DistributedConfig | Config):
            raise UsageError(f"config is of type {type(config).__name__}\n  it is a DistributedConfig, or a Config")
        asked = config.to_config() if isinstance(config, DistributedConfig) else config
        is_for_gpus = isinstance(config, DistributedConfig) and config.backend == "nccl"
        self._is_on_gpus = cluster is None and is_for_gpus and compute != "measured"
        if self._is_on_gpus:
            cluster, compute = f"{asked.parallel.decided_ranks}x {_GPU}", compute or "modelled"
        place = load_cluster(cluster) if isinstance(cluster, str) else cluster
        self.config = prepare(asked, device=device, cluster=place)
        self.conditions = Conditions(
            cluster=place,
            backend=asked.comm.backend,
            compute=compute or "measured",
            slow=dict(slow or {}),
            slow_links=dict(slow_links or {}),
        )
        check_conditions(self.config, self.conditions)
        self.simulation: Simulation | None = None
        self._workload: DataAndModel | None = None

    def setup_model_and_data(self) -> None:
        """Builds the data and the model: what is wrong with them is told here. ``train`` calls it if nobody did."""
        self._workload = build_workload(self.config)
        if self.config.train.eval_every is None and self._workload.data.eval is not None:
            self.config = self.config.with_values("train", eval_every="epoch")

    @property
    def model(self) -> nn.Module:
        """The model, with the values that training left. Raises UsageError before there is one."""
        if self._workload is None:
            raise UsageError("there is no model yet\n  call setup_model_and_data() or train() first")
        return self._workload.model

    def train(self, folder: str | Path | None = None) -> TrainingMetrics:
        """Trains from the start and returns metrics by epoch; leaves a run's records in ``folder``, if given."""
        if self._workload is None:
            self.setup_model_and_data()
        with contextlib.closing(ProgressView(after_s=5.0)) as view:
            self.simulation = simulate(self.config, self.conditions, view=view, watch=self._keep)
        if folder is not None:
            write_records(self.simulation.records, Path(folder), self.simulation.hosts)
        records, alone = RunRecords.of(self.simulation.records, self.simulation.hosts), None
        batch, rest = divmod(records.run.global_batch, len(records.ranks))
        if self._is_on_gpus and not rest:  # one rank with the batch of a rank, for the analyzer to compare with
            one = self.config.with_values("parallel", ranks=1, node_ranks=None)
            one = one.with_values("train", steps=_STEPS_ALONE, epochs=None, global_batch=batch, eval_every=None)
            conditions = replace(self.conditions, slow={}, slow_links={})
            alone = TrainingMetrics(RunRecords.of(simulate(one, conditions).records))
        return TrainingMetrics(records, alone)

    def write_trace(self, path: str | Path) -> None:
        """Writes the time line of the training, for Chrome or Perfetto. Raises UsageError before there is one."""
        if self.simulation is None:
            raise UsageError("there is no time line yet\n  call train() first")
        write_trace(Path(path), self.simulation.clocks, self.simulation.steps)

    def _keep(self, rank: int, trainer: Trainer) -> None:
        """Takes the trained values over; all ranks take part."""
        state = trainer.parts.engine.full_state_dict(rank0_only=True)
        if rank == 0 and state is not None:
            if any(parameter.is_meta for parameter in self.model.parameters()):
                self.model.to_empty(device="cpu")
            self.model.load_state_dict(state)


MockDistributedTrainer = SimulatedTrainer
