"""What a host's sampler reads: NVML at its boundary, and the real host."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.records.host import Gpus, HostSampler, open_gpus
from paceline.records.records import parse_line, to_line


class NvmlError(Exception):
    pass


class FakeNvml:
    """Two GPUs: the second one is hot, and tells nothing of its power."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    is_open = False

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=50 + handle, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=2**30 * (1 + handle), total=2**34)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        if handle:
            raise NvmlError("Not Supported")
        return 350_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return 60 + 30 * handle + sensor

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        del handle
        return 1000 * clock

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return 0x40 | 0x04 if handle else 0x01


def test_gpus_are_read_in_units_of_opentelemetry() -> None:
    library = FakeNvml()
    gpus = Gpus(library)
    values = gpus.read()
    assert values["hw.gpu.utilization/0"] == 0.5
    assert values["hw.gpu.memory.usage/1"] == 2 * 2**30
    assert values["hw.power/0"] == 350.5
    assert values["hw.temperature/1"] == 90
    assert values["hw.gpu.clock.sm/0"] == 1e9
    gpus.close()
    assert not library.is_open


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    values = Gpus(FakeNvml()).read()
    assert "hw.power/1" not in values
    throttled = {name for name in values if "throttle" in name}
    assert throttled == {"hw.gpu.throttle.thermal/1", "hw.gpu.throttle.power/1"}  # an idle GPU is not throttled


def test_a_sampler_reads_this_host_and_its_ranks() -> None:
    sampler = HostSampler(lambda: {3: os.getpid(), 4: 2**30}, Gpus(FakeNvml()))
    record = sampler.look()
    assert record.values["process.memory.usage/3"] > 2**20
    assert "process.memory.usage/4" not in record.values  # no such process
    assert 0 < record.values["system.memory.usage"] < record.values["system.memory.limit"]
    assert 0 <= record.values.get("system.cpu.utilization", 0.0) <= 1
    assert all(value >= 0 for value in record.values.values())
    assert "hw.gpu.utilization/1" in record.values
    assert parse_line(to_line(record)) == record


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nvml_reads_a_real_gpu() -> None:
    gpus, why = open_gpus()
    assert gpus is not None, why
    values = gpus.read()
    gpus.close()
    assert 0 <= values["hw.gpu.utilization/0"] <= 1
    assert 0 < values["hw.gpu.memory.usage/0"] <= values["hw.gpu.memory.limit/0"]
    assert 10 < values["hw.temperature/0"] < 120
