"""The exit codes of `paceline train` and of its ranks: what a scheduler is told.

Slurm and Kubernetes decide by the code alone whether a job is started again, so each code means one thing and stays
what it is. 75 is the `EX_TEMPFAIL` of sysexits.h: nothing is wrong, try again later.
"""

from typing import Final

DONE: Final = 0  # all steps were trained
FAILED: Final = 1  # a rank failed, and starting again is not allowed or would not help
REFUSED: Final = 2  # the command line or the config was refused: nothing was started
PREEMPTED: Final = 75  # a signal asked to stop; saved, or no step was trained yet: start it again with `--resume auto`
HUNG: Final = 76  # the ranks stopped making progress; the verdict names the rank and the line
NO_PROGRESS: Final = 77  # the run was started again as often as it may be, or got no further than before
MEANINGS: Final = {DONE: "done", FAILED: "failed", REFUSED: "refused before it started"} | {
    PREEMPTED: "preempted: saved, or no step trained yet; start it again",
    HUNG: "hung",
    NO_PROGRESS: "gave up: no progress between restarts",
}
