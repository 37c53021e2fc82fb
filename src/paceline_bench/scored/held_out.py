"""Constants that were fitted without one family of published runs: what is foretold of runs that nobody has seen.

``held_out.yaml`` has them by the name of the family that was left out; ``bench/fit_constants.py --write`` writes it
beside the constants that are fitted on all families. A family of which no row was fitted on has no sets of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

from paceline.bounded_yaml import load_shipped
from paceline.predict.formulas.constants import ConstantSets, read_constants


@cache
def held_out() -> Mapping[str, ConstantSets]:
    """Returns sets by the family that they were fitted without."""
    families = load_shipped(resources.files("paceline_bench.scored").joinpath("held_out.yaml").read_text())
    return {name: read_constants(each["constants"], each["domain"]) for name, each in families.items()}
