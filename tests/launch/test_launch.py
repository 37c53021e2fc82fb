"""What is launched, without the machines: scripts, states, plans for a target, refusals; a run in the background."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from launched_runs import environment, make_project, paceline, set_pause, steps

from paceline.config import load_config
from paceline.errors import ConfigError, UsageError
from paceline.launch import remote, slurm, ssh
from paceline.launch.job import LaunchJob, TargetMachines, all_launches, find_launch, find_target
from paceline.launch.start import plan_job, prepare, ranks_of_node, start

GIB = 2**30


@pytest.fixture
def job(tmp_path: Path) -> LaunchJob:
    folder = tmp_path / "runs" / ".launches" / "tiny"
    folder.mkdir(parents=True)
    where = {"config": "/w/my config.yaml", "workdir": "/w", "folder": str(folder), "python": "/usr/bin/python3"}
    return LaunchJob(name="tiny", target="slurm", run="tiny", nodes=2, least=2, **where)


def test_ranks_read_a_whole_pause_while_it_is_changed(tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=2)
    read: set[str] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            read.add((tmp_path / "pause").read_text())

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(2000):
        set_pause(tmp_path, number % 2)
    is_over.set()
    reader.join()
    assert read <= {"0", "1", "2"}


def test_the_script_of_slurm_saves_before_the_limit_and_is_a_shell_script(job: LaunchJob) -> None:
    text = slurm.render(replace(job, time="1:00:00", queue="main", gpus=8, settings={"qos": "high"}, max_requeues=3))
    for line in ("nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "signal=B:USR1@90", "open-mode=append", "requeue"):
        assert f"#SBATCH --{line}\n" in text
    assert "#SBATCH --time=1:00:00\n#SBATCH --partition=main\n" in text
    assert "#SBATCH --qos=high\n" in text
    assert "train '/w/my config.yaml' name=tiny --resume auto &" in text
    assert '[ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]' in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    ranks = slurm.render(replace(job, gpus=8, settings={"task": "gpu"}))
    assert "#SBATCH --ntasks-per-node=8\n" in ranks
    tasks = slurm.render(replace(job, tasks="0-3", overrides=("train.seed={task}",)))
    assert 'train.seed="${SLURM_ARRAY_TASK_ID}" name=tiny-"${SLURM_ARRAY_TASK_ID}" ' in tasks
    for wrong in ({"save_s": "soon"}, {"task": "core"}, {"qos": "a\nb"}, {"--wrap": "x"}):
        with pytest.raises(UsageError, match="--set"):
            slurm.render(replace(job, settings=wrong))


@pytest.mark.parametrize(
    ("told", "kind", "code"),
    [
        ("JobId=1 JobState=PENDING Reason=Resources Restarts=1 ExitCode=0:0", "waiting", None),
        ("JobId=1 JobState=RUNNING Reason=None NodeList=n[1-2] ExitCode=0:0", "running", None),
        ("JobId=1 JobState=COMPLETED Reason=None ExitCode=0:0", "ended", 0),
        ("JobId=1 JobState=FAILED Reason=NonZeroExitCode ExitCode=77:0", "ended", 77),
        ("JobId=1 JobState=CANCELLED Reason=None ExitCode=0:15", "ended", 143),
        ("JobId=1 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:0", "ended", 1),
        ("", "ended", None),
    ],
)
def test_what_slurm_says_of_a_job(told: str, kind: str, code: int | None) -> None:
    state = slurm._read_state(told, None)
    assert (state.kind, state.code) == (kind, code)
    assert state.words


def test_gpus_by_what_a_site_calls_them() -> None:
    assert slurm._gpus("gpu:h100:8(S:0-1),gpu:a100:2") == 10
    assert slurm._gpus("(null)") == 0
    memory = slurm._gpu_memory("gpu:h100-sxm:8")
    assert memory is not None
    assert 70 * GIB < memory < 82 * GIB
    assert slurm._gpu_memory("gpu:ours:8") is None


def test_launches_are_kept_and_names_are_taken_once(job: LaunchJob, tmp_path: Path) -> None:
    again = start(SimpleNamespace(submit=lambda _: "8"), job)  # type: ignore[arg-type]
    assert (again.name, again.id, LaunchJob.read(Path(again.folder))) == ("tiny-start-2", "8", again)
    shutil.rmtree(again.folder)
    replace(job, id="7", hosts=("a", "b")).write()
    (tmp_path / "runs" / ".launches" / "broken").mkdir()
    (tmp_path / "runs" / ".launches" / "broken" / "job.json").write_text("{}")
    (found,) = all_launches(tmp_path / "runs")
    assert found == replace(job, id="7", hosts=("a", "b")) == find_launch(tmp_path / "runs", "7")
    assert found.exit_code() is None
    found.exit_file.write_text("75\n")
    assert found.exit_code() == 75
    with pytest.raises(UsageError, match="no launch named other"):
        find_launch(tmp_path / "runs", "other")
    with pytest.raises(UsageError, match="--on moon is not a target"):
        find_target("moon")


def test_the_plan_is_made_for_the_machines_of_the_target(tmp_path: Path) -> None:
    config = load_config(make_project(tmp_path) / "tiny.yaml", ["parallel.node_ranks=null"])
    node = TargetMachines(where="a node of queue main", host_bytes=4 * GIB, device_bytes=80 * GIB)
    job = LaunchJob(target="slurm", nodes=2, least=2, ranks=2)
    decided, lines = plan_job(config, node, job)
    assert decided == ("parallel.device=cpu", "parallel.ranks=4")
    assert "4 ranks on CPUs, 2 on each of 2 nodes: ddp, microbatch 3" in lines
    with pytest.raises(UsageError, match="out of memory: 2 ranks need"):
        plan_job(config, replace(node, host_bytes=0.1 * GIB), job)
    for overrides, gpus, told in [
        ([], 8, "parallel.device = cpu, and --gpus-per-node is 8"),
        (["parallel.ranks=3"], 0, "parallel.ranks = 3 on 2 nodes"),
        (["train.global_batch=10"], 0, "train.global_batch = 10 is not a multiple of"),
    ]:
        asked = load_config(tmp_path / "tiny.yaml", ["parallel.node_ranks=null", *overrides])
        with pytest.raises(ConfigError) as refused:
            plan_job(asked, node, replace(job, gpus=gpus, ranks=ranks_of_node(asked, 2, gpus)))
        assert told in str(refused.value)


def test_hosts_are_compared_and_named(job: LaunchJob) -> None:
    from paceline import __version__

    job = replace(job, hosts=("a", "b"), gpus=2)
    good = {"paceline": __version__, "torch": "2.13", "gpus": 2, "config": "x", "sees": True, "port": 29400}
    assert not list(ssh.compare(job, {"a": good, "b": good}, "x"))
    bad = {"paceline": "9", "torch": "2.6", "gpus": 1, "config": "y", "sees": False, "port": 0}
    told = "\n".join(map(str, ssh.compare(job, {"a": {**good, "port": "a:22: in use"}, "b": bad}, "x")))
    for text in ("host b has Paceline 9", "host b has torch 2.6, and host a has 2.13", "host b has 1 GPUs", "a:22"):
        assert text in told
    assert "host b has another /w/my config.yaml" in told
    assert "host b does not see" in told
    silent = {"a": good, "b": "does not answer: no route"}
    assert "host b does not answer" in str(next(ssh.compare(job, silent, "x")))
    assert not list(ssh.compare(replace(job, least=1), silent, "x"))


def test_a_host_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("x")
    order = {"config": str(tmp_path / "tiny.yaml"), "folder": str(tmp_path / "runs"), "mark": "m", "port": 0}
    first = remote.look({**order, "is_first": True, "address": "127.0.0.1"})
    assert (first["config"], first["sees"], first["port"] > 0) == ("x", True, True)
    other = remote.look({**order, "is_first": False, "address": ""})
    assert (other["sees"], other["port"]) == (True, 0)
    remote.forget_mark(tmp_path / "runs")
    assert remote.look({**order, "is_first": False, "address": "203.0.113.9"})["sees"] is False


def test_a_name_that_a_launch_will_use_is_not_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_project(tmp_path))
    asked = LaunchJob(target="local")
    _, job, _ = prepare(Path("tiny.yaml"), [], asked)
    assert (job.run, job.ranks) == ("tiny", 1)
    (tmp_path / "runs" / ".launches" / "tiny").mkdir(parents=True)
    _, job, _ = prepare(Path("tiny.yaml"), [], asked)
    assert job.run == "tiny-2"
    with pytest.raises(UsageError, match="--resume, and there is no run"):
        prepare(Path("tiny.yaml"), [], asked, resumes=True)
    with pytest.raises(UsageError, match="without --array"):
        prepare(Path("tiny.yaml"), ["train.seed={task}"], asked)


@pytest.mark.parametrize("time", ["abc", "1:2:3:4", "0", "-5", "1h"])
def test_a_time_that_is_none_is_refused_before_the_script_is_shown(job: LaunchJob, time: str) -> None:
    with pytest.raises(UsageError, match=f"--time {time}"):
        slurm.render(replace(job, time=time))
    assert "#SBATCH --time=unlimited\n" in slurm.render(replace(job, time="unlimited"))


def test_a_slurm_that_does_not_answer_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\necho 'sinfo: error: Unable to contact slurm controller (connect failure)' >&2\n"
        "echo 'slurm_load_partitions: error: Unable to contact slurm controller (connect failure)' >&2\nexit 1\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(make_project(tmp_path))
    asked = LaunchJob(target="slurm")
    with pytest.raises(UsageError) as refused:
        prepare(Path("tiny.yaml"), [], asked)
    first, *rest = str(refused.value).splitlines()
    assert first == "Slurm does not answer: Unable to contact slurm controller (connect failure)"
    assert len(rest) == 2
    _, _, lines = prepare(Path("tiny.yaml"), [], asked, is_dry=True)
    assert any("not asked for its machines: Slurm does not answer" in line for line in lines)


def test_the_page_lists_the_words_that_every_target_takes() -> None:
    from paceline.launch import kubernetes_options, ray_cluster
    from paceline.launch.job import TARGETS

    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    parts = {part.partition("\n")[0].lower().removeprefix("launch on "): part for part in page.split("\n### ")}
    for target, words in (("kubernetes", kubernetes_options.SETTINGS), ("ray", ray_cluster.SETTINGS)):
        listed = [
            line.split("`")[1]
            for line in parts[target].splitlines()
            if line.startswith("| `") and not line.startswith("| `--set")
        ]
        assert listed == list(words)
    rows = parts["what `--set` takes"]
    assert all(f"\n| {target} | " in rows for target in TARGETS)
    assert all(f"`{word}`" in rows for word in (*slurm._OWN, *ssh.SETTINGS))


@pytest.mark.parametrize(
    ("target", "option", "value"),
    [
        *(("local", "time", "1:00"), ("local", "hosts", ("a",)), ("local", "port", 29400), ("local", "setup", ("x",))),
        *(("local", "max_requeues", 10), ("ssh", "queue", "x"), ("ssh", "max_requeues", 0)),
        *(("slurm", "hosts", ("a",)), ("slurm", "port", 29400), ("ray", "time", "1:00")),
        *(("kubernetes", "hosts", ("a",)), ("kubernetes", "tasks", "0-3"), ("kubernetes", "port", 29400)),
        *(("kubernetes", "setup", ("x",)), ("kubernetes", "python", "/opt/python")),
    ],
)
def test_options_that_a_target_does_not_have_are_refused(
    job: LaunchJob, target: str, option: str, value: object
) -> None:
    shown = {"tasks": "array"}.get(option, option).replace("_", "-")
    with pytest.raises(UsageError, match=f"--{shown} with --on {target}"):
        find_target(target).machines(replace(job, target=target, **{option: value}))  # type: ignore[arg-type]


def test_options_that_are_not_given_are_not_refused(job: LaunchJob) -> None:
    assert find_target("local").machines(replace(job, target="local", nodes=1)).where == "this machine"
    assert (job.most_requeues, replace(job, max_requeues=0).most_requeues) == (10, 0)


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a b", "\0" * 100_000])
def test_what_is_no_host_is_refused_and_shown_short(job: LaunchJob, host: str) -> None:
    with pytest.raises(UsageError, match="--on ssh with hosts ") as refused:
        ssh.machines(replace(job, target="ssh", hosts=("a", host)))
    assert len(str(refused.value)) < 400


# In the place of ssh: the command for the host runs here.
HERE = """#!/bin/sh
for last; do :; done
exec sh -c "$last"
"""


def test_a_host_that_falls_silent_is_named_before_ssh_gives_it_up(
    job: LaunchJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").write_text(HERE)
    (tmp_path / "here").chmod(0o755)
    monkeypatch.setattr(ssh, "_ALIVE_S", 0.05)
    monkeypatch.setattr(ssh, "_SILENT_S", 0.5)
    settings = {"ssh": str(tmp_path / "here")}
    job = replace(job, hosts=("a", "b"), workdir=str(tmp_path), python=sys.executable, settings=settings)
    supervisor = ssh._Supervisor(job=job, command=["sh", "-c", "echo ready; exec sleep 600"], meets="a")
    told, thread = "", threading.Thread(target=supervisor.run)
    thread.start()
    try:
        while not {"a", "b"} <= set(supervisor.heard):
            time.sleep(0.02)
        supervisor.processes["b"].send_signal(signal.SIGSTOP)
        while "b: nothing was heard of it for 0.5 s" not in told:
            told += "".join(capfd.readouterr())
            time.sleep(0.02)
    finally:
        for process in supervisor.processes.values():
            process.send_signal(signal.SIGCONT)
        supervisor.signal(signal.SIGTERM)
        thread.join()
    for process in supervisor.processes.values():
        with contextlib.suppress(BrokenPipeError), process:
            pass  # its pipes are closed
    assert "ready" in told
    assert remote.ALIVE.decode() not in told


@pytest.mark.exhaustive
def test_a_run_in_the_background_is_followed_to_its_code(tmp_path: Path) -> None:
    make_project(tmp_path)
    done = paceline(tmp_path, "launch", "tiny.yaml", "train.steps=5", "--on", "local")
    assert done.returncode == 0, done.stderr
    assert steps(tmp_path)[-1] == 5
    assert "exit code 0" in paceline(tmp_path, "launch", "status", "tiny").stdout
    failed = paceline(tmp_path, "launch", "tiny.yaml", "train.loss=slow_loss:none", "--on", "local")
    assert failed.returncode == 2, failed.stdout
    assert "RANK" not in environment()
