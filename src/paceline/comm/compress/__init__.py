"""Gradients that shrink where the link is slow: ``policies.py`` exchanges a bucket, ``feedback.py`` surrounds that."""

from paceline.comm.compress.feedback import Compressor as Compressor
from paceline.comm.compress.policies import POLICIES as POLICIES
