"""The class names of earlier versions, which are classes of ``paceline_classic``.

Scripts take them from here. The package itself has them too, for scripts that were written before.
"""

from typing import TYPE_CHECKING

from paceline_classic import __dir__ as __dir__
from paceline_classic import __getattr__ as __getattr__

if TYPE_CHECKING:
    from paceline_classic import *  # noqa: F403
