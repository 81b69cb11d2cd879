"""One process of a script: `SCRIPT RANK WORLD PORT FOLDER`. The first process prints its results as JSON lines."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed


def run_cases(cases: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Runs all cases, up to the first that fails."""
    rank, world, port = sys.argv[1:4]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, RANK=rank, WORLD_SIZE=world)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            result = case()
        except Exception:
            result = {"error": traceback.format_exc()}
        if rank == "0":
            print(json.dumps({"case": name, **result}), flush=True)
        if "error" in result:
            break
    distributed.destroy_process_group()
