"""``--on slurm``: a batch script that trains on all nodes of a job, saves before the time limit, and is queued again.

One task is started on each node, which starts the ranks there (``task=gpu``: one task for each GPU, which is a rank).
They meet at the first node of the job. 90 seconds before the time limit Slurm sends USR1 to the script, which hands it
on: the run saves and leaves with code 75, and the script puts the job back into the queue, at most ``--max-requeues``
times. Slurm itself queues a job again whose node goes down. Each start continues from the newest checkpoint.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

from paceline.errors import LaunchError, UsageError, did_you_mean
from paceline.health.exit_codes import FAILED, PREEMPTED
from paceline.launch.job import LAUNCHED, JobState, LaunchJob, TargetMachines, gpu_memory, read_time, refuse_options

_ASK_S = 60.0
_NOT_HERE = {
    "--hosts": "Slurm chooses the machines: --nodes says how many",
    "--port": "the nodes meet at a port by the number of the job, or at MASTER_PORT of the environment",
}
_OWN = ("task", "save_s")  # settings that are not options of sbatch
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_ENDED = re.compile("COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|PREEMPTED")
_SILENT = ("Unable to contact slurm controller", "Unable to establish config", "Could not establish a configuration")
_NO_LIMIT = ("UNLIMITED", "INFINITE")
_CANCELLED = 143  # as ended by SIGTERM
_TASK = "{task}"  # in an override: the number of the array's task


def machines(job: LaunchJob) -> TargetMachines:
    """Asks Slurm for the nodes of the queue. Raises UsageError for a queue that there is not, or that is too small."""
    refuse_options(job, _NOT_HERE)
    _check_time(job)
    asked = _slurm("sinfo", "--noheader", "--format=%R|%D|%m|%G")
    rows = [line.strip().split("|") for line in asked.splitlines() if line.count("|") == 3]
    known = sorted({row[0] for row in rows})
    queue = job.queue or _slurm("scontrol", "show", "partition", "--oneliner", is_needed=False)
    if job.queue is None:
        default = re.search(r"PartitionName=(\S+)(?=.* Default=YES)", queue)
        queue = default[1] if default else ""
    if queue not in known:
        what = f"Slurm has no queue named {queue}" if job.queue else "Slurm has no default queue"
        fix = did_you_mean(queue, known, "give one of them: --queue NAME")
        raise UsageError(f"{what}\n  its queues (partitions) are {', '.join(known)}\n  {fix}")
    own = [(int(row[1]), int(re.sub(r"\D", "", row[2]) or 0), row[3]) for row in rows if row[0] == queue]
    able = [each for each in own if _gpus(each[2]) >= job.gpus]
    number = sum(count for count, _, _ in able)
    if number < job.nodes:
        gpus = f" with {job.gpus} GPUs" if job.gpus else ""
        most = max((_gpus(gres) for _, _, gres in own), default=0)
        what = f"--nodes {job.nodes}{gpus}, and queue {queue} has {number} such nodes"
        rule = f"it has {sum(count for count, _, _ in own)} nodes, with up to {most} GPUs each"
        raise UsageError(f"{what}\n  {rule}\n  ask for less, or another --queue")
    memory = min(megabytes for _, megabytes, _ in able)
    return TargetMachines(
        where=f"a node of queue {queue}",
        device_bytes=min((_gpu_memory(gres) or 0.0 for _, _, gres in able), default=0.0) or None,
        host_bytes=memory * 2**20 if memory > 1 else None,  # 1: Slurm does not know
    )


def render(job: LaunchJob) -> str:
    _check_time(job)
    save_s, tasks = job.settings.get("save_s", "90"), max(1, job.gpus) if job.settings.get("task") == "gpu" else 1
    if not save_s.isdecimal() or job.settings.get("task", "node") not in ("node", "gpu"):
        raise UsageError("--set save_s=SECONDS and --set task=node|gpu are what Slurm's script knows besides sbatch")
    suffix = "-${SLURM_ARRAY_TASK_ID}" if job.tasks else ""
    values = {"preempted": PREEMPTED, "by_signal": 128 + signal.SIGUSR1, "most": job.most_requeues} | {
        "options": "\n".join(f"#SBATCH --{name}" for name in _options(job, tasks, save_s)),
        "launch": f"{LAUNCHED}={shlex.quote(job.name)}",
        "workdir": shlex.quote(job.workdir),
        "setup": "".join(f"{line}\n" for line in job.setup),
        "command": " ".join(map(_quoted, job.command(run=f"{job.run}-{_TASK}" if job.tasks else None))),
        "exit": f"{shlex.quote(str(job.exit_file))}{suffix}",
    }
    script = Path(__file__).with_name("slurm_job.sh").read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), script)


def submit(job: LaunchJob) -> str:
    script = Path(job.folder) / "script"
    script.write_text(render(job), encoding="utf-8")
    script.chmod(0o755)
    found = _slurm("sbatch", "--parsable", str(script)).strip().split(";")[0]
    if not found.isdecimal():
        raise LaunchError(f"sbatch returned no job: {found}")
    return found


def state(job: LaunchJob) -> JobState:
    """Says where the job stands, by scontrol; a job that Slurm has forgotten has ended."""
    found = _slurm("scontrol", "show", "job", "--oneliner", job.id, is_needed=False)
    return _array_state(found) if job.tasks else _read_state(found, job.exit_code())


def cancel(job: LaunchJob) -> None:
    _slurm("scancel", job.id)


def _read_state(found: str, code: int | None) -> JobState:
    kind, reason = (re.search(rf"\b{name}=(\S+)", found) for name in ("JobState", "Reason"))
    if kind is None:
        return JobState(kind="ended", words="ended; Slurm does not know it any more", code=code)
    name, why = kind[1], "" if reason is None or reason[1] == "None" else f" ({reason[1]})"
    if _ENDED.fullmatch(name):
        own = re.search(r"\bExitCode=(\d+):(\d+)", found)
        if code is None:
            left = int(own[1]) if own else FAILED
            code = _CANCELLED if name == "CANCELLED" else left if left or name == "COMPLETED" else FAILED
        return JobState(kind="ended", words=f"{name.lower()}{why}", code=code)
    nodes = re.search(r"\bNodeList=(\S+)", found)
    where = f" on {nodes[1]}" if nodes and nodes[1] != "(null)" else ""
    restarts = re.search(r"\bRestarts=([1-9]\d*)", found)
    again = f", started again {restarts[1]} times" if restarts else ""
    if name == "PENDING":
        return JobState(kind="waiting", words=f"waiting in the queue{why}{again}")
    return JobState(kind="running", words=f"{name.lower()}{where}{again}")


def _array_state(found: str) -> JobState:
    """Says where the tasks of an array stand: it runs while one of them does, and ends with the largest code."""
    tasks = [_read_state(line, None) for line in found.splitlines() if "JobState=" in line]
    codes = [task.code or 0 for task in tasks if task.kind == "ended"]
    counts = {kind: sum(task.kind == kind for task in tasks) for kind in ("waiting", "running", "ended")}
    words = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "ended"
    if counts["running"] or counts["waiting"]:
        return JobState(kind="running" if counts["running"] else "waiting", words=words)
    return JobState(kind="ended", words=words, code=max(codes, default=None))


def _options(job: LaunchJob, tasks: int, save_s: str) -> list[str]:
    nodes = str(job.nodes) if job.least == job.nodes else f"{job.least}-{job.nodes}"
    options: dict[str, str | None] = {"job-name": job.run, "nodes": nodes, "ntasks-per-node": str(tasks)}
    options |= {"gpus-per-node": str(job.gpus) if job.gpus else None, "time": job.time, "partition": job.queue}
    output = f"{job.log}-%a" if job.tasks else str(job.log)
    options |= {"array": job.tasks, "output": output, "open-mode": "append", "signal": f"B:USR1@{save_s}"}
    own = {name: value for name, value in job.settings.items() if name not in _OWN}
    wrong = [name for name in own if _OPTION.fullmatch(name) is None]
    if wrong or any(re.search(r"[\r\n]", value or "") for value in (*options.values(), *own.values())):
        what = ", ".join(wrong) or "with a line break"
        raise UsageError(f"--set {what}\n  settings are long options of sbatch: --set qos=high")
    words = [name if value == "" else f"{name}={value}" for name, value in (options | own).items() if value is not None]
    return [*words, "requeue"]


def _quoted(word: str) -> str:
    """Quotes a word for the shell, but for the number of the array's task, which the script knows."""
    return '"${SLURM_ARRAY_TASK_ID}"'.join(shlex.quote(part) if part else "" for part in word.split(_TASK)) or "''"


