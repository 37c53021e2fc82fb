"""What ``paceline train`` decides before any process starts, what it says about it, and what ranks find afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.cli.train import show_result
from paceline.config import Config, config_from_dict, load_config
from paceline.errors import ConfigError, ForeignAttentionError, Problem
from paceline.models.attention import attention, positions
from paceline.plan.plan import RunMachine
from paceline.records.records import RunRecord, read_records
from paceline.run.decide import (
    check_attention,
    check_host,
    decide_run,
    decide_strategy,
    precision_notes,
    resolve_config,
    show_decisions,
)
from paceline.run.location import read_result
from paceline.run.records import name_strategy

MLP = ["model.kind=mlp", "data.kind=digits", "parallel.device=cpu"]
Call = Callable[..., Any]


def check_choice(choice: Any) -> None:
    assert choice["chosen"] == "ddp"
    assert [each["strategy"] for each in choice["ladder"]] == ["ddp", "zero1", "zero2", "fsdp"]


@pytest.mark.timeout(600)  # a machine under load takes its time to start processes
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_run_that_decides_for_itself(project: Path, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    called = call("train", "tiny.yaml", "parallel.strategy=auto", "train.microbatch=auto")
    assert (called.code, called.err) == (0, "")
    text = " ".join(called.out.split())
    assert text.startswith("parallel.strategy = auto: ddp, about")
    assert "for 36 parameters on 2 ranks, microbatch 1; it fits; predicted" in text
    folder = project / "runs" / "tiny"
    config = load_config(folder / "config.yaml")
    assert (config.parallel.strategy, config.train.microbatch) == ("ddp", "auto")
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["strategy"], plan["batch"]["microbatch"], plan["batch"]["accumulate"]) == ("ddp", 4, 1)
    first = next(record for record in read_records(folder / "records" / "rank-0.jsonl"))
    assert isinstance(first, RunRecord)
    assert (first.strategy, first.microbatch) == ("ddp", 4)

    asked = load_config(project / "tiny.yaml", ["parallel={strategy: auto, ranks: 2, device: cpu}"])
    choice = decide_strategy(resolve_config(asked))[1]
    show_result(read_result(folder, config, choice), as_json=True)
    check_choice(json.loads(capsys.readouterr().out)["choice"])


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.usefixtures("project")
def test_a_run_that_decides_for_itself_says_so_in_json(call: Call) -> None:
    called = call("train", "tiny.yaml", "parallel={strategy: auto, ranks: 2, device: cpu}", "--json")
    assert called.code == 0
    check_choice(json.loads(called.out)["choice"])


def test_hybrid_on_one_host_needs_a_size() -> None:
    with pytest.raises(ConfigError, match="hybrid on 4 ranks of one host, without"):
        resolve_config(load_config(None, [*MLP, "parallel={strategy: hybrid, ranks: 4, device: cpu}"]))
    config = load_config(None, [*MLP, "parallel={strategy: hybrid, ranks: 4, shard_ranks: 2, device: cpu}"])
    assert resolve_config(config).parallel.ranks == 4


def test_precision_is_tried_before_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Problem(what="precision = 'fp16' on cpu: float16 does not work: no", rule="a rule", fix="use 'bf16'")
    monkeypatch.setattr("paceline.engines.precision.precision_problem", lambda *_: refusal)
    with pytest.raises(ConfigError) as caught:
        resolve_config(load_config(None, [*MLP, "train={precision: fp16, global_batch: 7}"]))
    problems = caught.value.problems
    assert problems[0].what.startswith("train.precision = fp16: precision = 'fp16' on cpu")
    assert problems[0].fix == "use 'bf16'"
    assert len(problems) == 2  # with the batch's: all at once


def test_a_strategy_is_chosen_by_the_memory_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = RunMachine(device="cpu", device_bytes=560 * 2**20, host_bytes=2**40, ranks=2, node_ranks=2)
    monkeypatch.setattr("paceline.free_memory.measure_machine", lambda *_: room)
    asked = load_config(None, [*MLP, "parallel.strategy=auto", "parallel.ranks=2", "model.hidden_dim=4096"])
    config, choice = decide_strategy(resolve_config(asked))
    assert choice is not None
    assert config.parallel.strategy == choice.chosen.layout.strategy == "zero1"
    show_decisions(config, choice)
    assert "not ddp needs" in " ".join(capsys.readouterr().out.split())
    fixed = resolve_config(load_config(None, [*MLP, "parallel.ranks=2"]))
    assert decide_strategy(fixed) == (fixed, None)


class Plain(nn.Module):
    """Its attention is torch's own, which sees the tokens of its rank alone."""

    def __init__(self, vocab_size: int, is_module: bool) -> None:
        super().__init__()
        self.embedding, self.mixing = nn.Embedding(vocab_size, 8), nn.Linear(8, 24)
        self.attention = nn.MultiheadAttention(8, 2) if is_module else None
        self.head = nn.Linear(8, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.mixing(self.embedding(tokens)).unsqueeze(1).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))


