"""What a step costs the host beside its kernels, out of the times of loops; and loops that are really run."""

from __future__ import annotations

import pytest

from paceline.calibrate.timing import figures_of, measure_loop


def test_two_steps_tell_what_an_operation_takes_and_what_a_step_does_besides() -> None:
    found = figures_of((100, 3e-3), (400, 9e-3), loop_s=2e-4, spread=0.01)
    assert found.operation_s == pytest.approx(2e-5)
    assert found.step_s == pytest.approx(1e-3)
    assert found.loop_s == 2e-4


@pytest.mark.parametrize(("short", "long"), [(9e-3, 3e-3), (1e-3, 9e-3)])
def test_what_noise_turns_round_is_left_to_the_operations(short: float, long: float) -> None:
    found = figures_of((100, short), (400, long), loop_s=-1e-4, spread=0.5)
    assert (found.operation_s, found.step_s, found.loop_s) == (pytest.approx(long / 400), 0.0, 0.0)


def test_real_loops_are_timed() -> None:
    found = measure_loop(0.0, rounds=2, steps=1)
    assert found.operation_s > 0
    assert min(found.step_s, found.loop_s) >= 0
