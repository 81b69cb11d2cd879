"""The search benchmark: our solvers beside toulbar2 and HiGHS, on PaSE's networks and the contest's.

usage: scripts/bench search [--quick] [--only pase|contest|free|large] [--write]

Prints Markdown. --write puts it into docs/benchmarks-search.md, section by section; --quick shortens every time limit to
a tenth and leaves out the slowest comparisons. The data is read from $SHARDWRIGHT_SHARED or ../shared.
Every assignment of ours is evaluated again here, independently of the program that found it.
"""

import argparse
import datetime
import gzip
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = pathlib.Path(os.environ.get("SHARDWRIGHT_SHARED", ROOT.parent / "shared"))
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
PROGRAM = TARGET / "shardwright"
DOCUMENT = ROOT / "docs" / "benchmarks-search.md"

# Optima that PaSE's released program prints (it was not run on resnet101).
PASE = {
    "alexnet-p4": 148215719552, "alexnet-p8": 97098296512,
    "rnnlm-p4": 6866837733376, "rnnlm-p8": 4024963186688,
    "inception3-p4": 986757044608, "inception3-p8": 782140602432,
    "transformer-p4": 2189181321216, "transformer-p8": 1421082828800,
    "resnet101-p4": None, "resnet101-p8": None,
}
# PaSE's own program on a 2-core machine, in seconds.
PASE_OWN = {"alexnet-p4": .21, "alexnet-p8": .21, "rnnlm-p4": .07, "rnnlm-p8": .10, "inception3-p4": 13.9,
            "inception3-p8": 23.4, "transformer-p4": 22.0, "transformer-p8": 70.1}
# The contest: time limit in seconds, first place (8 cores), best of all teams, best known lower bound, XLA's solver.
CONTEST = {
    "A": (60, 6569457676, 6548641531, 6513.8e6, 13214846074),
    "B": (60, 532843, 532843, 532843, 990205),
    "G": (120, 217039, 217039, 217039, 1264777),
    "M": (180, 49928460991, 49928157500, 49407e6, None),
    "S": (240, 1534613444, 1521949310, 1511.2e6, None),
}


def load(path):
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt") as file:
        return json.load(file)["problem"]


def judge(problem, choice, memory=True):
    """The cost of an assignment, or an explanation of what is wrong with it."""
    nodes, edges = problem["nodes"], problem["edges"]
    if len(choice) != len(nodes["costs"]):
        return f"{len(choice)} choices"
    cost = sum(row[c] for row, c in zip(nodes["costs"], choice))
    for (a, b), table in zip(edges["nodes"], edges["costs"]):
        cost += table[choice[a] * len(nodes["costs"][b]) + choice[b]]
    events = []
    for (lo, hi), usage, c in zip(nodes["intervals"], nodes["usages"], choice):
        if lo < hi:
            events += [(lo, usage[c]), (hi, -usage[c])]
    now = peak = 0
    for _, change in sorted(events):
        now += change
        peak = max(peak, now)
    limit = problem.get("usage_limit")
    return cost if not memory or limit is None or peak <= limit else f"over by {peak - limit}"


def ours(path, solver, seconds):
    """Our answer, with the wall-clock time of the whole program."""
    start = time.time()
    run = subprocess.run([PROGRAM, "solve", path, "--solver", solver, "--time", str(seconds), "--json"],
                         capture_output=True, text=True)
    elapsed = time.time() - start
    try:
        answer = json.loads(run.stdout)
    except ValueError:
        sys.exit(f"{path}: {solver}: {run.stderr.strip()}")
    answer["wall"] = elapsed
    return answer


def toulbar2(path, seconds, keep_memory=False):
    """toulbar2 on the same network; wall-clock time of the whole program, without the conversion."""
    if subprocess.run(["sh", "-c", "command -v toulbar2"], capture_output=True).returncode:
        return None
    with tempfile.TemporaryDirectory() as folder:
        cfn = os.path.join(folder, "network.cfn")
        extra = [] if keep_memory else ["--without-memory"]
        subprocess.run([PROGRAM, "convert", path, "-o", cfn, *extra], check=True)
        start = time.time()
        try:
            text = subprocess.run(["toulbar2", cfn, f"-timer={max(1, round(seconds))}"], capture_output=True, text=True,
                                  timeout=3 * seconds + 20).stdout
        except subprocess.TimeoutExpired as stopped:
            text = (stopped.stdout or b"").decode(errors="replace")
        elapsed = time.time() - start
    optimum = re.search(r"^Optimum: (\d+)", text, re.M)
    costs = [int(found) for found in re.findall(r"New solution: (\d+)", text)]
    bounds = [int(found) for found in re.findall(r"bounds?: \[(\d+),", text)]
    bounds += [int(found) for found in re.findall(r"Optimality gap: \[(\d+),", text)]
    bounds += [int(found) for found in re.findall(r"dual bound: (\d+)", text)]
    return {"wall": elapsed, "optimal": bool(optimum), "cost": min(costs, default=None),
            "bound": int(optimum[1]) if optimum else max(bounds, default=None)}


