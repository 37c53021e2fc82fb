"""``python bench VERB``: what Paceline's authors measure; ``bench/README.md`` says how."""

from __future__ import annotations

from measures.verbs import app
from paceline.cli.app import run_command

if __name__ == "__main__":
    run_command(app, "python bench")
