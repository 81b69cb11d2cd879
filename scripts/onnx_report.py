#!/usr/bin/env python3
"""Counts the results of ONNX's node tests, and writes them into docs/onnx.md.

    scripts/onnx_report.py VERDICTS [--write DOCUMENT]

VERDICTS are the lines of the onnx crate's example `onnx_check`. Without --write the section is printed.
"""

import collections
import pathlib
import re
import sys

BEGIN, END = "<!-- node tests: written by scripts/onnx_report.py -->", "<!-- end of node tests -->"


def reasons(verdict, text):
    """Why a test did not pass: its group and a short reason."""
    if verdict in ("unknown", "refused") and text.startswith("unsupported ops:"):
        found = re.findall(r"  (\S+) x\d+: .*?(?=  \S+ x\d+:|$)", text)
        forms = re.findall(r"  (\S+) x\d+: [^(]*\((.*?)\)(?=  \S+ x\d+:|\s*$)", text)
        if verdict == "unknown":
            known = {op for op, _ in forms}
            return "ops", ", ".join(f"`{op}`" for op in sorted(set(found) - known))
        return "forms", "; ".join(f"`{op}`: {reason}" for op, reason in sorted(set(forms)))
    if verdict == "refused":
        kind = re.search(r"element type (\w+)", text)
        return "types", f"`{kind.group(1)}`" if kind else text
    if "opset" in text:
        return "opsets", "older than 13, or without ONNX's own operator set"
    if "is empty" in text:
        return "empty", "the graph has no empty tensors"
    return "other", text


TITLES = {
    "ops": "unsupported ops, listed by name if a model has them",
    "forms": "unsupported variants of supported ops, refused with a reason",
    "types": "element types",
    "opsets": "opsets",
    "empty": "empty tensors",
    "other": "inputs that are not tensors",
    "differs": "wrong results",
}


def section(lines):
    passed, groups = 0, collections.defaultdict(collections.Counter)
    for line in lines:
        verdict, folder, text = line.rstrip("\n").split("\t")
        if verdict == "ok":
            passed += 1
        elif verdict == "differs":
            groups["differs"][f"`{pathlib.Path(folder).name}`: {text}"] += 1
        else:
            title, reason = reasons(verdict, text)
            groups[title][reason] += 1
    total = passed + sum(sum(counts.values()) for counts in groups.values())
    judged = passed + sum(sum(groups[name].values()) for name in ("forms", "differs"))
    yield f"{passed} of the {total} node tests pass; of the {judged} whose ops, element types and opset are supported,"
    yield f"{100 * passed / judged:.1f}%. The rest:"
    yield ""
    yield "| tests | why they do not pass |"
    yield "|---:|---|"
    for name, title in TITLES.items():
        counts = groups.get(name)
        if not counts:
            continue
        each = ", ".join(f"{reason} {n}" if len(counts) > 1 else reason for reason, n in counts.most_common())
        yield f"| {sum(counts.values())} | {title}: {each} |"


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        text = "\n".join(section(file))
    if "--write" not in sys.argv:
        print(text)
        return
    document = pathlib.Path(sys.argv[sys.argv.index("--write") + 1])
    before, rest = document.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
