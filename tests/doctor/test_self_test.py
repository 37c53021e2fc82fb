"""Ranks that test themselves, and what is made of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.comm.objects import clock_offset
from paceline.comm.virtual.communicator import run_virtual
from paceline.doctor.self_test import RankReport, failed_test, report_findings, self_test
from paceline.errors import PacelineError

ONE = RankReport(
    rank=0, host="a", versions=("3.11", "2.13"), latency_s=1e-3, bandwidth=1e9, clock_ahead_s=0.0,
    clock_error_s=0.0,
)  # fmt: skip


def test_all_ranks_learn_what_all_saw() -> None:
    found = run_virtual(self_test, 3)
    assert found[0] == found[1] == found[2]
    assert [report.rank for report in found[0]] == [0, 1, 2]
    assert all(report.latency_s > 0 and report.bandwidth > 0 for report in found[0])
    (test, versions) = report_findings(found[0])
    assert (test.status, versions.status) == ("ok", "ok")
    assert "3 ranks on" in test.found


def test_clocks_of_one_host_agree_to_within_what_is_told() -> None:
    for ahead_s, error_s in run_virtual(clock_offset, 3):
        assert abs(ahead_s) <= error_s + 1e-6


def test_other_versions_are_a_problem_and_far_clocks_are_told() -> None:
    other = replace(ONE, rank=1, host="b", versions=("3.12", "2.13"), clock_ahead_s=-3.0, clock_error_s=0.001)
    _, versions, clocks = report_findings([ONE, other])
    assert versions.status == "problem"
    assert versions.found == "Python 3.11, torch 2.13; Python 3.12, torch 2.13"
    assert clocks.status == "note"
    assert clocks.found.startswith("at most 3.0 s apart (b, to within 1.0 ms)")
    unsure = replace(other, clock_error_s=3.0)
    assert list(report_findings([ONE, unsure]))[2].status == "ok"


def test_ranks_that_cannot_be_tested_are_a_problem() -> None:
    found = failed_test(PacelineError("rank 1 of 2 waited in vain\n  for the others\n  and more"))
    assert (found.status, found.found) == ("problem", "rank 1 of 2 waited in vain for the others")


@pytest.mark.parametrize("size", [1, 2])
def test_any_number_of_ranks_will_do(size: int) -> None:
    assert len(run_virtual(self_test, size)) == size
