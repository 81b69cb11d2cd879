"""Programs on gloo end cleanly: no thread of gloo is left that would touch Python's objects while Python ends."""

import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
import atexit, os
import torch

@atexit.register  # registered first, so it runs last
def left():
    tasks = "/proc/self/task"
    names = [open(f"{tasks}/{task}/comm").read().strip() for task in os.listdir(tasks)]
    # One write: lines of two processes do not mix.
    print(f"left: {[name for name in names if 'gloo' in name]} started: {started}\\n", end="")

from shardwright.torch import parallelize

torch.distributed.init_process_group("gloo")
module = torch.nn.Linear(8, 10)
given, targets = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
model = parallelize(module, (given, targets), loss_fn=torch.nn.functional.cross_entropy, solver="data", progress=False)
model(given, targets).backward()
started = any("gloo" in open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task"))
DESTROY
"""


def run(folder: Path, last: str) -> str:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).replace("DESTROY", last))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_thread_of_gloo_outlives_a_program_that_destroys_its_groups(tmp_path: Path) -> None:
    assert run(tmp_path, "torch.distributed.destroy_process_group()").count("left: [] started: True") == 2


def test_no_thread_of_gloo_outlives_a_program_that_does_not(tmp_path: Path) -> None:
    assert run(tmp_path, "").count("left: [] started: True") == 2
