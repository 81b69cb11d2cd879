"""Starts processes that run the cases of a script."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys
from typing import Any


def launch(script: str, world: int, folder: pathlib.Path) -> dict[str, Any]:
    """The results of a script's cases, by name, as the first process prints them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(pathlib.Path(__file__).with_name(script))]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(port), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if rank else None,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        output = processes[0].communicate(timeout=600)[0]
    finally:
        for process in processes:
            process.kill()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    for line in lines:
        assert "error" not in line, f"{line['case']}: {line['error']}"
    return {line["case"]: line for line in lines}
