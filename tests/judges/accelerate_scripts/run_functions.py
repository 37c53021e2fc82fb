"""Runs functions of accelerate's test scripts with ours in the place of torch's; started by torchrun.

Each rank writes a line for each function to a file of its own: the name, and the error or nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.simplefilter("ignore")

import in_place_of_torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import PartialState  # noqa: E402


def main() -> None:
    in_place_of_torch.replace_process_groups()
    in_place_of_torch.replace_data_parallel()
    dist.init_process_group("gloo")
    Accelerator()
    output = Path(sys.argv[1]).with_suffix(f".{os.environ['RANK']}")
    for script, name, *given in json.loads(sys.argv[2]):
        work: Callable[..., Any] = getattr(importlib.import_module(f"accelerate.test_utils.scripts.{script}"), name)
        asked = [
            {"Accelerator": Accelerator, "PartialState": PartialState}.get(str(each), lambda e=each: e)()
            for each in given
        ]
        error = ""
        try:
            work(*asked)
        except Exception:
            error = traceback.format_exc()
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps([[script, name, *given], error]) + "\n")
        if error:
            os._exit(1)  # the ranks are no longer at the same place


main()
