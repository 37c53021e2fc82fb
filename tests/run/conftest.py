"""The command line called in this process, and runs to call it with; see ``pool/command_runs.py``."""

from command_runs import all_gone as all_gone
from command_runs import call as call
from command_runs import ends as ends
from command_runs import live as live
from command_runs import project as project
