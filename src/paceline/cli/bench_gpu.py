"""``paceline bench gpu``: ``paceline train`` beside the best loops that a user would write, on one GPU."""

from __future__ import annotations

from typing import Any

import typer

from paceline.cli.bench_options import AsJson, Output, chosen_of, show_record, tell, words_of
from paceline.errors import UsageError


def gpu(
    models: str = typer.Option(None, help="Comma-separated: gpt-124m, gpt-1.1b, gpt-10m, resnet50; default: all."),
    arms: str = typer.Option(None, help="Only arms whose name contains one of these words, and the plain loops."),
    rounds: int = typer.Option(2, help="Rounds in which every arm takes a turn.", min=1),
    steps: int = typer.Option(None, help="Steps of a turn that are timed, after its warm-up.", min=2),
    losses: bool = typer.Option(False, "--losses", help="Loss curves of fp8 beside bf16 on real text, instead."),
    device: str = typer.Option("cuda", help="cuda; cpu: a trial with tiny models, whose figures mean nothing."),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time paceline train beside the best loops of a user on one GPU.

    The loops compile the whole model with its loss: with autocast, with bf16 parameters and fp32 masters, with CUDA
    graphs; Accelerate, Lightning and torchao's fp8 where they are installed. Ours: the engine alone, and the command
    `paceline train` on the configs that ship. Each arm trains in a process of its own, in turns; the ratio to the best
    plain loop of the same round is what counts, below 1 is faster.

    Examples:

      paceline bench gpu --output gpu.json

      paceline bench gpu --models gpt-124m,gpt-10m --arms masters,graphs,train --rounds 1

      paceline bench gpu --losses --models gpt-1.1b --steps 500
    """
    import torch

    from paceline.bench.gpu.arms import announced_rows, check_arms
    from paceline.bench.gpu.workloads import workloads_on

    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(
            f"--device {device}: torch reaches no such device here\n  this benchmark times one GPU\n"
            "  run it on a machine with a GPU (paceline doctor tells what is missing), or try the machinery with tiny "
            "models: --device cpu"
        )
    known = workloads_on(device)
    wanted, words = chosen_of("--models", models, list(known), f"on {device} "), words_of(arms)
    workloads = [known[name] for name in wanted]
    check_arms(workloads, words)
    settings: dict[str, Any] = {"device": device, "models": wanted, "rounds": rounds, "steps": steps}
    if losses:
        from paceline.bench.gpu.losses import bench_losses

        count = steps or 500
        precisions = ("bf16_master", "fp8") if device == "cuda" else ("fp32", "bf16")
        names = wanted if models else ["gpt-1.1b" if device == "cuda" else "gpt-tiny"]
        chosen = [known[name] for name in names if known[name].unit == "tokens"]
        settings |= {"steps": count, "models": [each.model for each in chosen]}
        batches = (bench_losses(each, count, precisions, tell) for each in chosen)
        show_record("gpu losses", settings, batches, output, as_json=as_json)
        return
    settings["turns"] = {each.model: {"steps": steps or each.steps, "warm_up": each.warm_up} for each in workloads}
    show_record("gpu", settings, announced_rows(workloads, rounds, steps, words, tell), output, as_json=as_json)
