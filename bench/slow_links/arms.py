"""What is measured on the links: collectives, gradients in one piece or in many, compression, and training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.cluster.costs import Placement
from paceline.comm.algorithms.communicator import AlgorithmCommunicator
from paceline.comm.algorithms.rounds import state_topology
from paceline.comm.base import BucketShape, Communicator
from paceline.comm.compress import Compressor
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.layout import Compression
from paceline.shards import flat_layout
from slow_links.theory import Way
from slow_links.turns import Arm

ALPHA = "one element"
BUCKETED, ONE_BY_ONE, IN_FLIGHT = "bucketed", "per parameter, one by one", "per parameter, all in flight"
PLAIN, COMPUTE = "none", "compute alone"
_VOCABULARY, _CONTEXT, _BATCH = 512, 16, 1
_GRADIENT_STD = 4e-4  # so that a threshold of 1e-3 keeps about one element in a hundred


class Workbench:
    """Makes arms for one rank: the communicators that they use, and the model."""

    def __init__(self, comm: Communicator, where: Placement) -> None:
        self._comm = comm
        self._where = where

    def all_reduces(self, num_bytes: int, ways: Sequence[Way]) -> list[Arm]:
        """One all-reduce of float32, by each algorithm."""
        return [self._arm(way, way, _reducing(torch.zeros(num_bytes // 4))) for way in ways]

    def bucketing(self) -> list[Arm]:
        """The gradients of the model in one bucket, or by themselves; and what an all-reduce costs without bytes."""
        gradients = [torch.zeros(p.shape) for p in make_model().parameters()]
        flat = torch.zeros(sum(each.numel() for each in gradients))

        def one_by_one(comm: Communicator) -> None:
            for each in gradients:
                comm.all_reduce(each).wait()

        def in_flight(comm: Communicator) -> None:
            for work in [comm.all_reduce(each) for each in gradients]:
                work.wait()

        return [
            self._arm(ALPHA, "native", _reducing(torch.zeros(1))),
            self._arm(BUCKETED, "native", _reducing(flat)),
            self._arm(ONE_BY_ONE, "native", one_by_one),
            self._arm(IN_FLIGHT, "native", in_flight),
        ]

    def compressions(self, policies: Sequence[Compression]) -> list[Arm]:
        """The gradients of the model in one bucket, as each policy exchanges them; uncompressed first."""
        named = dict(make_model().named_parameters())
        layout = flat_layout([tuple(p.shape) for p in named.values()])
        shape = BucketShape(names=tuple(named), layout=layout)
        generator = torch.Generator().manual_seed(self._comm.rank)
        gradient = torch.randn(layout.length, generator=generator) * _GRADIENT_STD
        arms = [self._arm(PLAIN, "native", _reducing(gradient.clone()))]
        return arms + [self._arm(name_of(each), "native", _compressing(each, shape, gradient)) for each in policies]

    def trainings(self, policies: Sequence[Compression]) -> list[Arm]:
        """Whole training steps of data parallelism, and one without any communication."""
        hierarchical: list[Way] = ["hierarchical"] if self._where.hosts > 1 else []
        arms = [self._training(way, way) for way in ("native", "ring", *hierarchical)]
        arms.append(self._training(ONE_BY_ONE, "native", bucket_mb=0.0))
        arms += [self._training(name_of(each), "native", compression=each) for each in policies]
        return [*arms, self._torch_training(), self._training(COMPUTE, "native", is_alone=True)]

    def _wrap(self, way: Way) -> TracedCommunicator:
        topology = state_topology(self._where.ranks, self._where.node_ranks)
        inner = self._comm if way == "native" else AlgorithmCommunicator(self._comm, way, topology)
        return TracedCommunicator(inner, Trace(self._comm.device))  # outside: it sees collectives, not messages

    def _arm(self, name: str, way: Way, run: Callable[[Communicator], None]) -> Arm:
        traced = self._wrap(way)
        return Arm(name=name, run=lambda: run(traced), trace=traced.trace, way=way)

    def _training(
        self,
        name: str,
        way: Way,
        *,
        bucket_mb: float = 25.0,
        compression: Compression | None = None,
        is_alone: bool = False,
    ) -> Arm:
        traced, model = self._wrap(way), make_model()
        compressor = None if compression is None else Compressor(compression)
        engine: Engine = parallelize(
            model, traced, bucket_mb=bucket_mb, first_bucket_mb=min(bucket_mb, 1.0), compressor=compressor
        )
        step = _Step(engine, list(engine.parameters()), self._comm.rank)

        def alone() -> None:
            with engine.no_sync():
                step()

        return Arm(name=name, run=alone if is_alone else step, trace=traced.trace, way=way)

    def _torch_training(self) -> Arm:
        model = make_model()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        parameters = list(model.parameters())
        num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        step = _Step(wrapped, parameters, self._comm.rank)
        return Arm(name="torch DDP", run=step, known_bytes={"all_reduce": float(num_bytes)})


class _Step:
    """One training step on a batch of this rank's own."""

    def __init__(self, forward: Callable[..., torch.Tensor], parameters: list[nn.Parameter], rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(0, _VOCABULARY, (_BATCH, _CONTEXT + 1), generator=generator)
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)
        self._forward = forward
        self._optimizer = torch.optim.SGD(parameters, lr=1e-3)

    def __call__(self) -> None:
        logits = self._forward(self._inputs)
        F.cross_entropy(logits.view(-1, _VOCABULARY), self._targets).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def make_model() -> nn.Module:
    """Builds a GPT of 1.3 million parameters in some 50 tensors, the same on every rank."""
    torch.manual_seed(0)
    return GPT(gpt_config(layers=6, heads=4, width=128, context=_CONTEXT, vocab_size=_VOCABULARY))


def name_of(policy: Compression) -> str:
    """Returns a policy's name with the number that matters to it."""
    match policy.policy:
        case "topk" | "randomk":
            return f"{policy.policy} {policy.ratio:.1%}"
        case "powersgd":
            return f"powersgd rank {policy.factor_rank}"
        case "threshold":
            return f"threshold {policy.threshold:g}"
        case name:
            return name


def _reducing(tensor: torch.Tensor) -> Callable[[Communicator], None]:
    return lambda comm: comm.all_reduce(tensor).wait()


def _compressing(settings: Compression, shape: BucketShape, gradient: torch.Tensor) -> Callable[[Communicator], None]:
    compressor = Compressor(settings)
    (bucket,) = compressor.bind([shape])
    buffer = torch.empty_like(gradient)

    def run(comm: Communicator) -> None:
        buffer.copy_(gradient)
        bucket.start(buffer, comm).wait()
        compressor.end_pass()

    return run
