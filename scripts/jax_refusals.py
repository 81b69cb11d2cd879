"""Makes every call of python/tests/refused_cases.py, and prints what is refused, and whether the message names the user's line.

    python scripts/jax_refusals.py [--write] [NAME ...]

Prints a row per case. Status 1 if something is not refused, or its message names no line. `--write` puts the table into
docs/jax-refusals.md. Needs flax.
"""

import os
import pathlib
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "python" / "tests"))

import refused_cases  # noqa: E402
from refused_cases import REFUSED, lines_of, message_of, outcome  # noqa: E402

PAGE = ROOT / "docs" / "jax-refusals.md"
START, END = "<!-- begin: scripts/jax_refusals.py -->", "<!-- end -->"


def row(name):
    """The row of a case, and whether it is as it should be."""
    error = outcome(REFUSED[name])
    if error is None:
        return f"| {name.replace('_', ' ')} | nothing was refused | |", False
    text = message_of(error)
    named = any(f"{refused_cases.__file__}:{line}{end}" in text for line in lines_of(REFUSED[name]) for end in (" ", ":"))
    # Lines of the cases change; the table has the rest of the message.
    short = re.sub(r"\S*?([\w.<>]+\.py):\d+(?::\d+)? \(([^)]*)\)", r"FILE:LINE (\2)", " ".join(text.split()))
    short = re.sub(r"([a-z]+://|/)\S*/(?=\S)", "", short).replace("|", "\\|")
    short = short if len(short) <= 240 else short[:240] + " ..."
    # Outside of code, names such as `<locals>` are text, not markup.
    parts = [part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(short.split("`"))]
    return f"| {name.replace('_', ' ')} | {'`'.join(parts)} | {'yes' if named else 'no'} |", named


def main():
    names = [name for name in sys.argv[1:] if name != "--write"] or list(REFUSED)
    lines = ["| case | message | names the line |", "|---|---|---|"]
    print("\n".join(lines), flush=True)
    good = 0
    for name in names:
        text, named = row(name)
        good += named
        lines.append(text)
        print(text, flush=True)
    lines += ["", f"{good} of {len(names)} refusals name a line of the user's code."]
    print("\n".join(lines[-2:]))
    if "--write" in sys.argv:
        before, after = PAGE.read_text().split(START)[0], PAGE.read_text().split(END)[1]
        PAGE.write_text(before + "\n".join([START, *lines, END]) + after)
    return 0 if good == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