def highs(path, seconds, memory=True, patience=60):
    """HiGHS on the standard linearisation; the time is HiGHS's own, without building the model."""
    command = [sys.executable, ROOT / "scripts" / "bench_highs.py", path, str(seconds)]
    try:
        run = subprocess.run(command + ([] if memory else ["--without-memory"]), capture_output=True, text=True,
                             timeout=seconds + patience)
        return json.loads(run.stdout)
    except subprocess.TimeoutExpired:
        return {"seconds": None, "optimal": False, "cost": None, "bound": None}
    except ValueError:
        return None


def number(value):
    return "–" if value is None else f"{round(value):,}".replace(",", " ")


def ilp_bound(ilp):
    if ilp and ilp["bound"] is None and ilp.get("seconds") is None and ilp.get("nonzeros"):
        return f"not tried: {ilp['nonzeros'] / 1e6:.0f} M nonzeros"
    return number(ilp and ilp["bound"]) + (", optimal" if ilp and ilp["optimal"] else "")


def short(seconds):
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def best_of(runs, make):
    answers = [make() for _ in range(runs)]
    return min(answers, key=lambda answer: answer["wall"])


def pase(quick):
    rows = []
    for name, published in PASE.items():
        path = SHARED / "pase" / f"pase-{name}.json.gz"
        problem = load(path)
        answers = {solver: best_of(1 if quick else 3, lambda: ours(path, solver, 60)) for solver in ["exact", "pase", "optcnn"]}
        costs = {answer["cost"] for answer in answers.values()}
        for solver, answer in answers.items():
            found = judge(problem, answer["choices"]) if answer["choices"] else "nothing"
            if found != answer["cost"] or (published or answer["cost"]) != answer["cost"] or not answer["proved_optimal"]:
                sys.exit(f"{name}: {solver} says {answer['cost']}, judged {found}, published {published}")
        limit = 10 if quick else 60
        other, ilp = toulbar2(path, limit), highs(path, limit)
        def cell(answer, seconds):
            if answer is None:
                return "–"
            if not answer["optimal"]:
                return f"> {limit} s"
            if round(answer["cost"]) not in costs:
                return f"{short(seconds)} (optimum {number(answer['cost'])}?)"
            return short(seconds)
        rows.append([name, number(answers["exact"]["cost"]),
                     *(f"{short(answers[s]['wall'])}" for s in ["exact", "pase", "optcnn"]),
                     cell(other, other and other["wall"]), cell(ilp, ilp and ilp["seconds"]),
                     short(PASE_OWN.get(name))])
    return table(["network", "optimum (all agree, proved)", "exact", "pase", "optcnn", "toulbar2", "HiGHS", "PaSE's program"], rows)


def contest(quick):
    rows = []
    for name, (limit, first, best, bound, xla) in CONTEST.items():
        path = SHARED / "iopddl" / f"asplos-2025-iopddl-{name}.json.gz"
        seconds = limit / 10 if quick else limit
        answer = ours(path, "exact", seconds)
        judged = judge(load(path), answer["choices"]) if answer["choices"] else "nothing found"
        if answer["feasible"] and judged != answer["cost"]:
            sys.exit(f"{name}: exact says {answer['cost']}, judged {judged}")
        ilp = None if quick and name in "AMS" else highs(path, 10)
        cost = answer["cost"] if answer["feasible"] else None
        ratio = "–" if cost is None else f"{(cost / first - 1) * 100:+.3f}%"
        rows.append([name, f"{seconds:g} s", number(cost), number(answer["lower_bound"]),
                     "–" if answer["gap"] is None else f"{answer['gap'] * 100:.3f}%", f"{answer['wall']:.1f} s", ratio,
                     number(first), number(best), number(bound), number(xla), ilp_bound(ilp)])
    return table(["problem", "limit", "exact: cost", "exact: bound", "gap", "time used", "against first place", "first place",
                  "best known", "best known bound", "XLA's solver", "HiGHS: bound after 10 s"], rows)


