"""``paceline bench``: ours beside the best of the others on this machine, in turns in one run; and how runs scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli.options import ConfigPath, Overrides, check_file, check_picture, load_and_tell
from paceline.errors import UsageError
from paceline.terminal import echo
from paceline_bench.output import Rows, show_record

Output = Annotated[Path | None, typer.Option(callback=check_file, help="Also write the record here, row after row.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds in which every arm takes a turn.", min=2)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record as JSON.")]
tell = partial(echo, err=True)  # what is measured now
Models = Annotated[str | None, typer.Option(help="Comma-separated: mlp, gpt-11m on a CPU; gpt-124m, gpt-1.1b on CUDA.")]


def check_device(device: str, fix: str = "use cpu, or cuda on a machine with a GPU") -> None:
    """Raises UsageError for a device that is not here."""
    import torch

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"--device {device} is not here\n  {fix}")


def chosen_of(option: str, text: str | None, known: Sequence[str], where: str = "") -> list[str]:
    """Returns the words of an option, or all that there are. Raises UsageError for others."""
    wanted = words_of(text) or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(f"{option} {','.join(unknown)}: {where}they are {', '.join(known)}")
    return wanted


def numbers_of(option: str, text: str | None) -> list[int]:
    """Returns the numbers of an option such as ``1,2,4``. Raises UsageError for other words."""
    if wrong := [word for word in words_of(text) if not word.isdigit()]:
        raise UsageError(f"{option} {','.join(wrong)}: give whole numbers, with commas between them")
    return [int(word) for word in words_of(text)]


def words_of(text: str | None) -> list[str]:
    """Returns the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


class _Benchmarks(TyperGroup):
    """Tells who looks for another benchmark where it may be."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None:
            what = f"paceline bench {cmd_name}: there is no such benchmark"
            fix = "what Paceline's authors measure is in its repository: python bench --help"
            raise UsageError(f"{what}\n  they are {', '.join(self.commands)}\n  {fix}")
        return found


app = typer.Typer(cls=_Benchmarks, no_args_is_help=True, help="Time ours beside the others, and see how runs scale.")


@app.command()
def scaling(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: str = typer.Option("1,2,4", help="Comma-separated numbers of ranks."),
    strategies: str = typer.Option(None, help="Comma-separated: ddp, zero1, zero2, fsdp, pipeline; else the config's."),
    batch_sizes: str = typer.Option("64", help="Comma-separated: global batch (strong), samples of a rank (weak)."),
    modes: str = typer.Option("strong,weak", help="strong: the batch stays; weak: the samples of a rank stay."),
    steps: int = typer.Option(20, min=6, help="Steps of each run."),
    predict_to: int = typer.Option(0, min=0, help="Also predict for 1, 2, 4, ... up to so many ranks of --cluster."),
    cluster: str = typer.Option("dgx-h100", help="Whose devices and links predictions have."),
    plot: Path = typer.Option(None, callback=check_picture, metavar="FILE", help="Draw speed-up; .svg and .pdf too."),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """See how a config scales with ranks, each row labelled."""
    import torch

    from paceline.cluster.devices import load_cluster
    from paceline_bench.scaling import MODES, STRATEGIES, bench_scaling, cases, draw_rows, own_strategy

    loaded = load_and_tell(config, overrides).config
    counts, batches = numbers_of("--ranks", ranks), numbers_of("--batch-sizes", batch_sizes)
    if not counts or not batches or 0 in counts + batches:
        raise UsageError("--ranks and --batch-sizes\n  they are numbers from 1 on\n  try --ranks 1,2 --batch-sizes 64")
    spread = chosen_of("--strategies", strategies or own_strategy(loaded), STRATEGIES)
    gpus = 0 if loaded.parallel.device == "cpu" else torch.cuda.device_count()
    todo = cases(counts, spread, batches, chosen_of("--modes", modes, MODES), gpus=gpus, to=predict_to)
    where = load_cluster(f"1x {cluster}") if predict_to else None
    settings = {"config": str(config), "overrides": overrides or [], "steps": steps, "cluster": cluster}
    rows = bench_scaling(loaded, todo, steps, where, tell)
    show_record("scaling", settings, [rows], output, as_json=as_json)
    if plot is not None:
        draw_rows(rows, plot, f"{loaded.name}: speed-up over ranks")


@app.command()
def engines(
    models: Models = None,
    device: str = typer.Option("cpu", help="cpu or cuda."),
    ranks: int = typer.Option(2, help="Gloo ranks on a CPU, beside world size 1; with --cluster, its GPUs.", min=2),
    cluster: str | None = typer.Option(None, metavar="NAME", help="One of --ranks GPUs, its links emulated."),
    arms: str = typer.Option(None, help="Only arms whose name contains one of these words, and their peers."),
    rounds: Rounds = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time a step of every engine beside torch DDP and FSDP2."""
    import torch

    from paceline.cluster.devices import load_cluster
    from paceline_bench import arms as known_arms
    from paceline_bench.arms import CPU_WORKLOADS, CUDA_WORKLOADS, check_words
    from paceline_bench.engines import bench_bf16, bench_fp32
    from paceline_bench.on_links import bench_on_links

    check_device(device)
    where = None if cluster is None else load_cluster(cluster)
    if where is not None and (device == "cpu" or where.device.is_cpu):
        fix = "on a machine with a GPU, add --device cuda, and name a cluster of GPUs"
        raise UsageError(f"--cluster {cluster} with --device {device}\n  what is emulated are links of GPUs\n  {fix}")
    known = CUDA_WORKLOADS if device == "cuda" else CPU_WORKLOADS
    wanted, words = chosen_of("--models", models, list(known), f"on {device} "), words_of(arms)
    on_cpu = [arm for name in wanted for arm in known_arms.arms_on_ranks(known[name][0], ranks)]
    on_gpu = known_arms.arms_in_bf16() if where is None else known_arms.arms_on_links()
    check_words([arm.name for arm in (on_gpu if device == "cuda" else [*known_arms.arms_alone(), *on_cpu])], words)
    protocols = {name: replace(known[name][1], rounds=rounds or known[name][1].rounds) for name in wanted}

    def measure() -> Iterator[Rows]:
        for name, protocol in protocols.items():
            workload = known[name][0]
            if where is not None:
                tell(f"{name} on one of {ranks} GPUs of {where.name}, with emulated links ...")
                yield bench_on_links(workload, protocol, where, ranks, torch.device("cuda", 0), words)
            elif device == "cuda":
                tell(f"{name} at world size 1 in bf16 ...")
                yield bench_bf16(workload, protocol, torch.device("cuda", 0), words)
            else:
                tell(f"{name} on {ranks} Gloo ranks ...")
                yield bench_fp32(workload, protocol, ranks, words)
                tell(f"{name} at world size 1 ...")
                yield bench_fp32(workload, protocol, 1, words)

    timed = {name: asdict(protocol) for name, protocol in protocols.items()}
    settings: dict[str, Any] = {"device": device, "protocols": timed}
    if where is not None:
        settings |= {"links": f"emulated: {where.name}", "ranks": ranks}
    show_record("engines", settings, measure(), output, as_json=as_json)


