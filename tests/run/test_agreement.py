"""What hosts must have in common before they start ranks: the first says what counts, and others name what differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from paceline.config import config_from_dict
from paceline.errors import UsageError
from paceline.run import agreement
from paceline.run.agreement import HostFacts, agree, differences, refusal_of

CONFIG = config_from_dict(
    {
        "model": {"kind": "factory", "factory": "nets:build"},
        "data": {"kind": "digits"},
        "train": {"steps": 1},
        "name": "tiny",
    },
    "test",
)


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostFacts:
    monkeypatch.setattr(agreement, "_SEEN_S", 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("def build(): ...")
    return replace(HostFacts.here(CONFIG, tmp_path / "run", 2), host="a")


def other(first: HostFacts, **changes: object) -> HostFacts:
    return replace(first, host="b", mark="other", **changes)  # type: ignore[arg-type]


def test_hosts_that_agree_take_part(first: HostFacts) -> None:
    store = HashStore()
    agree(store, first, may_go_without=False)
    agree(store, other(first), may_go_without=False)
    decided = CONFIG.with_values("parallel", ranks=4, device="cpu").model_dump(mode="json")
    agree(store, other(first, config=decided | {"monitor": {"console": False}}), may_go_without=False)
    assert refusal_of(store) == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"torch": "1.0"}, "host b has torch 1.0, and host a has"),
        ({"paceline": "9"}, "host b has Paceline 9, and host a has"),
        ({"ranks": 4}, "host b has 4 ranks, and host a has 2"),
        ({"code": {"nets.py": "of another version"}}, "host b has another nets.py than host a"),
        ({"code": {"paceline": "changed there"}}, "host b has another paceline than host a"),
        ({"folders": ("/nowhere/run",)}, "host b does not see /nowhere/run of host a"),
    ],
)
@pytest.mark.parametrize("may_go_without", [True, False])
def test_a_host_that_differs_names_itself_and_the_first(
    first: HostFacts, changes: dict[str, object], told: str, may_go_without: bool
) -> None:
    store = HashStore()
    agree(store, first, may_go_without=may_go_without)
    with pytest.raises(UsageError, match=told):
        agree(store, other(first, **changes), may_go_without=may_go_without)
    assert (told in refusal_of(store)) is not may_go_without  # who waits for it learns why


def test_code_that_a_config_names_is_compared_with_all_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["one.py", "own/__init__.py", "own/inner/deep.py", "plain/hooks.py", "unnamed.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("act = print")
    hooks = ("one:act", "own.inner.deep:act", "plain.hooks:act", "torch.nn:Linear", "nowhere:act")
    config = CONFIG.with_values("train", hooks=hooks)

    def code() -> dict[str, str]:
        return HostFacts.here(config, tmp_path / "run", 2).code

    before = code()
    assert list(before) == ["paceline", "one.py", "own", "hooks.py"]
    told = dict(zip(names, ["one.py", "own", "own", "hooks.py", None], strict=True))
    for name, changed in told.items():
        (tmp_path / name).write_text("act = repr")
        after = code()
        assert [each for each in after if after[each] != before[each]] == [changed] * (changed is not None)
        before = after


def test_configs_are_compared_key_by_key(first: HostFacts) -> None:
    changed = CONFIG.with_values("train", steps=2, seed=7).with_values("optim", lr=0.5)
    (told,) = differences({**vars_of(first)}, other(first, config=changed.model_dump(mode="json")))
    assert "host b has another config than host a: " in told
    assert "train.steps = 2, not 1" in told
    assert "optim.lr = 0.5, not 0.0003" in told


def vars_of(facts: HostFacts) -> dict[str, object]:
    return {name: getattr(facts, name) for name in HostFacts.__dataclass_fields__}
