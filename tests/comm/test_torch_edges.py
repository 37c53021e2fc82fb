"""Groups of torch that a rank is not in."""

from __future__ import annotations

import torch.distributed as dist

from paceline.comm.torch_dist import is_outside


def test_only_torchs_own_mark_says_that_a_rank_is_outside_of_a_group() -> None:
    assert is_outside(dist.GroupMember.NON_GROUP_MEMBER)
    assert not is_outside(None)
    assert not is_outside(object())
    assert not is_outside(dist.GroupMember.WORLD)
