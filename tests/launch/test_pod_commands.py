"""The commands of rendered pods, run for real on this machine: they train together, and leave together.

What Kubernetes would do after each exit code is in the manifests (`test_kubernetes.py`); here are the codes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port

from paceline.config import Config, config_from_dict
from paceline.health.exit_codes import DONE, PREEMPTED
from paceline.launch.kubernetes import CONFIG, PORT, RUNS, render
from paceline.launch.kubernetes_options import Kind, KubernetesOptions

PATIENCE_S = 120


def a_config(steps: int) -> Config:
    return config_from_dict(
        {
            "name": "tiny",
            "model": {"kind": "mlp", "hidden_dim": 8},
            "data": {"kind": "synthetic_classification", "samples": 256},
            "train": {"steps": steps, "global_batch": 8},
            "parallel": {"device": "cpu", "threads": 1},
            "monitor": {"tensorboard": False, "console": False},
        }
    )


class Pods:
    """The pods of a run, as processes of this machine: their names, paths and secret are put in as a cluster would."""

    def __init__(self, folder: Path, kind: Kind, steps: int, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack, self._port = folder, stack, free_port()
        options = KubernetesOptions(name="tiny", image="paceline:0.1", kind=kind, nodes=2, shows_page=False)
        objects = render(options, a_config(steps))
        (config,) = [each for each in objects if each["kind"] == "ConfigMap"]
        (folder / "config.yaml").write_text(config["data"]["config.yaml"])
        (workload,) = [each for each in objects if each["kind"] in ("Job", "StatefulSet")]
        self._pod = workload["spec"]["template"]["spec"]

    def start(self) -> subprocess.Popen[bytes]:
        container = self._pod["containers"][0]
        (waiting,) = self._pod["initContainers"]
        environment = {each["name"]: each.get("value", "0123456789abcdef") for each in container["env"]}
        environment |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0", "HOME": str(self.folder)}
        environment |= {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH")}
        subprocess.run(self._here(waiting["command"]), env=environment, check=True)
        words = self._here([*container["command"], *container["args"]])
        process = subprocess.Popen(words, cwd=self.folder, env=environment, stderr=subprocess.PIPE)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def _here(self, words: list[str]) -> list[str]:
        replaced = {
            "python": [sys.executable],
            "paceline": [sys.executable, "-m", "paceline"],
            CONFIG: [str(self.folder / "config.yaml")],
            f"monitor.folder={RUNS}": [f"monitor.folder={self.folder}/runs"],
            f"tiny-0.tiny:{PORT}": [f"127.0.0.1:{self._port}"],
            "tiny-0.tiny": ["127.0.0.1"],
            str(PORT): [str(self._port)],
        }
        return [new for word in words for new in replaced.get(word, [word])]

    def wait_until(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        records = self.folder / "runs" / "tiny" / "records" / "rank-0.jsonl"
        while not records.is_file() or records.read_text().count("\n") < step:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_pods_of_a_job_leave_together_when_one_is_evicted_and_go_on_afterwards(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        pods = Pods(tmp_path, "job", 600, stack)
        both = [pods.start(), pods.start()]
        pods.wait_until(20)
        both[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=PATIENCE_S)[1].decode() for process in both]
        assert [process.returncode for process in both] == [PREEMPTED, PREEMPTED], outputs
        again = [pods.start(), pods.start()]  # as a Job does after code 75
        outputs = [process.communicate(timeout=PATIENCE_S)[1].decode() for process in again]
        assert [process.returncode for process in again] == [DONE, DONE], outputs
    found: Any = yaml.safe_load((tmp_path / "runs" / "tiny" / "config.yaml").read_text())
    assert found["parallel"]["ranks"] == 2
    assert (tmp_path / "runs" / "tiny" / "checkpoints").is_dir()
    assert not (tmp_path / "runs" / "tiny-2").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_pods_of_a_stateful_set_stay_behind_a_run_that_is_done(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        pods = Pods(tmp_path, "statefulset", 20, stack)
        both = [pods.start(), pods.start()]
        for process in both:
            assert process.stderr is not None
            assert any(b"this pod stays until it is deleted" in line for line in process.stderr)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE_S) for process in both] == [DONE, DONE]
