"""The host itself: Python, processors, memory, files, disk and clock, compiler; torch as it was built, and its GPUs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil

from paceline.cluster.detect import BF16_INSTRUCTIONS, bf16_instructions, host_memory, usable_cores
from paceline.doctor.findings import DoctorInputs, MachineFinding, finding
from paceline.records.host import open_gpus
from paceline.units import GIB, MIB, format_bytes, format_seconds

_CGROUP = Path("/sys/fs/cgroup")
_FEW_FILES, _ENOUGH_FILES = 256, 4096
_LITTLE_MEMORY, _LITTLE_SHARED, _LITTLE_DISK = 1 * GIB, 64 * MIB, 1 * GIB
_OLDEST_TORCH = (2, 10)
_DEVICES = Path("/dev")


def python(_: DoctorInputs) -> Iterator[MachineFinding]:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    where = f"{platform.system()} {platform.machine()}"
    yield finding("python", f"{found} on {where}", "ranks run in this interpreter")


def processors(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Reports how many cores a run may use: by affinity and by a container's quota, and what threads were asked for."""
    cores, usable = os.cpu_count() or 1, len(usable_cores())
    quota = cpu_quota(_read(_CGROUP / "cpu.max"))
    asked = surroundings.environment.get("OMP_NUM_THREADS", "")
    limits = [f"{usable} of {cores} cores usable"]
    limits += [f"a quota of {quota:g}"] if quota is not None else []
    limits += [f"OMP_NUM_THREADS={asked}"] if asked else []
    least = min(usable, quota or cores)
    if least >= cores:
        yield finding("processors", ", ".join(limits), "CPU ranks share these cores out among them")
    else:
        crowded = "ranks share the cores out by their number: more threads than cores slow each other down"
        fix = f"set parallel.threads so that ranks x threads is {max(1, int(least))} at most"
        yield finding("processors", ", ".join(limits), crowded, note=fix)


def half_precision(_: DoctorInputs) -> Iterator[MachineFinding]:
    if there := bf16_instructions():
        meaning = "mixed_precision=True computes in bf16 on CPU ranks"
        yield finding("bf16 on the CPU", f"the processor has {' and '.join(there)}", meaning)
    else:
        found = f"no instructions ({', '.join(BF16_INSTRUCTIONS)})"
        meaning = "bf16 is emulated, slower than fp32: mixed_precision=True and train.precision=auto compute in fp32"
        yield finding("bf16 on the CPU", found, meaning, note="leave train.precision at auto on CPU ranks")


def cpu_quota(text: str) -> float | None:
    """Reads a cgroup's ``cpu.max``: so many microseconds of every period, as cores. None: no quota."""
    parts = text.split()
    if len(parts) != 2 or not parts[0].isdigit() or not int(parts[1]):
        return None
    return int(parts[0]) / int(parts[1])


def memory(_: DoctorInputs) -> Iterator[MachineFinding]:
    found, limit = psutil.virtual_memory(), host_memory()
    used = _read(_CGROUP / "memory.current").strip()
    is_limited = limit < found.total
    free = min(found.available, max(0, limit - int(used))) if is_limited and used.isdigit() else found.available
    whose = " (the limit of this container)" if is_limited else ""
    fix = "end what else runs here, or train on fewer ranks" if free < _LITTLE_MEMORY else ""
    meaning = "CPU ranks, loader workers and what is offloaded live in it"
    yield finding("memory", f"{format_bytes(free)} free of {format_bytes(limit)}{whose}", meaning, problem=fix)


def open_files(_: DoctorInputs) -> Iterator[MachineFinding]:
    """Checks how many files a process may open: sockets, loader workers and shared tensors each take some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = soft == resource.RLIM_INFINITY
    most = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
    found = "no limit" if is_unlimited else f"{soft} for a process (may be raised to {most})"
    fix = "" if is_unlimited or soft >= _ENOUGH_FILES else f"ulimit -n {_ENOUGH_FILES}"
    meaning = "a rank holds a socket for each other rank, and several files for each loader worker"
    yield finding("open files", found, meaning, problem=fix if soft < _FEW_FILES else "", note=fix)


def locked_memory(_: DoctorInputs) -> Iterator[MachineFinding]:
    """Checks how much memory a process may lock: InfiniBand and copies to a GPU need pages that stay in place."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_fabric = Path("/sys/class/infiniband").is_dir()
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{format_bytes(soft)} for a process"
    if not has_fabric:
        yield finding("locked memory", found, "InfiniBand needs it, and there is none here")
    elif soft == resource.RLIM_INFINITY:
        yield finding("locked memory", found, "NCCL can register its buffers with InfiniBand")
    else:
        fix = "ulimit -l unlimited (in a container: --ulimit memlock=-1)"
        yield finding("locked memory", found, "NCCL cannot register its buffers with InfiniBand", problem=fix)


