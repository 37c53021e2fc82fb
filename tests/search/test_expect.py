"""What a run on the present machine is expected to take: priced as a plan is, or not at all, with the reason."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from paceline.cluster.detect import Machine
from paceline.cluster.devices import load_cluster
from paceline.config import Config, load_config
from paceline.predict.memory.memory import EngineMemory
from paceline.run.decide import predict_run
from paceline.search.expect import expect_run
from paceline.search.expectation import Expectation, compare
from paceline.search.request import task_of, workload_as_written
from paceline.search.search import rank_one
from paceline.units import GIB

HOST = Machine(processor="a processor", cores=2, memory_bytes=23.5 * GIB)
GPT = ["model={kind: gpt, layers: 4, heads: 4, width: 128, context: 128}", "data.kind=text", "train.global_batch=16"]


def _config(*changes: str, ranks: int = 2) -> Config:
    return load_config(None, [*GPT, "parallel.device=cpu", f"parallel.ranks={ranks}", *changes])


def _seconds(config: Config, machine: Machine = HOST) -> float:
    found = expect_run(config, machine)
    assert found.step_s is not None, found.reason
    return found.step_s


def test_a_cpu_run_is_priced_as_a_plan_for_the_small_host_is() -> None:
    config, cluster = _config(), load_cluster("cpu-host")
    workload = workload_as_written(config, task_of(config, 2), cluster)
    need = EngineMemory.of(config, "cpu")
    assert workload is not None
    assert need is not None
    ranked, bound = rank_one(workload, cluster), rank_one(workload, cluster, need).memory_bytes
    found = expect_run(config, HOST)
    around = cluster.device.step_s + cluster.device.loop_s
    assert around > 0
    assert (found.step_s, found.memory_bytes) == (ranked.seconds + around, bound)
    assert (found.step_s_low, found.step_s_high) == tuple(bound + around for bound in ranked.band)
    assert (found.ranks, found.cluster, found.plan, found.reason) == (2, "2x cpu-host", str(ranked), "")
    assert any("measured elsewhere" in line for line in found.assumed)


def test_the_cores_that_ranks_share_count_and_not_those_that_a_rank_keeps_to() -> None:
    found = predict_run(_config(), cores=(0, 1, 2, 3))
    assert found is not None
    assert any("each of 4 cores" in line for line in found.assumed)


def test_gpus_of_the_catalog_are_priced_and_only_as_many_as_there_are_ranks() -> None:
    machine = replace(HOST, gpus=("NVIDIA H100 80GB HBM3",) * 8)
    found = expect_run(_config("parallel.device=cuda", ranks=4), machine)
    assert (found.ranks, found.cluster, found.reason) == (4, "4x h100-sxm", "")
    assert found.step_s is not None
    assert not found.fitted  # so small a model is among no published runs
    assert any(line.startswith("outside the calibrated domain: a width of") for line in found.assumed)
    on_cpu = expect_run(_config(), machine)  # the GPUs are there, and not used
    assert on_cpu.cluster == "2x cpu-host"


def test_cores_and_the_link_between_ranks_count() -> None:
    one = _seconds(_config())
    assert _seconds(_config(), replace(HOST, cores=8)) < one / 2
    assert _seconds(_config("parallel.threads=1"), replace(HOST, cores=8)) == pytest.approx(one)
    assert _seconds(_config(ranks=4)) > 0.9 * one  # half the samples each, on half a core
    assert _seconds(_config("comm.backend=gloo")) > one


@pytest.mark.parametrize(
    ("changes", "gpus", "reason"),
    [
        (["comm.backend=virtual"], (), "virtual ranks take turns"),
        (["comm.compression.policy=fp16"], (), "comm.compression.policy = fp16 is priced kernel by kernel alone"),
        (["comm.compression.policy=threshold"], (), "comm.compression.policy = threshold: how much it sends"),
        (["train.microbatch=auto"], (), "train.microbatch = auto is decided by the ranks"),
        (["parallel.pipeline=2", "parallel.schedule=gpipe", "train.microbatch=2"], (), "the schedule or recomputation"),
        (["parallel.device=cuda"], ("A Card of 2031",), "2031"),
        (["parallel.device=cuda"], (), "nvidia-smi tells of no GPU"),
        (["parallel.device=cuda"], ("NVIDIA L4", "Tesla T4"), "GPUs of several kinds: NVIDIA L4, Tesla T4"),
    ],
)
def test_what_cannot_be_priced_has_a_reason_and_no_time(changes: list[str], gpus: tuple[str, ...], reason: str) -> None:
    found = expect_run(_config(*changes), replace(HOST, gpus=gpus))
    assert reason in found.reason
    is_unknown = "virtual" in reason or "auto" in reason  # one process of many ranks, and any number of samples
    assert (found.step_s, found.memory_bytes is None) == (None, is_unknown)
    assert len(compare(found, 1.0, 1).lines()) == (0 if is_unknown else 1)
    assert Expectation.of_text(found.to_text()) == found


def test_an_algorithm_is_priced_as_native_and_that_is_told() -> None:
    native, ring = expect_run(_config(), HOST), expect_run(_config("comm.algorithm=ring"), HOST)
    assert ring == replace(native, assumed=(*native.assumed, "comm.algorithm = ring is as fast as native"))
    alone, other = (expect_run(_config("parallel.ranks=1", *more), HOST) for more in ([], ["comm.algorithm=ring"]))
    assert (other.assumed, alone.ranks) == (alone.assumed, 1)  # with nobody to send to there is nothing to assume


def test_several_hosts_are_not_priced() -> None:
    found = predict_run(_config(ranks=4), node_ranks=2)
    assert found is not None
    assert found.memory_bytes is not None
    assert found.reason == "the network between 2 hosts is not known"


def test_nothing_is_expected_of_other_models() -> None:
    assert predict_run(load_config(Path(__file__).parents[2] / "configs" / "digits.yaml", ["parallel.ranks=2"])) is None


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (1.04, "measured 1.04 s: 13 % more"),
        (0.92, "measured 920.0 ms: as predicted"),
        (0.5, "measured 500.0 ms: 46 % less, outside the band"),
        (18.4, "measured 18.40 s: 20 times as much, outside the band"),
    ],
)
def test_a_difference_is_told_in_words(measured: float, told: str) -> None:
    expected = Expectation(ranks=1, step_s=0.92, step_s_low=0.68 * 0.92, step_s_high=1.32 * 0.92)
    assert compare(expected, measured, 0).lines() == [f"predicted 920.0 ms a step (band 32 %), {told}"]


def test_bf16_on_a_cpu_that_nobody_measured_has_a_reason_and_no_time(tmp_path: Path) -> None:
    config, entry = _config("train.precision=bf16"), tmp_path / "mine.yaml"
    found = expect_run(config, HOST)
    assert (found.step_s, found.memory_bytes is not None) == (None, True)
    assert "this one was not measured: paceline calibrate" in found.reason
    entry.write_text((files("paceline.cluster.catalog") / "cpu-host.yaml").read_text())
    measured = expect_run(config, HOST, entry=entry)
    assert measured.step_s is not None
    assert measured.cluster == f"2x {entry}"
    assert load_cluster(measured.cluster).devices == 2  # what a run records, predict --cluster reads
    alone = [expect_run(_config(f"train.precision={name}", ranks=1), HOST, entry=entry) for name in ("bf16", "fp32")]
    assert (alone[0].step_s or 0.0) > 50 * (alone[1].step_s or 0.0)  # all cores together were measured in fp32 alone
    in_fp16 = expect_run(_config("train.precision=fp16"), HOST, entry=entry)
    assert "fp16 on cpu-host, which was measured in fp32 and bf16" in in_fp16.reason


def test_what_a_run_records_as_its_cluster_is_read_again() -> None:
    cluster = load_cluster(expect_run(_config(ranks=4), HOST).cluster)
    assert (cluster.name, cluster.nodes, cluster.devices) == ("4x cpu-host", 1, 4)
    assert load_cluster("4x cpu-host over ethernet-1g").nodes == 4
