"""A loop of one step with a run, which ends as it is asked to: ``python -m recorded_loop [fail]``."""

from __future__ import annotations

import sys

import paceline

if __name__ == "__main__":
    comm = paceline.connect()
    run = paceline.Run(comm, "script", monitor={"sample_s": None})
    with run.step(1):
        run.log(loss=1.0)
    comm.print(f"step {run.num_steps} of rank {comm.rank}", comm.is_main)
    if len(sys.argv) > 1:
        raise KeyError("lost")