@app.command()
def comm(
    ranks: int = typer.Option(2, help="Ranks on this machine, with one thread each.", min=2),
    sizes: str = typer.Option(None, help="Comma-separated bytes, such as 1024,1048576; default: 1 KiB to 64 MiB."),
    rounds: Rounds = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time all-reduce by backend, algorithm and size beside Gloo."""
    from paceline_bench.comm import SIZES, bench_comm

    wanted = numbers_of("--sizes", sizes) or list(SIZES)
    tell(f"{len(wanted)} sizes on {ranks} ranks ...")
    settings = {"device": "cpu", "ranks": ranks, "sizes": wanted, "dtype": "float32", "op": "avg"}
    show_record("comm", settings, [bench_comm(ranks, wanted, rounds)], output, as_json=as_json)


@app.command()
def gpu(
    models: str = typer.Option(None, help="Comma-separated: gpt-124m, gpt-1.1b, gpt-10m, resnet50; default: all."),
    arms: str = typer.Option(None, help="Only arms whose name contains one of these words, and the plain loops."),
    rounds: int = typer.Option(2, help="Rounds in which every arm takes a turn.", min=1),
    steps: int = typer.Option(None, help="Steps of a turn that are timed, after its warm-up.", min=2),
    device: str = typer.Option("cuda", help="cuda; cpu: a trial with tiny models, whose figures mean nothing."),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time paceline train beside the best loops of a user on one GPU."""
    from paceline_bench.arms import check_words
    from paceline_bench.gpu.arms import arms_of, bench_gpu
    from paceline_bench.gpu.loops import workloads_on

    check_device(device, "run it where torch reaches a GPU; --device cpu tries the machinery with tiny models")
    known = workloads_on(device)
    wanted, words = chosen_of("--models", models, list(known), f"on {device} "), words_of(arms)
    workloads = [known[name] for name in wanted]
    check_words([arm.name for each in workloads for arm in arms_of(each)], words)
    settings: dict[str, Any] = {"device": device, "models": wanted, "rounds": rounds, "steps": steps}
    settings["turns"] = {each.model: {"steps": steps or each.steps, "warm_up": each.warm_up} for each in workloads}

    def measure() -> Iterator[Rows]:
        for workload in workloads:
            tell(f"{workload.model} ...")
            yield bench_gpu(workload, rounds, steps, words, tell)

    show_record("gpu", settings, measure(), output, as_json=as_json)
