"""An entry is fitted to a finished run: what is predicted of that run afterwards is what it took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_run import ENTRY, HOST, STEP, make_run

from paceline.calibrate.entry import Refit, read_times, refit, rescale
from paceline.cluster.entries import parse_catalog
from paceline.errors import UsageError


def test_the_slowest_rank_counts_and_the_first_steps_do_not(tmp_path: Path) -> None:
    found = read_times(make_run(tmp_path / "run"))
    assert (found.step_s, found.ranks, found.backend, found.steps) == (pytest.approx(0.0012), 2, "shared_memory", 20)
    assert found.compute_s == pytest.approx(0.0012 - 0.0004)


def test_a_fitted_entry_predicts_the_run_that_it_was_fitted_to(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    base = tmp_path / "base.yaml"
    base.write_text(ENTRY)
    found = refit(run, HOST, base)
    assert abs(found.error(found.after_s)) < 0.01 < abs(found.error(found.before_s))
    entry = tmp_path / "mine.yaml"
    entry.write_text(found.text)
    again = refit(run, HOST, entry)  # nothing is left to fit, and the same is found again
    assert again.compute == pytest.approx(1.0, abs=0.02)
    assert again.before_s == pytest.approx(found.after_s)


@pytest.mark.exhaustive
def test_without_an_entry_the_small_host_of_the_catalog_is_fitted(tmp_path: Path) -> None:
    assert refit(make_run(tmp_path / "run"), HOST).before_s > 0


def test_kernels_and_the_link_of_the_run_are_changed_and_no_other() -> None:
    text = rescale(ENTRY, 1.5, 2.0, "shared_memory", "a-run")
    found = parse_catalog(text, "the entry")
    device, links = found.devices["mine"], found.links
    assert (device.factor, device.operation_us, device.launch_us) == (1.5, 30, 15)
    assert (links["mine-shm"].gb_per_s, links["mine-shm"].all_reduce_us) == (2, {2: {1024: 100}})
    assert (links["mine-gloo"].gb_per_s, links["mine-gloo"].latency_us) == (2, 100)
    assert text.startswith("# Measured by: somebody\n# Fitted to the run a-run: kernels x 1.500")
    assert parse_catalog(rescale(text, 2.0, 1.0, "gloo", "b"), "again").devices["mine"].factor == 3.0


def test_factors_that_are_plainly_off_are_doubted() -> None:
    usual = Refit(measured_s=2.0, before_s=1.0, after_s=2.0, compute=1.1, communication=2.3, text="", ranks=2, cores=2)
    assert usual.doubts() == []
    slow, other = replace(usual, compute=2.5).doubts()
    assert slow == "kernels 2.5 times what the entry said, and 0.5 to 2 is usual"
    assert other == "something else ran on the machine, or the entry or the run is of another one"
    (_, turns) = replace(usual, communication=5.0, ranks=4).doubts()
    assert turns.startswith("4 ranks took turns on 2 cores")
    assert len(replace(usual, compute=0.1657, communication=0.05).doubts()) == 3


def test_what_no_factor_fits_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(ENTRY)
    waiting = make_run(tmp_path / "waiting", step=replace(STEP, step_s=1.0, comm_s=0.9992))
    with pytest.raises(UsageError, match=r"no factor fits: with kernels .* and collectives 20 times what the entry"):
        refit(waiting, HOST, base)


def test_collectives_that_do_not_count_stay_as_they_were(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(ENTRY.replace("{1024: 50}", "{1024: 0.5}").replace("latency_us: 20", "latency_us: 0.1"))
    found = refit(make_run(tmp_path / "run", step=replace(STEP, step_s=0.1, comm_s=0.0)), HOST, base)
    assert found.communication == 1.0
    assert abs(found.error(found.after_s)) < 0.05


def test_a_run_of_virtual_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is of virtual ranks"):
        refit(make_run(tmp_path / "run", backend="virtual"), HOST)


def test_runs_that_tell_too_little_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run: it has no config"):
        refit(tmp_path, HOST)
    with pytest.raises(UsageError, match="holds 3 steps\n"):
        read_times(make_run(tmp_path / "short", num_steps=3))
    run = make_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"nowhere\.yaml cannot be read"):
        refit(run, HOST, tmp_path / "nowhere.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UsageError, match=r"empty\.yaml has no nodes"):
        refit(run, HOST, tmp_path / "empty.yaml")
    assert Refit(measured_s=2.0, before_s=1.0, after_s=2.0, compute=1.0, communication=1.0, text="").error(1.0) == -0.5
