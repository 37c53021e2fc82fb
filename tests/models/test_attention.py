"""``paceline.attention`` in one process, and which part a thread has."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline.errors import UsageError
from paceline.models.attention import current_part, positions, use_part


def heads(number: int) -> torch.Tensor:
    return torch.randn(2, number, 5, 8, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("is_causal", [True, False])
def test_in_one_process_it_is_plain_attention(is_causal: bool) -> None:
    query, key, value = heads(4), heads(4), heads(4)
    found = paceline.attention(query, key, value, is_causal=is_causal, scale=0.2)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=0.2)
    assert torch.equal(found, expected)


def test_heads_of_keys_are_shared_and_masks_taken() -> None:
    mask = torch.rand(5, 5) > 0.3
    mask |= torch.eye(5, dtype=torch.bool)
    found = paceline.attention(heads(4), heads(2), heads(2), mask=mask)
    wide = heads(2).repeat_interleave(2, dim=1)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(heads(4), wide, wide, mask))


def test_documents_are_kept_apart() -> None:
    documents = torch.tensor([[0, 0, 2, 2, 2], [0, 1, 1, 1, 1]])
    found = paceline.attention(heads(4), heads(4), heads(4), is_causal=True, documents=documents)
    second = [heads(4)[:1, :, 2:]] * 3
    torch.testing.assert_close(found[:1, :, 2:], paceline.attention(*second, is_causal=True))


@pytest.mark.parametrize("other", [{"is_causal": True}, {"documents": torch.zeros(2, 5, dtype=torch.int64)}])
def test_a_mask_says_all(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="put all into the mask"):
        paceline.attention(heads(4), heads(4), heads(4), mask=torch.ones(5, 5, dtype=torch.bool), **other)


class Part:
    """As much of a part as is asked for here."""

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        return torch.arange(length, device=device) * 2

    def attend(self, query: torch.Tensor, *others: torch.Tensor, **asked: Any) -> torch.Tensor:
        del others, asked
        return query + 1


def test_a_part_takes_over_while_it_is_in_use() -> None:
    part: Any = Part()
    with use_part(part):
        assert current_part() is part
        assert positions(3, torch.device("cpu")).tolist() == [0, 2, 4]
        assert torch.equal(paceline.attention(heads(4), heads(4), heads(4)), heads(4) + 1)
        with use_part(None):
            assert current_part() is None
        assert current_part() is part
    assert current_part() is None
    assert positions(2, torch.device("cpu"), first=3).tolist() == [3, 4]


def test_a_thread_has_its_own_part_or_that_of_the_main_thread() -> None:
    found: dict[str, Any] = {}
    own: Any = Part()

    def look(name: str, part: Any = None) -> None:
        if part is not None:
            use_part(part)
        found[name] = current_part()

    def run(*given: Any) -> None:
        thread = threading.Thread(target=look, args=given)
        thread.start()
        thread.join()

    part: Any = Part()
    with use_part(part):  # as an engine in a process of its own; torch's threads run backward passes
        run("of torch")
        run("of a rank", own)
        assert current_part() is part
    run("afterwards")
    assert found == {"of torch": part, "of a rank": own, "afterwards": None}


def test_tokens_that_are_read_on_have_no_part() -> None:
    with use_part(Part()), pytest.raises(UsageError, match="sequences are whole"):  # type: ignore[arg-type]
        positions(1, torch.device("cpu"), first=4)


def test_compiled_code_without_a_part_is_one_graph() -> None:
    compiled = torch.compile(lambda x: paceline.attention(x, x, x, is_causal=True), fullgraph=True, backend="eager")
    with use_part(None):
        torch.testing.assert_close(compiled(heads(4)), paceline.attention(heads(4), heads(4), heads(4), is_causal=True))