def free(quick):
    """The contest's networks without their memory limits: exact, toulbar2 and HiGHS, ten seconds each."""
    rows = []
    for name in CONTEST:
        path = SHARED / "iopddl" / f"asplos-2025-iopddl-{name}.json.gz"
        with tempfile.TemporaryDirectory() as folder:
            bare = os.path.join(folder, "bare.json.gz")
            subprocess.run([PROGRAM, "convert", path, "-o", bare, "--without-memory"], check=True)
            answer = ours(bare, "exact", 10)
            other = toulbar2(bare, 10)
            ilp = None if quick and name in "AMS" else highs(bare, 10, memory=False)
        def cells(found, seconds):
            if found is None:
                return ["–", "–"]
            return [number(found["cost"]) + (f", proved in {short(seconds)}" if found["optimal"] else ""), number(found["bound"])]
        rows.append([name, number(answer["cost"]) + (f", proved in {short(answer['wall'])}" if answer["proved_optimal"] else ""),
                     number(answer["lower_bound"]), *cells(other, other and other["wall"]), *cells(ilp, ilp and ilp["seconds"])])
    return table(["problem, no memory limit", "exact: cost", "bound", "toulbar2: cost", "bound", "HiGHS: cost", "bound"], rows)


def large(quick):
    """Generated training steps of the contest's kind."""
    rows = []
    for layers in [4, 40] if quick else [4, 40, 160, 530]:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "large.json")
            with open(path, "w") as file:
                made = subprocess.run([TARGET / "examples" / "generate", "--layers", str(layers)], stdout=file,
                                      stderr=subprocess.PIPE, text=True, check=True)
            answer = ours(path, "exact", 6 if quick else 60)
        nodes = re.match(r"(\d+) nodes, (\d+) edges", made.stderr)
        cost = answer["cost"] if answer["feasible"] else None
        rows.append([layers, nodes[1], nodes[2], number(cost), number(answer["lower_bound"]),
                     "–" if answer["gap"] is None else f"{answer['gap'] * 100:.3f}%", f"{answer['wall']:.1f} s"])
    return table(["layers", "nodes", "edges", "exact: cost", "bound", "gap", "time used"], rows)


SECTIONS = {
    "pase": ("PaSE's networks", pase,
             "Wall-clock time of the whole program, file reading included (best of three); HiGHS without building its model. "
             "PaSE's program: the released Python code, run earlier on another machine of 2 cores."),
    "contest": ("The contest's problems", contest,
                "`exact` at the contest's own time limits. First place had 8 cores. Costs are judged again by the benchmark."),
    "free": ("The contest's networks without memory limits", free, "Ten seconds for each program: of clock time, but of its own processor time for toulbar2."),
    "large": ("Generated training steps", large,
              "`cargo run --release -p shardwright-search --example generate -- --layers N`, one minute."),
}


def machine():
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = re.search(r"^model name\s*:\s*(.*)$", file.read(), re.M)[1]
    except (OSError, TypeError):
        pass
    load = os.getloadavg()[0]
    busy = f"; other work on the machine: load average {load:.0f}" if load > 2 * (os.cpu_count() or 1) else ""
    return f"{model}, {os.cpu_count()} cores, {platform.system()}; {datetime.date.today()}{busy}"


def write(name, text):
    """Replaces one marked part of the document."""
    begin, end = f"<!-- search {name}: written by scripts/bench search --write -->", f"<!-- search {name}: end -->"
    document = DOCUMENT.read_text()
    part = f"{begin}\n{text}\n{end}"
    if begin in document:
        document = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: part, document, flags=re.S)
    else:
        # New parts go to the end.
        document = document.rstrip() + "\n\n" + part + "\n"
    DOCUMENT.write_text(document)


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench search")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, fewer comparisons")
    parser.add_argument("--only", choices=list(SECTIONS), help="one table only")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks-search.md")
    args = parser.parse_args()
    if not (SHARED / "pase").is_dir():
        sys.exit(f"no data in {SHARED}: set SHARDWRIGHT_SHARED to the folder that holds pase/ and iopddl/")
    for name, (title, run, note) in SECTIONS.items():
        if args.only in (None, name):
            text = f"## {title}\n\n{note} {machine()}.\n\n{run(args.quick)}"
            print(text + "\n", flush=True)
            if args.write:
                write(name, text)


if __name__ == "__main__":
    main()
