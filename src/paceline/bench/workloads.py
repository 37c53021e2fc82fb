"""What the arms of a benchmark train on, and for how long they take turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paceline.bench.interleave import Turns
from paceline.models.gpt import GPT, gpt_config
from paceline.models.mlp import MLPClassifier


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWorkload:
    """A model and a batch that all arms train on."""

    model: str
    batch: int
    context: int = 0
    tied: bool | None = None  # whether a GPT's output layer uses the embedding's weight; None: as its size has it

    @property
    def items(self) -> int:
        """Samples or tokens of a batch."""
        return self.batch * max(self.context, 1)

    def make_model(self, device: torch.device) -> nn.Module:
        """Builds the model with fixed weights."""
        torch.manual_seed(0)
        if self.model == "mlp":
            return MLPClassifier(784, 512, 10, dropout=0.0).to(device)
        with device:
            return GPT(gpt_config(self.model, dropout=0.0, tied=self.tied))

    def make_batch(self, device: torch.device, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes a rank's batch."""
        generator = torch.Generator().manual_seed(rank)
        if self.model == "mlp":
            inputs = torch.randn(self.batch, 784, generator=generator)
            return inputs.to(device), torch.randint(0, 10, (self.batch,), generator=generator).to(device)
        vocab = gpt_config(self.model).vocab_size
        tokens = torch.randint(0, vocab, (self.batch, self.context + 1), generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


CPU_WORKLOADS = {
    "mlp": (BenchWorkload(model="mlp", batch=64), Turns(rounds=40, steps_per_turn=20, warm_up=10)),
    "gpt-11m": (BenchWorkload(model="gpt-11m", batch=4, context=128), Turns(rounds=12, steps_per_turn=2, warm_up=3)),
}
CUDA_WORKLOADS = {
    "gpt-124m": (
        BenchWorkload(model="gpt-124m", batch=32, context=1024),
        Turns(rounds=10, steps_per_turn=3, warm_up=4),
    ),
    "gpt-1.1b": (BenchWorkload(model="gpt-1.1b", batch=8, context=2048), Turns(rounds=8, steps_per_turn=2, warm_up=4)),
}
