"""What supervision is handed: where a run starts from, and how it shrinks when memory runs out."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_plans import plan_of

from paceline.config import dump_yaml, load_config
from paceline.errors import RunFolderError
from paceline.run.folder import adopt_config, change_config, claim_folder, config_of
from paceline.run.location import RunLocation
from paceline.run.rendezvous import HostsChangedError
from paceline.run.supervise import halved_config, supervise
from paceline.run.warm import rank_threads


def plan(folder: Path, microbatch: int) -> None:
    """Notes what the ranks used, as rank 0 does."""
    made = plan_of(load_config(config_of(folder)), ranks=2, train_samples=64)
    (folder / "plan.json").write_text(made.with_microbatch(microbatch).to_text())
    (folder / ".plan.json").unlink(missing_ok=True)


def test_the_microbatch_is_halved_and_the_global_batch_stays(project: Path) -> None:
    config = load_config(project / "tiny.yaml", ["train.accumulate=1"])
    folder = project / "runs" / "tiny"
    with claim_folder(folder, dump_yaml(config)):
        used = 4
        while used > 1:
            plan(folder, used)
            texts = halved_config(folder)
            assert texts is not None
            change_config(folder, *texts)
            used //= 2
            halved = load_config(config_of(folder)).train
            assert (halved.microbatch, halved.accumulate, halved.global_batch) == (used, None, 8)
        assert load_config(folder / "config.yaml").train.microbatch == config.train.microbatch  # until it works
        adopt_config(folder)
        assert load_config(folder / "config.yaml").train.microbatch == 1
        plan(folder, 1)
        assert not halved_config(folder)


def test_a_run_whose_folder_is_gone_when_hosts_change_says_so(project: Path) -> None:
    config = load_config(project / "tiny.yaml")
    gone = RunLocation(folder=project / "runs" / "gone")

    class Changing:
        """A launcher whose hosts change before any attempt has failed."""

        folder, has_others = gone.folder, True

        def start(self, _: list[str]) -> None:
            raise HostsChangedError

        def agree_on_end(self, ended: object, words: str) -> tuple[list[object], str, bool]:
            assert (ended, words) == (None, "")
            return [], "hosts: h1 has come", True

    with pytest.raises(RunFolderError, match=r"gone is gone[\s\S]*start it anew"):
        supervise(Changing(), config, gone)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{}", '{"batch": {}}'])
def test_without_a_plan_nothing_is_known_and_nothing_is_halved(project: Path, text: str) -> None:
    folder = project / "runs" / "tiny"
    with claim_folder(folder, dump_yaml(load_config(project / "tiny.yaml"))):
        (folder / "plan.json").write_text(text)
        assert not halved_config(folder)
        assert config_of(folder) == folder / "config.yaml"


def test_the_policy_is_what_the_config_says(project: Path) -> None:
    config = load_config(project / "tiny.yaml", ["recovery={max_restarts: 7, on_oom: halve, on_hang: stop}"])
    policy = config.recovery
    assert (policy.max_restarts, policy.max_stalled_restarts) == (7, 1)
    assert (policy.on_oom, policy.on_hang) == ("halve", "stop")


@pytest.mark.parametrize(
    ("changes", "ranks", "threads"),
    [
        (["parallel.threads=3"], None, 3),
        (["parallel.device=cuda"], None, None),
        (["parallel.device=cpu"], None, 4),  # auto: two ranks
        (["parallel.ranks=4"], None, 2),
        (["parallel.ranks=4"], 1, 8),
        (["parallel.ranks=16"], None, 1),
        (["parallel.ranks=4", "comm.backend=virtual"], None, 8),
    ],
)
def test_the_threads_of_a_rank_are_known_before_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch, changes: list[str], ranks: int | None, threads: int | None
) -> None:
    monkeypatch.setattr("paceline.cluster.detect.usable_cores", lambda: tuple(range(8)))
    config = load_config(None, ["model.kind=mlp", "data.kind=digits", "train.global_batch=16", *changes])
    assert rank_threads(config, ranks) == threads
