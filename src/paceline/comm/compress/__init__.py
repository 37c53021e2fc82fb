"""Gradients that shrink where the link is slow: ``policies.py`` exchanges a bucket, ``feedback.py`` surrounds that.

compressor = Compressor(Compression(policy="topk", ratio=0.01))
engine = parallelize(model, comm, "ddp", compressor=compressor)
"""

from paceline.comm.compress.feedback import Compressor as Compressor
from paceline.comm.compress.policies import POLICIES as POLICIES
