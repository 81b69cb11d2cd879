#!/usr/bin/env python3
"""Draws docs/pictures/headlines.svg from the headline table of docs/benchmarks.md: one bar per row that has a ratio.

    scripts/bench_chart.py
"""

import html
import math
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, NAMES, ROW, TOP = 820, 400, 26, 8


def rows():
    """Name, ratio as written, and kind of every row of the first table that has a ratio."""
    for line in (DOCS / "benchmarks.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            return
        if len(cells) == 6 and cells[3].replace(".", "").isdigit():
            yield cells[0], cells[3], cells[4]


def draw(table):
    bottom = TOP + ROW * len(table)
    decades = math.ceil(max(math.log10(float(times)) for _, times, _ in table))
    x = lambda times: NAMES + (WIDTH - NAMES - 60) * math.log10(times) / decades
    # Grey text and lines are legible on light and dark pages.
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" font-family="sans-serif" font-size="13" fill="#7a7f87">']
    for decade in range(decades + 1):
        at = x(10**decade)
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" stroke="#7a7f87" stroke-opacity="0.4"/>')
        out.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{10**decade}x</text>')
    for at, (name, times, kind) in enumerate(table):
        y = TOP + ROW * at
        colour = "#0072b2" if kind == "measured" else "#e69f00"
        end = max(x(float(times)), NAMES + 1.5)
        out.append(f'<text x="{NAMES - 8}" y="{y + 17}" text-anchor="end">{html.escape(name)}</text>')
        out.append(f'<rect x="{NAMES}" y="{y + 5}" width="{end - NAMES:.1f}" height="{ROW - 9}" fill="{colour}"/>')
        out.append(f'<text x="{end + 5:.1f}" y="{y + 17}">{times}x{"" if kind == "measured" else ", predicted"}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "pictures" / "headlines.svg").write_text(draw(list(rows())))
