"""Mixtures of experts on one GPU beside those of others: python bench/experts_speed.py --output FILE.

    layer   forward and backward of one layer, compiled, with the same weights and input: ours; torchtitan's (``titan``;
            ``titan after``: weights of tokens behind the experts; ``titan unpadded``: no rows of padding); and that of
            transformers' Olmoe over one kernel (``grouped``) and over a loop (``loop``). Outputs are compared.
    model   a step of configs/gpt_moe_7b.yaml, 6.9 billion weights of which 1.3 are active. ``train`` is the command as
            it stands, with masters in fp32. The others are a plain loop over one compiled graph with fused AdamW on
            bf16 weights, without masters: our model; our model with torchtitan's layers; Olmoe of transformers.
    small   configs/gpt_124m.yaml through ``paceline train``: dense, and with eight experts of which two take a token,
            half as wide each, so that as many weights are active.

torchtitan is read from the path, of which ``models/moe`` is used. Each arm of a model has a process of its own, and
they take turns; an arm that fails has its error as its row.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.config import load_config
from paceline.config.sections import RouterConfig, gpt_shape
from paceline.models.experts import Mixture
from paceline.models.gpt import GPT, gpt_config
from paceline.plan.model_shape import ModelShape
from paceline.records.records import StepRecord, read_records
from paceline_bench.timing import BenchRecord, Turns, interleave

ROOT = Path(__file__).parents[1]
LARGE, DENSE = ROOT / "configs" / "gpt_moe_7b.yaml", ROOT / "configs" / "gpt_124m.yaml"
MIXED = ("model.experts=8", "model.active=2", "model.expert_width=1536")
LAYERS = {"64 of 1024, top 8": (2048, 1024, 64, 8, 16_384), "8 of 1536, top 2": (768, 1536, 8, 2, 32_768)}
LAYER_ARMS = ("paceline", "titan", "titan after", "titan unpadded", "transformers grouped", "transformers loop")
MODEL_ARMS = ("train", "paceline loop", "titan", "titan unpadded", "transformers")
BEST = 0.05  # outputs may differ by this share of their size: in 16 bits a token's last expert can be another one


def shape_of(width: int, inner: int, experts: int, active: int) -> ModelShape:
    sizes: dict[str, Any] = {"width": width, "heads": 8, "kv_heads": 8, "mlp_width": inner, "expert_width": inner}
    return gpt_config("gpt-124m", experts=experts, active=active, router=RouterConfig(), mlp="swiglu", **sizes)


def titan_layer(shape: ModelShape, arm: str) -> nn.Module:
    titan: Any = importlib.import_module("torchtitan.models.moe.moe")

    if "unpadded" in arm:
        titan.indices_padding_wrapper = lambda run: run
    # fmt: off
    arguments = titan.MoEArgs(
        num_experts=shape.experts, num_shared_experts=0, score_func="softmax", route_norm=True, top_k=shape.active,
        use_grouped_mm=True, load_balance_coeff=None, score_before_experts="after" not in arm,
    )
    # fmt: on
    layer: nn.Module = titan.MoE(arguments, shape.width, shape.expert_width or shape.mlp_width)
    return layer


def olmoe_config(shape: ModelShape, implementation: str) -> Any:
    from transformers import OlmoeConfig

    # fmt: off
    config = OlmoeConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.width, intermediate_size=shape.expert_width,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_experts=shape.experts,
        num_experts_per_tok=shape.active, norm_topk_prob=True, max_position_embeddings=shape.context,
        tie_word_embeddings=False, use_cache=False,
    )
    # fmt: on
    config._attn_implementation, config._experts_implementation = "sdpa", implementation
    return config


def make_layer(arm: str, shape: ModelShape, ours: Mixture) -> nn.Module:
    """Returns a layer with the weights of ours."""
    if arm == "paceline":
        return ours
    gate, up = ours.experts.first.detach().chunk(2, dim=1)
    if arm.startswith("titan"):
        layer = titan_layer(shape, arm)
        own = {"experts.w1": gate, "experts.w3": up, "experts.w2": ours.experts.last}
        layer.load_state_dict(own | {"router.gate.weight": ours.router.weight}, strict=False)
    else:
        olmoe: Any = importlib.import_module("transformers.models.olmoe.modeling_olmoe")
        layer = olmoe.OlmoeSparseMoeBlock(olmoe_config(shape, "grouped_mm" if "grouped" in arm else "eager"))
        own = {"experts.gate_up_proj": ours.experts.first, "experts.down_proj": ours.experts.last}
        layer.load_state_dict(own | {"gate.weight": ours.router.weight})
    return layer.to(gate.device, gate.dtype)


def time_layers(names: list[str]) -> Iterator[dict[str, Any]]:
    for title, (width, inner, experts, active, tokens) in LAYERS.items():
        torch.manual_seed(0)
        shape = shape_of(width, inner, experts, active)
        with torch.device("cuda"):
            ours = Mixture(shape, None, 0.02, 0.02)
        nn.init.normal_(ours.router.weight, std=0.05)
        ours.to(torch.bfloat16)
        x = torch.randn(8, tokens // 8, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        toward, expected, arms = torch.randn_like(x), None, dict[str, Callable[[], None]]()
        failed = []
        for name in names:
            try:
                layer = make_layer(name, shape, ours)
                run = torch.compile(layer)
                out = run(x)
                out.backward(toward)
                expected = out.detach() if expected is None else expected
                off = float((out.detach() - expected).float().norm() / expected.float().norm())
                is_other = name in ("titan", "titan unpadded")  # weights ahead of the experts: another function
                assert off < BEST or is_other, f"{name} computes something else: outputs are off by {off:.1%}"
            except Exception as error:  # of other people's code
                failed.append({"part": "layer", "layer": title, "arm": name, "error": str(error)[-300:]})
                continue
            arms[name] = partial(step_layer, run, layer, x, toward)
        yield from failed
        turns = Turns(rounds=10, steps_per_turn=5, warm_up=3)
        for timing in interleave(arms, turns, baseline="paceline", device=torch.device("cuda")):
            yield {"part": "layer", "layer": title, **timing.to_json(), "tokens": tokens}


def step_layer(run: Any, layer: nn.Module, x: Tensor, toward: Tensor) -> None:
    run(x).backward(toward)
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None


def train(config: Path, *settings: str, steps: int = 24) -> dict[str, Any]:
    """Runs ``paceline train`` and returns its median step, without those that compile and record."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = (f"train.steps={steps}", "checkpoint.at_end=false", "optim.schedule.warmup=2", "data.samples=512")
        where = ("parallel.device=cuda", "parallel.ranks=1", f"monitor.folder={folder}", "name=bench")
        command = [sys.executable, "-m", "paceline", "train", str(config), *fixed, *where, *settings, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": (done.stderr or done.stdout)[-600:]}
        found = Path(folder) / "bench"
        steps_of = [each for each in read_records(found / "records" / "rank-0.jsonl") if isinstance(each, StepRecord)]
        timed = steps_of[10:]
        row: dict[str, Any] = {"step_ms": round(1e3 * statistics.median(each.step_s for each in timed), 3)}
        row["mfu"] = round(statistics.median(each.mfu or 0.0 for each in timed), 4)
        row["peak_gib"] = round(max(each.peak_bytes or 0 for each in timed) / 2**30, 2)
        row["loss"] = timed[-1].loss
        expected = json.loads((found / "prediction.json").read_text())
        row["predicted_ms"] = round(1e3 * float(expected.get("step_s") or 0), 3)
        return row


def loop(arm: str) -> dict[str, Any]:
    """Times a plain loop over one compiled graph, in this process."""
    torch.manual_seed(0)
    config: Any = load_config(LARGE)
    model_config: Any = gpt_shape(config.model)
    shape: Any = dataclasses.replace(model_config, context=config.data.context)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        if arm == "transformers":
            import transformers

            make: Any = transformers.OlmoeForCausalLM
            model: Any = make(olmoe_config(shape, "grouped_mm"))
        else:
            model = GPT(shape)
        if arm.startswith("titan"):
            for block in model.layers:
                block.mlp = make_layer(arm, shape, block.mlp)
        torch.set_default_dtype(torch.float32)
    batch = config.train.global_batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, fused=True)
    tokens = torch.randint(shape.vocab_size, (batch, shape.context + 1), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    compiled: Any = torch.compile(model)

    def step() -> Tensor:
        if arm == "transformers":
            loss = compiled(input_ids=inputs, labels=inputs).loss
        else:
            loss = compiled(inputs, targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return cast("Tensor", loss)

    for _ in range(4):
        loss = step()
    torch.cuda.synchronize()
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"step_ms": round(1e3 * statistics.median(times), 3), "peak_gib": round(peak, 2), "loss": float(loss)}


def in_a_process(arm: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--arm", arm], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-600:]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def time_models(names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            row = train(LARGE) if name == "train" else in_a_process(name)
            yield {"part": "model", "arm": name, "round": turn, **row}


def time_small(rounds: int) -> Iterator[dict[str, Any]]:
    for turn in range(rounds):
        for name, settings in (("dense", ()), ("mixture", MIXED)):
            yield {"part": "small", "arm": name, "round": turn, **train(DENSE, *settings, steps=60)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="layer,model,small")
    parser.add_argument("--layer-arms", default=",".join(LAYER_ARMS))
    parser.add_argument("--model-arms", default=",".join(MODEL_ARMS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--arm", help="one arm of the model, in this process; prints its row")
    asked = parser.parse_args()
    if asked.arm:
        print(json.dumps(loop(asked.arm)))
        return
    parts = {
        "layer": lambda: time_layers(asked.layer_arms.split(",")),
        "small": lambda: time_small(asked.rounds),
        "model": lambda: time_models(asked.model_arms.split(","), asked.rounds),
    }
    rows: list[dict[str, Any]] = []
    for part in asked.parts.split(","):
        for row in parts[part]():
            rows.append(row)
            print(row, flush=True)
            if asked.output:
                command, config = " ".join(["python", *sys.argv]), {"device": torch.cuda.get_device_name()}
                BenchRecord(name="experts", command=command, rows=rows, config=config).write(asked.output)


if __name__ == "__main__":
    main()