def disk(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Checks that runs can be written, have room, and that their files get the time that processes see."""
    runs = surroundings.runs.absolute()
    folder = next(path for path in (runs, *runs.parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            skew = Path(probe.name).stat().st_mtime - time.time()
    except OSError as error:
        meaning = "records, checkpoints and logs of a run are kept there"
        fix = "set monitor.folder to a folder of yours, or change its permissions"
        yield finding("disk", f"{folder} cannot be written: {error.strerror}", meaning, problem=fix)
        return
    free = shutil.disk_usage(folder).free
    meaning = "runs are kept there: a checkpoint with AdamW takes 12 bytes a parameter in fp32"
    fix = "free some, or set monitor.folder and checkpoint.keep" if free < _LITTLE_DISK else ""
    yield finding("disk", f"{format_bytes(free)} free in {folder}", meaning, note=fix)
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}; files in {folder} differ by {format_seconds(abs(skew))}"
    meaning = "records carry the time of their host: where hosts or file servers disagree, their order is lost"
    fix = "run a time service (chrony, ntpd) on this host and on the file server"
    yield finding("clock", found, meaning, note=fix if abs(skew) > 2.0 else "")


def shared_memory(_: DoctorInputs) -> Iterator[MachineFinding]:
    """Checks the shared memory through which CPU ranks of one host, and loader workers, pass tensors."""
    from paceline.comm.shared.segment import FOLDER, stale_segments

    if not FOLDER.is_dir():
        meaning = "ranks of this host talk through sockets instead, which is slower"
        yield MachineFinding(name="shared memory", status="note", found=f"there is no {FOLDER}", meaning=meaning)
        return
    usage = shutil.disk_usage(FOLDER)
    found = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} in {FOLDER}"
    meaning = "ranks of this host and loader workers pass tensors through it; where it is full they are killed"
    fix = "in a container: --shm-size=2g, or --ipc=host; elsewhere: end what fills it"
    yield finding("shared memory", found, meaning, problem=fix if usage.free < _LITTLE_SHARED else "")
    if stale := stale_segments():
        size = sum(path.stat().st_size for path in stale if path.exists())
        found = f"{len(stale)} of {format_bytes(size)} in {FOLDER}, of processes that are gone"
        meaning = "their ranks were killed while they connected; the next run removes those of this user"
        fix = f"rm {' '.join(map(str, stale[:3]))}{' ...' if len(stale) > 3 else ''}"
        yield finding("stale segments", found, meaning, note=fix)


def compiler(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Looks for a C++ compiler, which makes shared memory faster; without one the same protocol runs in Python."""
    from paceline.comm.shared.native.collectives import find_compiler, load
    from paceline.errors import CommunicationError

    try:
        found, problem = find_compiler(), ""
    except CommunicationError as error:
        found, problem = "none", str(error)
    if not problem and not surroundings.is_quick:
        problem = load().problem
    found += "" if surroundings.is_quick else ", and what it compiles can be loaded"
    how = "works in Python, and is slower than compiled" if problem else "is compiled on first use, and kept"
    fix = "install a C++ compiler (apt install g++, xcode-select --install)" if problem else ""
    yield finding("compiler", problem or found, f"shared memory between CPU ranks {how}", note=fix)


def packages(_: DoctorInputs) -> Iterator[MachineFinding]:
    uses = {"tensorboard": "monitor.tensorboard", "scikit-learn": "data.kind = digits"}
    versions = {}
    for name in ("numpy", "pydantic", "safetensors", "rich", *uses):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not (missing := [name for name in uses if name not in versions]):
        yield finding("packages", shown, "what optional parts use is there")
    else:
        shown += "; not installed: " + ", ".join(f"{name} (for {uses[name]})" for name in missing)
        fix = f"pip install {' '.join(missing)}"
        yield finding("packages", shown, "runs that use these would be refused", note=fix)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def torch_build(_: DoctorInputs) -> Iterator[MachineFinding]:
    """Checks that torch can be imported, is new enough, and can talk."""
    try:
        import torch
    except Exception as error:  # a broken install fails in many ways
        found = f"import torch fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        fix = "install torch anew, as https://pytorch.org says for this machine"
        yield finding("torch", found, "nothing can be trained without it", problem=fix)
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    cuda, rocm = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"for CUDA {cuda}" if cuda else f"for ROCm {rocm}" if rocm else "for CPUs"
    found = f"{torch.__version__}, built {build}, {torch.get_num_threads()} threads"
    if version >= _OLDEST_TORCH:
        yield finding("torch", found, "ranks compute with it")
    else:
        fix = f"install torch {'.'.join(map(str, _OLDEST_TORCH))} or newer"
        yield finding("torch", found, "the engines use what newer versions have", problem=fix)
    from paceline.comm.base import available_backends

    there = available_backends()
    shown = ", ".join(f"{name} {version}" if version else name for name, version in there.items()) or "none"
    fix = "" if "gloo" in there else "install a torch with distributed support: this one cannot talk at all"
    yield finding("backends", shown, "Gloo moves bytes between CPUs, NCCL between GPUs", problem=fix)


def driver(_inputs: DoctorInputs) -> Iterator[MachineFinding]:
    """Reports the GPUs' driver, where there is one: it limits which CUDA torch may be built for."""
    opened, _ = open_gpus()
    if opened is None:
        return  # no driver: the check of the GPUs says what that means
    with contextlib.closing(opened):
        version = opened.library.nvmlSystemGetDriverVersion()
        number = int(opened.library.nvmlSystemGetCudaDriverVersion_v2())
    found = f"{version}, for CUDA up to {number // 1000}.{number % 1000 // 10}"
    yield finding("driver", found, "a torch that is built for a newer CUDA does not start on it")


def gpus(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    import torch

    if not torch.cuda.is_available():
        hardware = sorted(path.name for path in _DEVICES.glob("nvidia[0-9]*"))
        yield no_gpu(hardware, torch.version.cuda, surroundings.environment.get("CUDA_VISIBLE_DEVICES"))
        return
    count = torch.cuda.device_count()
    for index in range(count):
        gpu, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        room = f"{format_bytes(free)} free of {format_bytes(total)}"
        found = f"{gpu.name}, compute {gpu.major}.{gpu.minor}, {room}"
        if free < total / 2:
            fix = "see who with nvidia-smi, or leave it out with CUDA_VISIBLE_DEVICES"
            yield finding(f"gpu {index}", found, "others use more than half of its memory", note=fix)
        else:
            yield finding(f"gpu {index}", found, f"one rank computes on it, cuda:{index}")
    if count > 1:
        yield _peers(count)


def no_gpu(hardware: list[str], cuda: str | None, visible: str | None) -> MachineFinding:
    """Says why torch has no GPU: ``hardware`` are those of the machine, ``visible`` what may be used of them."""
    on_cpu = "ranks compute on the CPU, and talk through shared memory or Gloo"
    if not hardware:
        return finding("gpus", "none", on_cpu)
    there, named = f"{len(hardware)} in this machine", ", ".join(hardware)
    if cuda is None:
        fix = "install a torch that is built for CUDA, as https://pytorch.org says for this machine"
        found = f"{there} ({named}), and a torch without CUDA"
        return finding("gpus", found, "ranks would compute on the CPU", problem=fix)
    if visible is not None and visible.strip() in ("", "-1"):
        found = f"{there}, hidden by CUDA_VISIBLE_DEVICES={visible!r}"
        return finding("gpus", found, on_cpu, note="unset CUDA_VISIBLE_DEVICES to use them")
    import torch

    why, library = "no error is told", cast("Any", torch.cuda)  # not annotated
    try:
        library.init()
    except Exception as error:
        why = str(error).partition("\n")[0]
    meaning = f"the driver is older than CUDA {cuda}, is not loaded, or the device may not be opened"
    fix = "look at nvidia-smi; update the driver, or install a torch for an older CUDA"
    return finding("gpus", f"{there} ({named}), and torch reaches none: {why}", meaning, problem=fix)


def _peers(count: int) -> MachineFinding:
    """Reports which GPUs read one another's memory; those that cannot go through the host's."""
    import torch

    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [f"{i}->{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    found = f"{len(pairs) - len(apart)} of {len(pairs)} ordered pairs reach one another"
    if not apart:
        return finding("peer access", found, "NCCL copies between any two of them directly")
    found += f"; not {', '.join(apart[:8])}{' ...' if len(apart) > 8 else ''}"
    slow = "the others go through the host's memory, which is slower: see nvidia-smi topo -m"
    fix = "nothing, if the machine is built so; in a virtual machine, ask for peer-to-peer access"
    return finding("peer access", found, slow, note=fix)
