"""``python -m paceline``: the command line, also under torchrun."""

from __future__ import annotations

from paceline.cli.main import main

main()