class Ours(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        places = positions(tokens.shape[1], tokens.device)[:, None] / 100
        query, key, value = self.mixing(self.embedding(tokens) + places).unsqueeze(1).chunk(3, -1)
        return self.head(attention(query, key, value, is_causal=True).squeeze(1))


def asked_of(name: str, is_module: bool = False) -> Config:
    model = {"kind": "factory", "factory": f"{__name__}:{name}", "args": {"vocab_size": 16, "is_module": is_module}}
    data = {"kind": "synthetic_tokens", "samples": 8, "context": 12, "vocab_size": 16}
    parallel = {"ranks": 2, "context": 2, "device": "cpu"}
    return config_from_dict({"model": model, "data": data, "parallel": parallel, "train": {"global_batch": 2}})


@pytest.mark.parametrize("is_module", [True, False])
def test_attention_that_asks_no_other_rank_is_refused_before_any_process(is_module: bool) -> None:
    with pytest.raises(ForeignAttentionError, match="context_ranks = 2 for a model whose attention is not ours"):
        decide_run(asked_of("Plain", is_module))
    assert decide_run(asked_of("Ours")).plan.layout.context_ranks == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attn_logit_softcapping": 50.0}, "Gemma2Attention with softcap, where ranks share each sequence"),
        ({"attn_logit_softcapping": None}, None),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "with layers of chunked_attention"),
    ],
)
def test_attention_of_the_library_that_is_more_is_refused_before_any_process(
    tmp_path: Path, changes: dict[str, Any], told: str | None
) -> None:
    library = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 16)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    library.Gemma2Config(**sizes, **heads, sliding_window=32, **changes).save_pretrained(tmp_path)
    model = {"kind": "hf", "path": str(tmp_path), "pretrained": False, "task": "causal_lm"}
    config = config_from_dict({**asked_of("Ours").model_dump(exclude_unset=True), "model": model})
    if told is None:
        check_attention(config)
        return
    with pytest.raises(ForeignAttentionError, match=told):
        check_attention(config)


def test_a_host_without_room_for_activations_is_told_before_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["model={kind: gpt, size: gpt-1.1b, vocab_size: 32000, context: 131072}", "data={context: 131072}"]
    split = ["parallel={device: cuda, ranks: 2, context: 2}", "memory.checkpoint_activations=full"]
    settings = [*sizes, "data.kind=synthetic_tokens", *split, "train={global_batch: 1, precision: bf16_master}"]
    config = load_config(None, [*settings, "memory.offload=[activations]"])
    needs = 2 * 20 * 65_536 * 2048 * 2  # of two ranks: for each block, the half of the tokens in 16 bits
    monkeypatch.setattr("paceline.free_memory.free_host_bytes", lambda: needs)
    check_host(config)
    monkeypatch.setattr("paceline.free_memory.free_host_bytes", lambda: needs - 1)
    with pytest.raises(ConfigError) as caught:
        check_host(config)
    told = "memory.offload = [activations]: 2 ranks keep 10.0 GiB on this host (5.0 GiB each), and 10.0 GiB are free"
    assert [each.what for each in caught.value.problems] == [told]


