"""Two processes of four devices each compute what one device computes."""

import pathlib
import socket
import subprocess
import sys


def test_two_processes_compute_what_one_device_computes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = pathlib.Path(__file__).with_name("one_of_two.py")
    both = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    for process, output in zip(both, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.count("agree") == 3, output