def _gpus(gres: str) -> int:
    """Returns how many GPUs a node has: ``gpu:h100:8(S:0-1),gpu:a100:2`` is 10."""
    return sum(int(count) for count in re.findall(r"gpu(?::[^:(,]+)?:(\d+)", gres))


def _gpu_memory(gres: str) -> float | None:
    found = re.search(r"gpu:([^:(,]+):\d+", gres)
    return None if found is None else gpu_memory(found[1])


def _slurm(program: str, *words: str, is_needed: bool = True) -> str:
    if (path := shutil.which(program)) is None:
        fix = "run it on a login node of the cluster, or print the script with --dry-run"
        raise LaunchError(f"{program} is not installed here\n  --on slurm submits with Slurm's own commands\n  {fix}")
    try:
        done = subprocess.run([path, *words], capture_output=True, text=True, check=False, timeout=_ASK_S)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{program} did not answer within {_ASK_S:g} s\n  is slurmctld running?") from error
    said = done.stderr.strip() or f"exit code {done.returncode}"
    if done.returncode and is_needed and any(sign in said for sign in _SILENT):
        last = said.splitlines()[-1].rpartition("error: ")[2].strip()
        what, rule = f"Slurm does not answer: {last}", f"{program} asks slurmctld, the controller of the cluster"
        raise LaunchError(f"{what}\n  {rule}\n  run scontrol ping, and try again when the controller is up")
    if done.returncode and is_needed:
        raise LaunchError(f"{program}: {said}")
    return done.stdout


def _check_time(job: LaunchJob) -> None:
    if job.time is not None and job.time.upper() not in _NO_LIMIT:
        read_time(job.time)
