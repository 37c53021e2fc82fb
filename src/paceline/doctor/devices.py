"""torch as it was built, and the GPUs that it sees: their memory, and which reach one another directly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.doctor.findings import DoctorInputs, MachineFinding, finding
from paceline.units import format_bytes

_OLDEST_TORCH = (2, 6)
_DEVICES = Path("/dev")


def torch_build(_: DoctorInputs) -> Iterator[MachineFinding]:
    """Checks that torch can be imported, is new enough, and can talk."""
    try:
        import torch
    except Exception as error:  # a broken install fails in many ways
        yield finding(
            "torch",
            f"import torch fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            "nothing can be trained without it",
            problem="install torch anew, as https://pytorch.org says for this machine",
        )
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    cuda, rocm = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"for CUDA {cuda}" if cuda else f"for ROCm {rocm}" if rocm else "for CPUs"
    is_old = version < _OLDEST_TORCH
    yield finding(
        "torch",
        f"{torch.__version__}, built {build}, {torch.get_num_threads()} threads",
        "ranks compute with it" if not is_old else "the engines use what newer versions have",
        problem=f"install torch {'.'.join(map(str, _OLDEST_TORCH))} or newer" if is_old else "",
    )
    from paceline.comm.base import available_backends

    found = available_backends()
    shown = [f"{name} {version}" if version else name for name, version in found.items()]
    yield finding(
        "backends",
        ", ".join(shown) or "none",
        "Gloo moves bytes between CPUs, NCCL between GPUs",
        problem="" if "gloo" in found else "install a torch with distributed support: this one cannot talk at all",
    )


def driver(_: DoctorInputs) -> Iterator[MachineFinding]:
    """Reports the GPUs' driver, where there is one: it limits which CUDA torch may be built for."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return  # no driver: the check of the GPUs says what that means
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    finally:
        pynvml.nvmlShutdown()
    yield finding(
        "driver",
        f"{version}, for CUDA up to {number // 1000}.{number % 1000 // 10}",
        "a torch that is built for a newer CUDA does not start on it",
    )


def gpus(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    import torch

    if not torch.cuda.is_available():
        hardware = sorted(path.name for path in _DEVICES.glob("nvidia[0-9]*"))
        yield no_gpu(hardware, torch.version.cuda, surroundings.environment.get("CUDA_VISIBLE_DEVICES"))
        return
    count = torch.cuda.device_count()
    for index in range(count):
        properties, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        is_taken = free < total / 2
        capability = f"{properties.major}.{properties.minor}"
        yield finding(
            f"gpu {index}",
            f"{properties.name}, compute {capability}, {format_bytes(free)} free of {format_bytes(total)}",
            "others use more than half of its memory" if is_taken else f"one rank computes on it, cuda:{index}",
            note="see who with nvidia-smi, or leave it out with CUDA_VISIBLE_DEVICES" if is_taken else "",
        )
    if count > 1:
        yield _peers(count)


def no_gpu(hardware: list[str], cuda: str | None, visible: str | None) -> MachineFinding:
    """Says why torch has no GPU: ``hardware`` are those of the machine, ``visible`` what may be used of them."""
    if not hardware:
        return finding("gpus", "none", "ranks compute on the CPU, and talk through shared memory or Gloo")
    if cuda is None:
        return finding(
            "gpus",
            f"{len(hardware)} in this machine ({', '.join(hardware)}), and a torch without CUDA",
            "ranks would compute on the CPU",
            problem="install a torch that is built for CUDA, as https://pytorch.org says for this machine",
        )
    if visible is not None and visible.strip() in ("", "-1"):
        return finding(
            "gpus",
            f"{len(hardware)} in this machine, hidden by CUDA_VISIBLE_DEVICES={visible!r}",
            "ranks compute on the CPU, and talk through shared memory or Gloo",
            note="unset CUDA_VISIBLE_DEVICES to use them",
        )
    return finding(
        "gpus",
        f"{len(hardware)} in this machine ({', '.join(hardware)}), and torch reaches none: {_cuda_error()}",
        f"the driver is older than CUDA {cuda}, is not loaded, or the device may not be opened",
        problem="look at nvidia-smi; update the driver, or install a torch for an older CUDA",
    )


def _cuda_error() -> str:
    import torch

    cuda: Any = torch.cuda  # not annotated
    try:
        cuda.init()
    except Exception as error:
        return str(error).partition("\n")[0]
    return "no error is told"


def _peers(count: int) -> MachineFinding:
    """Reports which GPUs read one another's memory; those that cannot go through the host's."""
    import torch

    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [f"{i}->{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    found = f"{len(pairs) - len(apart)} of {len(pairs)} ordered pairs reach one another"
    slow = "the others go through the host's memory, which is slower: see nvidia-smi topo -m"
    return finding(
        "peer access",
        found + (f"; not {', '.join(apart[:8])}{' ...' if len(apart) > 8 else ''}" if apart else ""),
        slow if apart else "NCCL copies between any two of them directly",
        note="nothing, if the machine is built so; in a virtual machine, ask for peer-to-peer access" if apart else "",
    )
