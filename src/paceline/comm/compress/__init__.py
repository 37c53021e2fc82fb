"""Gradients that shrink where the link is slow: policies on a bucket, with error feedback.

    compressor = Compressor(Compression(policy="topk", ratio=0.01))
    engine = parallelize(model, comm, "ddp", compressor=compressor)

A policy (``policies.py``) says how one flat vector is exchanged. What surrounds it is the same for all and lives in
``feedback.py``: which tensors take part, what was not sent and comes with the next step, the steps before compression
begins, and the state that is saved.
"""

from __future__ import annotations

from paceline.comm.compress.feedback import Compressor as Compressor
from paceline.comm.compress.policies import POLICIES as POLICIES
