"""The verbs of ``python bench``: what Paceline's authors measure, and records in ``bench/results`` come from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import typer

from measures.options import announced, check_scratch, show_record
from paceline.cli.bench import AsJson, Models, Output, Rounds, check_device, chosen_of, numbers_of, tell, words_of
from paceline.cli.options import ConfigPath, Overrides
from paceline.errors import UsageError
from paceline_bench.output import Rows

app = typer.Typer(
    no_args_is_help=True,
    help="Measure what records in bench/results hold: ours beside the others, and what parts of ours cost.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def loop(
    rounds: Rounds = None,
    ranks: int = typer.Option(2, help="Gloo ranks with one thread each.", min=1),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time what the trainer adds to a bare step.

    That is timing, records, the log, samples of the host and hooks.

    Example:  python bench loop --rounds 300
    """
    from measures.loop import PROTOCOLS, bench_loop

    protocols = {name: replace(turns, rounds=rounds or turns.rounds) for name, turns in PROTOCOLS.items()}
    settings = {"device": "cpu", "protocols": {name: asdict(turns) for name, turns in protocols.items()}}
    batches = (bench_loop(name, protocols[name], ranks) for name in announced(protocols))
    show_record("loop", settings, batches, output, as_json=as_json)


@app.command()
def muon(
    models: str = typer.Option(
        None, help="Comma-separated: gpt-mini (the default), gpt-11m on a CPU; gpt-124m on CUDA."
    ),
    device: str = typer.Option("cpu", help="cpu, or cuda: one GPU, in bf16 with fp32 masters, compiled."),
    ranks: int = typer.Option(2, help="Gloo ranks with one thread each, on a CPU.", min=1),
    strategies: str = typer.Option("ddp,fsdp", help="Comma-separated: ddp, zero1, zero2, fsdp."),
    rounds: Rounds = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time a step with Muon beside the same step with AdamW.

    Examples:

      python bench muon

      python bench muon --device cuda --strategies ddp
    """
    import torch

    from measures.muon import CPU, CUDA, bench_muon

    check_device(device)
    known = CUDA if device == "cuda" else CPU
    wanted = chosen_of("--models", models or next(iter(known)), list(known), f"on {device} ")
    spread = chosen_of("--strategies", strategies, ["ddp", "zero1", "zero2", "fsdp"])
    asked = {
        n: replace(known[n], turns=replace(known[n].turns, rounds=rounds or known[n].turns.rounds)) for n in wanted
    }
    where = torch.device("cuda", 0) if device == "cuda" else None
    settings = {"device": device, "ranks": ranks, "workloads": {name: asdict(each) for name, each in asked.items()}}

    def measure() -> Iterator[Rows]:
        for name, each in asked.items():
            for strategy in spread:
                tell(f"{name}, {strategy} ...")
                yield bench_muon(each, ranks, strategy, where)

    show_record("muon", settings, measure(), output, as_json=as_json)


@app.command()
def memory(
    device: str = typer.Option("cuda", help="cuda, or cpu: there tensors are counted, without activations."),
    budget_gb: float = typer.Option(8.0, help="Memory of the device that may be used, in GiB; 0: all of it."),
    host_gb: float = typer.Option(64.0, help="Memory of the host that offload may use, in GiB."),
    size: str = typer.Option("gpt-1.1b", help="The GPT whose layers are repeated; its width stays."),
    context: int = typer.Option(2048, help="Tokens of the one sample of a step.", min=2),
    options: str = typer.Option(None, help="Only rows whose name contains one of these words."),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest GPT that trains within a memory budget.

    For each strategy and option, layers are added until a real training step runs out of memory.

    Examples:

      python bench memory --budget-gb 8 --host-gb 64

      python bench memory --budget-gb 0 --options ddp,checkpointed

      python bench memory --device cpu --budget-gb 0.05 --size gpt-nano --context 32
    """
    import torch

    from measures.memory import Family, bench_memory, make_budget, select_options

    check_device(device)
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    chosen = {option.name: option for option in select_options(words_of(options))}
    family, budget = Family(size=size, context=context), make_budget(where, budget_gb or None, host_gb)
    family.config(layers=1)  # a size that is not there is told before anything runs
    config = {"device": device, "budget_bytes": budget.device_bytes, "host_bytes": budget.host_bytes}
    config |= {"size": size, "batch": 1, "context": context}
    batches = ([bench_memory(chosen[name], family, budget, where)] for name in announced(chosen))
    show_record("memory", config, batches, output, as_json=as_json)


@app.command()
def compression(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: int = typer.Option(2, help="Virtual ranks.", min=2),
    steps: int = typer.Option(100, help="Steps under each policy.", min=4),
    ratio: float = typer.Option(None, help="Share of elements that topk and randomk send.", min=1e-6, max=1.0),
    rank: int = typer.Option(None, help="Columns of a factor of powersgd.", min=1),
    threshold: float = typer.Option(None, help="Smallest element that threshold sends.", min=1e-30),
    both: bool = typer.Option(False, "--both", help="Each policy without error feedback as well."),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """See which gradient compression pays, and on which links.

    Trains the config's model for a few steps under each policy on virtual ranks, beside the run without compression:
    bytes, loss, what is still owed, what compressing costs, and the link speed below which that is worth it.

    Examples:

      python bench compression configs/digits.yaml

      python bench compression configs/digits.yaml --ratio 0.005 --ranks 4 --steps 100 --both
    """
    from measures.compression import bench_compression
    from paceline.config import load_config

    loaded = load_config(config, list(overrides or []))
    numbers = {"ratio": ratio, "factor_rank": rank, "threshold": threshold}
    settings = {"config": str(config), "overrides": overrides or [], "ranks": ranks, "steps": steps, "device": "cpu"}
    given = {name: number for name, number in numbers.items() if number is not None}
    rows = bench_compression(loaded, ranks, steps, given, both=both)
    show_record("compression", settings, [rows], output, as_json=as_json)


@app.command()
def convergence(
    configs: list[Path] = typer.Argument(None, metavar="CONFIG", help="YAML files; none: digits, a small GPT."),
    ranks: int = typer.Option(2, help="Virtual ranks.", min=2),
    seeds: int = typer.Option(3, help="Runs of each arm, with seeds of their own.", min=1),
    workers: int = typer.Option(2, help="Runs at a time, each on one core.", min=1),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """See where training ends under each gradient compression.

    Trains each config to its end on virtual ranks: without compression, and with top-k 1 %, random-k 5 %, PowerSGD of
    rank 4, 8 bits and signs, after a tenth of the steps without; each with error feedback and without. The evaluation
    set says how far from the uncompressed run each of them ends.

    Examples:

      python bench convergence

      python bench convergence configs/digits.yaml --seeds 5 --json
    """
    from measures.convergence import bench_convergence
    from paceline.config import load_config

    chosen = list(configs or []) or [Path("configs/digits.yaml"), Path("configs/gpt_small.yaml")]
    loaded = [load_config(each, []) for each in chosen]  # all of them before anything runs
    settings = {"configs": [str(each) for each in chosen], "ranks": ranks, "seeds": seeds, "device": "cpu"}
    batches = (bench_convergence(config, ranks, seeds, workers, tell) for config in loaded)
    show_record("convergence", settings, batches, output, as_json=as_json)


@app.command()
def pipeline(
    parts: str = typer.Option(None, help="Comma-separated: speed, features, modelled, bubbles; default: all."),
    arms: str = typer.Option(None, help="Speed: only arms whose name contains one of these words, and their peers."),
    model: str = typer.Option("gpt-11m", help="The GPT that is cut over two ranks."),
    context: int = typer.Option(128, help="Tokens of a sample.", min=2),
    microbatches: int = typer.Option(8, help="Microbatches of a step, of one sample each.", min=2),
    rounds: int = typer.Option(None, help="Speed: rounds in which every arm takes a turn.", min=2),
    steps: int = typer.Option(None, help="Features: steps that are timed.", min=2),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time our pipeline beside torch.distributed.pipelining.

    Speed: a training step under every schedule on two Gloo ranks, ours on Gloo and on shared memory; the arms take
    turns in one run, and their losses must agree. Features: throughput and memory of one rank, a pipeline, ZeRO 2 and
    data parallelism. Modelled: the same on four GPUs, by formulas. Bubbles: every schedule against a clock, beside its
    formula.

    Examples:

      python bench pipeline --json

      python bench pipeline --parts speed --arms gpipe,1f1b --rounds 24

      python bench pipeline --parts modelled,bubbles
    """
    from measures.pipeline import PARTS, bench_part, make_workload
    from measures.pipeline_arms import pipeline_arms
    from paceline_bench.arms import check_words

    wanted, words = chosen_of("--parts", parts, PARTS), words_of(arms)
    check_words([arm.name for arm in pipeline_arms()], words)
    asked = make_workload(model, context, microbatches, rounds=rounds, steps=steps)
    settings = {"device": "cpu", "ranks": 2, "parts": wanted, **asdict(asked)}
    batches = (bench_part(part, asked, words) for part in announced(wanted))
    show_record("pipeline", settings, batches, output, as_json=as_json)


@app.command()
def checkpoint(
    size: str = typer.Option("gpt-11m", help="The GPT whose parameters and AdamW state are saved."),
    layers: int = typer.Option(None, help="With so many layers instead.", min=1),
    ranks: int = typer.Option(2, help="Gloo ranks that save, with one thread each.", min=1),
    load_ranks: str = typer.Option("1,3", help="Comma-separated: numbers of ranks that load it."),
    rounds: int = typer.Option(8, help="Rounds in which every arm takes a turn.", min=2),
    folder: str = typer.Option(
        None, callback=check_scratch, help="The disk to write to.  [default: where temporary files go]"
    ),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time saves and loads of a sharded state beside torch's DCP.

    DCP is torch's distributed checkpoints. A GPT with AdamW's state under full sharding: saved at once and in the
    background, how long training stands still, how much memory that takes, and loaded into other numbers of ranks. The
    arms take turns in one run; the ratio to DCP is what counts. Goals are printed beside it.

    Both write to the same disk with fsync, and keep the memory that a save in the background is copied to. Not alike:
    ours hashes all that it writes, and collects its shards within the time; DCP's state dict is made before its time
    begins, and its writer has its default of one thread for each rank.

    Examples:

      python bench checkpoint --json

      python bench checkpoint --size gpt-nano --rounds 2
    """
    from measures.checkpoint import FAIRNESS, CheckpointWorkload, bench_checkpoint

    others = tuple(numbers_of("--load-ranks", load_ranks))
    work = CheckpointWorkload(size=size, layers=layers, ranks=ranks, load_ranks=others, rounds=rounds, folder=folder)
    settings = {"device": "cpu", "fairness": FAIRNESS, **asdict(work)}
    del settings["folder"]
    show_record("checkpoint", settings, [bench_checkpoint(work, tell)], output, as_json=as_json)


@app.command()
def load(
    mib: int = typer.Option(1024, help="About so many MiB of weights.", min=1),
    dtype: str = typer.Option("float32", help="float32 or bfloat16: of the files, and of what is loaded."),
    ranks: int = typer.Option(2, help="Gloo ranks that load, with one thread each.", min=2),
    rounds: int = typer.Option(3, help="Rounds in which every arm takes a turn.", min=1),
    folder: str = typer.Option(
        None, callback=check_scratch, help="The disk to write to.  [default: where temporary files go]"
    ),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time how a Hugging Face folder gets into sharded ranks.

    A Llama of random weights, loaded by fresh processes into full sharding: ours, Accelerate's way (where it is
    installed), and from_pretrained on every rank with torch's fully_shard; time, and the most memory that a rank needs.

    Examples:

      python bench load

      python bench load --mib 64 --dtype bfloat16 --rounds 2 --json
    """
    from measures.load import FAIRNESS, LoadWorkload, bench_load

    (chosen,) = chosen_of("--dtype", dtype, ["float32", "bfloat16"])
    work = LoadWorkload(mib=mib, dtype=chosen, ranks=ranks, rounds=rounds, folder=folder)
    settings = {"device": "cpu", "fairness": FAIRNESS, **asdict(work)}
    del settings["folder"]
    show_record("load", settings, [bench_load(work, tell)], output, as_json=as_json)


@app.command()
def ledger(
    blocks: int = typer.Option(60, help="Blocks of ten steps that each arm takes, in turns.", min=1),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time what the ledger costs, and that own loops are watched.

    The ledger is where every rank writes each operation down.

    An operation alone, and steps of two ranks: without the ledger, with it, and watched as after `connect()`.

    Examples:

      python bench ledger

      python bench ledger --blocks 20 --json
    """
    from measures.loop import BATCH, BLOCK, WIDTH, bench_ledger

    settings = {"device": "cpu", "ranks": 2, "width": WIDTH, "batch": BATCH, "block": BLOCK, "blocks": blocks}
    show_record("ledger", settings, [bench_ledger(blocks)], output, as_json=as_json)


@app.command()
def restart(
    device: str = typer.Option("cpu", help="cpu: a small classifier on Gloo; cuda: a compiled GPT-124M on NCCL."),
    ranks: int = typer.Option(2, help="Ranks: of one thread each, or on the first GPU together.", min=2),
    rounds: int = typer.Option(5, help="Rounds in which every arm takes a turn.", min=1),
    arms: str = typer.Option(None, help="Only arms whose name contains one of these words."),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time how long a killed rank stops a run.

    From SIGKILL to the first new step: with processes that stay, without, and beside torchrun.

    Examples:

      python bench restart

      python bench restart --ranks 4 --rounds 3 --json

      python bench restart --device cuda --rounds 1
    """
    from measures.restart import bench_restart, restart_arms
    from paceline_bench.arms import check_words

    known, words = restart_arms(device), words_of(arms)
    check_words([arm.name for arm in known], words)
    chosen = [arm for arm in known if not words or any(word in arm.name for word in words)]
    settings = {"device": device, "ranks": ranks, "rounds": rounds}
    rows = bench_restart(chosen, ranks, rounds, os.environ, tell)
    show_record("restart", settings, [rows], output, as_json=as_json)


@app.command()
def predict(
    device: str = typer.Option("cpu", help="cpu: two ranks; cuda: world size 1 in bf16."),
    cluster: str = typer.Option(
        None, help="An entry of this machine, or a file of one.  [default: cpu-host, or measured now on cuda]"
    ),
    models: Models = None,
    arms: str = typer.Option(None, help="Only arms whose name contains one of these words."),
    steps: int = typer.Option(None, help="Steps that are timed.  [default: 20 on cuda, 30 on a CPU]", min=3),
    entry: Path = typer.Option(None, help="Also write what was measured of the device to this file."),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Set predicted beside measured steps of this machine.

    Compares step time, and on a GPU peak memory. Every arm is predicted first, by a dry run that is priced with what
    `paceline calibrate` measured of this device, and run then. On a CPU: two ranks under ddp, zero1 and fsdp, over Gloo
    and over shared memory. On CUDA: the GPTs of `paceline bench engines` at world size 1, eager and compiled, under ddp
    and fsdp.

    Examples:

      python bench predict --output predict-cpu.json

      python bench predict --device cuda --entry mine.yaml --output predict-gpu.json

      python bench predict --cluster mine.yaml --models mlp --arms gloo
    """
    from measures.predict import arms_on, bench_predict, clusters, only
    from paceline_bench.arms import CPU_WORKLOADS, CUDA_WORKLOADS, check_words

    check_device(device)
    known = list(CUDA_WORKLOADS if device == "cuda" else CPU_WORKLOADS)
    wanted, words = chosen_of("--models", models, known, f"on {device} "), words_of(arms)
    check_words([arm.name for arm in arms_on(device)], words)
    chosen = only(arms_on(device), wanted, words)
    count = steps or (20 if device == "cuda" else 30)
    found = clusters(device, cluster, entry, tell)
    settings = {"device": device, "cluster": found.name, "steps": count, "measured": found.measured}
    batches = ([row] for row in bench_predict(chosen, device, found.of, steps=count, tell=tell))
    show_record("predict", settings, batches, output, as_json=as_json)


@app.command()
def prepare(
    tokenizers: str = typer.Option("bpe,char,bytes", help="Comma-separated: bpe, char, bytes, or folders."),
    mib: int = typer.Option(64, help="MiB of text: the sources of Python's library, again and again.", min=1),
    rounds: int = typer.Option(3, help="Rounds in which both arms take a turn.", min=1),
    folder: str = typer.Option(
        None, callback=check_scratch, help="Where to write.  [default: where temporary files go]"
    ),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time `paceline data prepare` beside the tokenizer alone.

    Both take all cores. The tokenizer finds the text in memory; the command starts, reads, encodes, hashes and writes.

    Examples:

      python bench prepare

      python bench prepare --tokenizers ~/models/gpt2 --mib 256 --rounds 5
    """
    from measures.data import PrepareWorkload, bench_prepare

    wanted = words_of(tokenizers)
    for name in wanted:
        if name not in ("bpe", "char", "bytes") and not (Path(name).expanduser() / "tokenizer.json").is_file():
            raise UsageError(
                f"--tokenizers {name}: no such tokenizer\n  they are bpe, char, bytes, or folders with a tokenizer.json"
            )
    chosen = tuple(name if name in ("bpe", "char", "bytes") else str(Path(name).expanduser()) for name in wanted)
    work = PrepareWorkload(mib=mib, rounds=rounds, tokenizers=chosen, folder=folder)
    settings = {"device": "cpu", **asdict(work)}
    del settings["folder"]
    show_record("prepare", settings, [bench_prepare(work, tell)], output, as_json=as_json)


@app.command()
def tokens(
    model: str = typer.Option("gpt-11m", help="A GPT by its size."),
    batch: int = typer.Option(4, help="Samples of a step.", min=1),
    context: int = typer.Option(128, help="Tokens of a sample.", min=1),
    workers: str = typer.Option("0,1", help="Comma-separated: numbers of loader workers."),
    steps: int = typer.Option(30, help="Steps that are counted, after a few to warm up.", min=2),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Measure how long a run on prepared tokens waits for its data.

    One rank with one thread trains a GPT on files of tokens.

    Example:  python bench tokens --workers 1 --steps 200
    """
    from measures.data import TokensWorkload, bench_tokens

    counts = tuple(numbers_of("--workers", workers))
    work = TokensWorkload(model=model, batch=batch, context=context, steps=steps, workers=counts)
    show_record("tokens", {"device": "cpu", **asdict(work)}, [bench_tokens(work, tell)], output, as_json=as_json)


@app.command()
def losses(
    models: str = typer.Option(None, help="Comma-separated GPTs of `paceline bench gpu`.  [default: gpt-1.1b]"),
    steps: int = typer.Option(500, help="Steps in each precision.", min=2),
    device: str = typer.Option("cuda", help="cuda; cpu: a trial with tiny models, whose figures mean nothing."),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Set loss curves of fp8 beside bf16, on real text.

    Example:  python bench losses --models gpt-1.1b --steps 500
    """
    from measures.losses import bench_losses
    from paceline_bench.gpu.loops import workloads_on

    check_device(device)
    known = {name: each for name, each in workloads_on(device).items() if each.unit == "tokens"}
    default = "gpt-1.1b" if device == "cuda" else "gpt-tiny"
    wanted = chosen_of("--models", models or default, list(known), f"on {device} ")
    precisions = ("bf16_master", "fp8") if device == "cuda" else ("fp32", "bf16")
    settings = {"device": device, "models": wanted, "steps": steps}
    batches = (bench_losses(known[name], steps, precisions, tell) for name in wanted)
    show_record("gpu losses", settings, batches, output, as_json=as_json)


@app.command()
def emulated(
    cases: str = typer.Option(None, help="Comma-separated, such as 124m/8,70b/64-100g; default: all twelve."),
    device: str = typer.Option("cuda", help="cuda; cpu: a trial with tiny models, whose figures mean nothing."),
    modes: str = typer.Option(None, help="Comma-separated: eager, compiled; default: both, on a CPU eager."),
    arms: str = typer.Option(None, help="Only arms whose name contains one of these words, and their peers."),
    strategies: str = typer.Option("ddp,fsdp", help="Of the runs beside their dry runs; none: without them."),
    rounds: Rounds = None,
    case_limit: float = typer.Option(150.0, help="Seconds after which a case is ended.", min=1),
    limit: float = typer.Option(520.0, help="Seconds after which no other case begins.", min=1),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time engines beside torch's on links that one GPU emulates.

    Twelve cases: four models on 8 and 64 GPUs with 400 Gbit/s a card, and on 64 with 100. Each has a process of its
    own, and the record is written after each.

    Examples:

      python bench emulated --cases 124m/8,124m/64,124m/64-100g

      python bench emulated --device cpu --cases 7b/8 --rounds 2
    """
    from measures.emulated import CASES, TURNS, EmulatedCases, bench_emulated
    from paceline_bench.arms import arms_on_links, check_words

    check_device(device, "run it where torch reaches a GPU; --device cpu tries the machinery with tiny models")
    wanted, words = chosen_of("--cases", cases, CASES), words_of(arms)
    check_words([arm.name for arm in arms_on_links()], words)
    how = chosen_of("--modes", modes or ("eager" if device == "cpu" else None), ["eager", "compiled"])
    spread = [] if strategies == "none" else chosen_of("--strategies", strategies, ["ddp", "zero1", "zero2", "fsdp"])
    asked = EmulatedCases(
        device=device,
        turns=replace(TURNS, rounds=rounds or TURNS.rounds),
        words=words or None,
        modes=how,
        strategies=spread,
        case_limit_s=case_limit,
    )
    settings = {**asdict(asked), "workloads": {case: asdict(asked.workload(case)) for case in wanted}}
    show_record("emulated", settings, bench_emulated(wanted, asked, limit, tell), output, as_json=as_json)


@app.command()
def nccl(
    models: str = typer.Option(None, help="Comma-separated: 29m, 160m, 62m; default: all."),
    ranks: str = typer.Option("2,4", help="Comma-separated: numbers of ranks that share the GPU."),
    device: str = typer.Option("cuda", help="cuda; cpu: a trial over Gloo with tiny models."),
    arms: str = typer.Option(None, help="Only arms whose name contains one of these words, and their peers."),
    emulates: bool = typer.Option(True, "--emulated/--no-emulated", help="Also with links as they were measured."),
    rounds: Rounds = None,
    limit: float = typer.Option(300.0, help="Seconds after which a model's ranks are ended.", min=1),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time engines beside torch's over NCCL, on ranks that share a GPU.

    Each rank is a host of its own to NCCL, which then talks over sockets. Its collectives are measured, and the same
    arms run once more on emulated links that take as long.

    Examples:

      python bench nccl --ranks 2

      python bench nccl --device cpu --models 29m --ranks 2 --rounds 2
    """
    from measures.nccl import TURNS, WORKLOADS, NcclCases, bench_nccl
    from paceline_bench.arms import arms_on_links, check_words

    check_device(device, "run it where torch reaches a GPU; --device cpu tries the machinery with tiny models")
    wanted, counts, words = chosen_of("--models", models, list(WORKLOADS)), numbers_of("--ranks", ranks), words_of(arms)
    if not counts or min(counts) < 2:
        raise UsageError(f"--ranks {ranks}\n  between two ranks and more there is something to send\n  try --ranks 2,4")
    check_words([arm.name for arm in arms_on_links()], words)
    turns = replace(TURNS, rounds=rounds or TURNS.rounds)
    asked = NcclCases(device=device, turns=turns, words=words or None, emulates=emulates, timeout_s=limit)
    settings = {**asdict(asked), "workloads": {name: asdict(WORKLOADS[name]) for name in wanted}}
    cases = {f"{name} on {count} ranks": (name, count) for count in counts for name in wanted}
    batches = (bench_nccl(*cases[name], asked) for name in announced(cases))
    show_record("nccl", settings, batches, output, as_json=as_json)
