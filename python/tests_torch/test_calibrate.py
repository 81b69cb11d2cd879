"""`python -m shardwright.torch`: machine and cost files from measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from shardwright import plan


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shardwright.torch", *arguments], capture_output=True, text=True)


def test_a_probed_machine_and_profiled_costs_can_be_planned_with(tmp_path: Path) -> None:
    machine, costs, workloads = (str(tmp_path / name) for name in ["machine.toml", "costs.json", "workloads.json"])
    done = _run("probe", "--device", "cpu", "--name", "mine", "-o", machine)
    assert done.returncode == 0, done.stderr
    rows = [[1, 64, 64, 64], [1, 32, 64, 16]]
    Path(workloads).write_text(
        json.dumps({"format": "shardwright-workloads", "tables": [{"class": "gemm", "dtype": "f32", "rows": rows}]})
    )
    done = _run("profile", workloads, "--device", "cpu", "--name", "mine", "-o", costs)
    assert done.returncode == 0, done.stderr
    measured = json.loads(Path(costs).read_text())
    assert [row[:4] for row in measured["tables"][0]["rows"]] == sorted(rows)
    assert plan("mlp:batch=8,hidden=16", machine=machine, costs=costs).devices == 1


def test_wrong_files_and_devices_are_named(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    done = _run("profile", str(other), "--device", "cpu", "-o", str(tmp_path / "costs.json"))
    assert done.returncode != 0 and "not a workload list" in done.stderr and "profile --list" in done.stderr
