"""What a launch on Ray decides, without Ray: its options, its placement, and what follows when hosts have ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config.sections import RecoveryConfig
from paceline.errors import UsageError
from paceline.health.diagnosis import FailedAttempt, Restart, Stop, TrainedSteps, after_failure
from paceline.launch import ray_cluster
from paceline.launch.job import LaunchJob
from paceline.launch.ray_cluster import PlacedWorker, RayNode, RemoteWorker, cause_of, read_options
from paceline.launch.ray_hosts import HostEnd, _names, code_of, ended_by, rank_variables

JOB = LaunchJob(
    name="tiny",
    target="ray",
    run="tiny",
    config="/w/tiny.yaml",
    workdir="/w",
    folder="/w/runs/.launches/tiny",
    python="python",
    nodes=2,
    least=1,
    ranks=4,
)
STEPS = TrainedSteps(first_step=10, last_step=37)


def ends(*codes: int | None) -> list[HostEnd]:
    return [HostEnd(host=f"h{number}", code=code) for number, code in enumerate(codes)]


def ended(*codes: int | None, **options: Any) -> FailedAttempt | int:
    job = replace(JOB, settings={"actor": options.pop("actor", "host")})
    return ended_by(ends(*codes), STEPS, options=read_options(job), **{"is_cancelled": False, **options})


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 0), 0), ((0, None), 0), ((2, 1), 2), ((None, 2), 2), ((1, 1), 1), ((1, 77), 77), ((76, 1), 76)],
)
def test_a_run_leaves_with_the_code_that_says_most(codes: tuple[int | None, ...], code: int) -> None:
    assert ended(*codes) == code


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ((1, None), "host h1 was lost after step 37"),
        ((137, 1), "the launcher on host h0 was killed by signal 9 after step 37"),
        ((75, None), "host h1 was lost after step 37"),
        ((75, 75), "the run was asked to leave and saved after step 37"),
    ],
)
def test_hosts_start_again_after_a_loss_and_after_a_preemption(codes: tuple[int | None, ...], words: str) -> None:
    found = ended(*codes)
    assert isinstance(found, FailedAttempt)
    assert str(found) == words
    assert (found.kind == "preempted") is (codes == (75, 75))
    assert after_failure(RecoveryConfig(max_restarts=2), [found], max_requeues=1) == Restart(number=1)


def test_restarts_are_limited_and_a_run_that_was_cancelled_does_not_start_again() -> None:
    lost, room = ended(1, None), ended(75, 75)
    assert isinstance(lost, FailedAttempt)
    assert isinstance(room, FailedAttempt)
    before, once = replace(lost, first_step=0, step=10), RecoveryConfig(max_restarts=1)
    spent = after_failure(once, [before, room, lost], max_requeues=3)
    assert isinstance(spent, Stop)
    assert (spent.exit_code(1), "recovery.max_restarts = 1 is reached" in spent.reason) == (77, True)
    assert after_failure(RecoveryConfig(max_restarts=0), [lost]) == Stop()
    assert after_failure(once, [room, lost, room], max_requeues=2) == Restart(number=2)  # losses are not charged
    often = after_failure(once, [room] * 4, max_requeues=3)
    assert often == Stop(reason="not started again: --max-requeues is 3")
    assert often.exit_code(code_of(ends(75, 75))) == 75
    assert ended(75, 75, is_cancelled=True) == 75
    assert ended(76, 75, is_cancelled=True) == 75
    assert ended(None, 1, is_cancelled=True) == 1
    assert isinstance(ended(1, 1, actor="rank"), FailedAttempt)  # no launcher has started the rank again


def test_the_placement_is_shown() -> None:
    text = ray_cluster.render(JOB)
    assert 'placement group: STRICT_SPREAD, 2 bundles of {"CPU": 4.0}\n' in text
    assert "bundle 0: ranks 0 to 3, where the others meet\nbundle 1: ranks 4 to 7\n" in text
    assert "--nnodes 2 --rdzv ADDRESS-OF-BUNDLE-0:PORT --node-ranks 4" in text
    ranks = ray_cluster.render(replace(JOB, gpus=4, settings={"actor": "rank"}))
    assert 'PACK, 8 bundles of {"CPU": 1.0, "GPU": 1.0}' in ranks
    assert "bundle 7: rank 7\n" in ranks
    assert "--nnodes" not in ranks
    fewer = ray_cluster.command_of(JOB, read_options(JOB), 1, "a", "1")
    assert "parallel.ranks=4" in fewer


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"settings": {"adress": "x"}}, "did you mean address?"),
        ({"settings": {"cpus": "many"}}, "--set cpus=many"),
        ({"settings": {"actor": "gpu"}}, "--set actor=gpu"),
        ({"settings": {"actor": "rank", "spread": "strict"}}, "ranks of one host share a Ray node"),
        ({"time": "1:00:00"}, "--time with --on ray\n  Ray has no time limits"),
        ({"hosts": ("a",)}, "--hosts with --on ray"),
    ],
)
def test_options_that_ray_does_not_have_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_options(replace(JOB, **changes))
    assert told in str(refused.value)


def test_hosts_that_fit_are_counted() -> None:
    nodes = [
        RayNode(id="a", address="1", resources={"CPU": 8.0, "accelerator_type:H100": 1.0}),
        RayNode(id="b", address="2", resources={"CPU": 2.0}),
    ]
    assert ray_cluster.num_hosts(nodes, read_options(JOB)) == 1
    assert ray_cluster.num_hosts(nodes, read_options(replace(JOB, settings={"spread": "pack"}))) == 2
    assert ray_cluster.num_hosts(nodes, read_options(replace(JOB, settings={"actor": "rank"}))) == 2
    assert ray_cluster.num_hosts(nodes, read_options(replace(JOB, gpus=1))) == 0
    assert nodes[1].gpu_bytes is None


def test_ranks_of_a_node_share_its_gpus() -> None:
    workers = [PlacedWorker(actor=None, node=node, address=node, gpus=(gpu,)) for node, gpu in ("a0", "a3", "b1")]
    found = list(rank_variables(workers, 29500))
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,3", "0,3", "1"]
    assert [(each["RANK"], each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) for each in found] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
        ("2", "0", "1"),
    ]
    assert {(each["MASTER_ADDR"], each["WORLD_SIZE"]) for each in found} == {("a", "3")}
    assert _names(["x", "y", "x"]) == ["x#0", "y", "x#1"]


def test_a_worker_hands_over_orders_output_and_the_exit_code(tmp_path: Path) -> None:
    script = 'read order; echo hello; echo \'{"gpus": 0}\'; read order; echo "got $order"; read order; exit 7'
    worker = RemoteWorker(["bash", "-c", script], str(tmp_path))
    assert worker.ask({"do": "look"}) == {"gpus": 0}
    worker.run({"do": "run"})
    assert worker.news() == (['got {"do": "run"}'], None)
    worker.signal(15)
    code = None
    while code is None:
        lines, code = worker.news()
    assert (lines, code) == ([], 7)
    worker._process.communicate()
    dumb = RemoteWorker(["bash", "-c", "echo no such module; exit 1"], str(tmp_path))
    assert dumb.ask({"do": "look"}) == "does not start Paceline: no such module"
    dumb._process.communicate()


@pytest.mark.parametrize(
    ("words", "cause"),
    [  # as Ray 2.60 says it
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: RemoteWorker\n\tip: 10.0.0.2\n"
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: ...",
            "its process on the Ray node is gone",
        ),
        ("The actor died.\nThe actor is dead because its node has died. Node Id: 4bae36bedb1e", "its Ray node is gone"),
        (
            "The actor 4a365dd2 is unavailable: The actor is temporarily unavailable: RpcError: RPC error: ...",
            "its Ray node does not answer",
        ),
        ("something new\n\n  in one line  \n", "in one line"),
        ("x" * 400, "x" * 117 + "..."),
        ("", ""),
    ],
)
def test_rays_words_about_a_lost_actor_are_shortened_to_the_cause(words: str, cause: str) -> None:
    assert cause_of(words) == cause
