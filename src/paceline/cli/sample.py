"""``paceline sample``: text from the language model of a run."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import typer

from paceline.cli.options import grouped, print_json
from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """How tokens are drawn."""

    tokens: int = typer.Option(200, min=1, help="The most tokens that are written.")
    temperature: float = typer.Option(0.8, min=0.0, help="0: the most likely token always; 1: as the model says.")
    top_k: int = typer.Option(0, min=0, help="Draw among so many of the most likely tokens.  [default: all]")
    seed: int = typer.Option(0, min=0, help="The same seed writes the same text.")


@grouped
def sample(
    run: str = typer.Argument(metavar="RUN", help="A run's folder, or a checkpoint: the newest whole one is taken."),
    prompt: str = typer.Option("\n", help="The text that the model goes on from."),
    *,
    drawn: DrawOptions,
    device: str = typer.Option("auto", help="cpu, cuda, or auto."),
    ranks: int = typer.Option(1, min=1, help="CPU ranks that hold a part of the model each; for GPUs see below."),
    spread: str = typer.Option(
        "fsdp", metavar="fsdp|tensor", help="What a part is: of all parameters, or of each layer."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print prompt, text and tokens as JSON."),
) -> None:
    """Write text with the language model of a run."""
    import torch

    from paceline.cli.checkpoint import find_any
    from paceline.comm.solo import SoloCommunicator
    from paceline.comm.torch_dist import connect, disconnect, launched_rank
    from paceline.run.processes import run_processes
    from paceline.terminal import echo
    from paceline.train.sampling import SampleOptions, write_together

    if spread not in ("fsdp", "tensor"):
        raise UsageError(f"--spread {spread}\n  it is fsdp or tensor")
    options = SampleOptions(**asdict(drawn))
    checkpoint = find_any(run)
    work: tuple[Any, ...] = (checkpoint, prompt, options, spread)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        written = write_together(connect(device=None if device == "auto" else device), *work)
        disconnect()
    elif ranks > 1:
        if device == "cuda":
            raise UsageError(
                f"--ranks {ranks} with --device cuda\n  it starts CPU ranks\n"
                f"  on GPUs: torchrun --standalone --nproc-per-node {ranks} -m paceline sample {run}"
            )
        written = run_processes(write_together, ranks, args=work)[0]
    else:
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        written = write_together(SoloCommunicator(torch.device(chosen)), *work)
    if launched_rank() != 0:
        return
    if as_json:
        facts = {"checkpoint": str(checkpoint), "prompt": prompt, "text": written.text, "tokens": written.tokens}
        print_json(facts)
    else:
        echo(prompt + written.text)
