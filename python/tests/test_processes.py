"""Two processes of four devices each compute the same as one device. If one is lost, the other ends too."""

import pathlib
import re
import socket
import subprocess
import sys


def two_processes(*more):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = pathlib.Path(__file__).with_name("one_of_two.py")
    return [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(port), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def test_two_processes_compute_the_same_as_one_device():
    both = two_processes()
    try:
        outputs = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    for process, output in zip(both, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.count("agree") == 4, output


def test_a_process_that_is_lost_ends_the_other_with_a_message():
    both = two_processes("forever")
    try:
        for process in both:
            assert any("agree" in line for line in process.stdout)
        both[1].kill()
        output, _ = both[0].communicate(timeout=300)
    finally:
        for process in both:
            process.kill()
    assert both[0].returncode != 0, output
    # Either the running collective or the coordination service notices first.
    assert re.search("closed by peer|reset by peer|connection|heartbeat", output, re.IGNORECASE), output