def test_offload_that_moves_nothing_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    show_decisions(load_config(None, [*MLP, "parallel.strategy=zero1", "memory.offload=[optimizer]"]), None)
    assert "memory.offload saves nothing here" in " ".join(capsys.readouterr().out.split())
    show_decisions(load_config(None, MLP), None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), ("- a\n", "is no catalog file")])
def test_a_description_of_the_machine_that_is_of_no_use_is_told(
    content: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("PACELINE_MACHINE", str(path))
    show_decisions(load_config(None, MLP), None)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("PACELINE_MACHINE is of no use")
    assert why in shown


def test_settings_that_nobody_reads_are_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    show_decisions(load_config(None, [*MLP, "comm.nccl.p2p_level=NVL"]), None)
    assert "comm.nccl is not read here" in " ".join(capsys.readouterr().out.split())


def test_the_precision_of_auto_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = decide_run(load_config(None, [*MLP, "parallel.ranks=1"]))
    assert quiet.notes == ()  # what CPU ranks always have
    assert (quiet.plan.layout.precision, quiet.config.train.precision) == ("fp32", "auto")
    asked = decide_run(load_config(None, [*MLP, "parallel.ranks=1", "train.precision=auto"]))
    assert asked.notes == ("train.precision = auto takes fp32: ranks on CPUs, where bf16 is often slower than fp32",)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for has_bf16, name, why in (
        (True, "bf16_master", "fp32 masters lose no update"),
        (False, "fp32", "no units for bf16"),
    ):
        monkeypatch.setattr("paceline.engines.precision.has_bf16", lambda _, found=has_bf16: found)
        gpu = load_config(None, [*MLP, "parallel={device: cuda, ranks: 1}"])
        decided = resolve_config(gpu)
        assert decided.train.precision == name
        (note,) = precision_notes(gpu, decided)
        assert note.startswith(f"train.precision = auto takes {name}: ")
        assert why in note


def test_a_run_says_that_one_rank_does_not_shard() -> None:
    decided = decide_run(load_config(None, [*MLP, "parallel={ranks: 1, strategy: zero3, prefetch: 3}"]))
    (note,) = decided.notes
    assert note.startswith("parallel.strategy = zero3 runs as ddp: one rank has nobody to share its states with, ")
    assert (decided.plan.layout.strategy, decided.plan.layout.prefetch) == ("ddp", 1)
    assert (decided.config.parallel.strategy, name_strategy(decided.config, 1)) == ("zero3", "ddp")  # for more ranks
    for keeps in (["parallel={ranks: 1, strategy: fsdp}", "memory.offload=[optimizer]"], ["parallel.strategy=fsdp"]):
        decided = decide_run(load_config(None, [*MLP, *keeps]))
        assert (decided.notes, decided.plan.layout.strategy) == ((), "fsdp")


def test_a_run_says_that_what_saves_memory_is_compiled_by_blocks() -> None:
    gpt = ["model={kind: gpt, size: gpt-nano, compile: whole}", "data={kind: synthetic_tokens, context: 64}"]
    memory = "memory={checkpoint_activations: full, offload: [activations]}"
    decided = decide_run(load_config(None, [*gpt, memory, "parallel={device: cpu, ranks: 1}", "train.precision=fp32"]))
    (note,) = decided.notes
    assert note.startswith("model.compile = whole compiles block by block: one graph would hold until its end")
    assert decided.plan.layout.compile == "blocks"
    plain = decide_run(load_config(None, [*gpt, "parallel={device: cpu, ranks: 1}", "train.precision=fp32"]))
    assert (plain.notes, plain.plan.layout.compile) == ((), "whole")


def test_a_run_on_cpus_says_that_fp8_is_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    gpt = ["model.kind=gpt", "model.size=gpt-nano", "data.kind=synthetic_tokens", "data.context=64"]
    show_decisions(load_config(None, [*gpt, "parallel.device=cpu", "train.precision=fp8"]), None)
    assert "train.precision = fp8 is emulated on CPU ranks" in " ".join(capsys.readouterr().out.split())
