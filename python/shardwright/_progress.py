"""The progress line of a long search."""

import sys


def show_seconds(seconds: float) -> str:
    """Seconds in a readable unit.

    >>> show_seconds(0.0123)
    '12.30 ms'
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


class ProgressLine:
    """One line on standard error, rewritten while a search takes more than a second, and erased by `close`."""

    def __init__(self) -> None:
        self._written = 0

    def __call__(self, elapsed: float, best: float | None, bound: float) -> None:
        if elapsed < 1:
            return
        if best is None:
            text = f"{elapsed:.0f} s: no plan yet, lower bound {show_seconds(bound)}"
        else:
            gap = f", gap {max(best - bound, 0) / bound:.2%}" if bound > 0 else ""
            text = f"{elapsed:.0f} s: best {show_seconds(best)} per step{gap} (interrupt keeps the best)"
        sys.stderr.write("\r" + text.ljust(self._written))
        sys.stderr.flush()
        self._written = len(text)

    def close(self) -> None:
        """Erases the line."""
        if self._written:
            sys.stderr.write("\r" + " " * self._written + "\r")
            sys.stderr.flush()
            self._written = 0


def wanted() -> bool:
    """Whether standard error is a terminal, or the program a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
