"""Solves one cost network as an integer program with HiGHS and prints one JSON line.

usage: bench_highs.py NETWORK.json[.gz] SECONDS [--without-memory]

The standard linearisation, as in Alpa and XLA: a 0/1 variable per choice, a continuous one per cell of an
edge's table, whose row and column sums equal the choices; forbidden cells are left out. Memory gives one row
per time at which usage can be largest and above the limit. Models with more nonzeros than MOST_NONZEROS are not
built: HiGHS spends minutes and many gigabytes on their presolve, whatever its time limit.
"""

import gzip
import json
import sys
import time

import highspy
import numpy as np

FORBIDDEN = 10**18
MOST_NONZEROS = 20_000_000


def load(path):
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with (gzip.open if packed else open)(path, "rt") as file:
        return json.load(file)["problem"]


def binding_rows(problem):
    """The nodes alive at each time that matters."""
    limit = problem.get("usage_limit")
    if limit is None:
        return []
    most = [max(usage) for usage in problem["nodes"]["usages"]]
    events = []
    for node, (lo, hi) in enumerate(problem["nodes"]["intervals"]):
        if lo < hi and most[node] > 0:
            events += [(lo, 1, node), (hi, 0, node)]
    events.sort()
    alive, now, grown, rows = set(), 0, False, []
    for _, begins, node in events:
        if begins:
            alive.add(node)
            now += most[node]
        else:
            if grown and now > limit:
                rows.append(sorted(alive))
            alive.discard(node)
            now -= most[node]
        grown = bool(begins)
    return rows


def model(problem, memory):
    costs = [np.array(row, dtype=np.float64) for row in problem["nodes"]["costs"]]
    first = np.concatenate([[0], np.cumsum([len(row) for row in costs])]).astype(np.int64)
    objective = [np.concatenate(costs)]
    upper = [np.where(objective[0] >= FORBIDDEN, 0.0, 1.0)]
    objective[0] = np.where(objective[0] >= FORBIDDEN, 0.0, objective[0])
    rows, columns, values, low, high = [], [], [], [], []
    count = len(costs)
    # One choice per node.
    sizes = np.diff(first)
    rows.append(np.repeat(np.arange(count), sizes))
    columns.append(np.arange(first[-1]))
    values.append(np.ones(first[-1]))
    low.append(np.ones(count))
    high.append(np.ones(count))
    next_row, next_column = count, int(first[-1])
    for (a, b), table in zip(problem["edges"]["nodes"], problem["edges"]["costs"]):
        table = np.array(table, dtype=np.float64)
        if not table.any():
            continue
        cells = np.nonzero(table < FORBIDDEN)[0]
        i, j = cells // sizes[b], cells % sizes[b]
        column = next_column + np.arange(len(cells))
        objective.append(table[cells])
        upper.append(np.ones(len(cells)))
        # Row sums equal the first node's choice, column sums the second's.
        rows += [next_row + i, next_row + np.arange(sizes[a])]
        columns += [column, first[a] + np.arange(sizes[a])]
        values += [np.ones(len(cells)), -np.ones(sizes[a])]
        next_row += sizes[a]
        rows += [next_row + j, next_row + np.arange(sizes[b])]
        columns += [column, first[b] + np.arange(sizes[b])]
        values += [np.ones(len(cells)), -np.ones(sizes[b])]
        next_row += sizes[b]
        low.append(np.zeros(sizes[a] + sizes[b]))
        high.append(np.zeros(sizes[a] + sizes[b]))
        next_column += len(cells)
    if memory:
        alive_rows = binding_rows(problem)
        nonzeros = sum(map(len, rows)) + sum(int(sizes[alive].sum()) for alive in alive_rows)
        if nonzeros > MOST_NONZEROS:
            return None, nonzeros
        for alive in alive_rows:
            column = np.concatenate([np.arange(first[v], first[v + 1]) for v in alive])
            rows.append(np.full(len(column), next_row))
            columns.append(column)
            values.append(np.concatenate([np.array(problem["nodes"]["usages"][v], dtype=np.float64) for v in alive]))
            low.append(np.array([-highspy.kHighsInf]))
            high.append(np.array([float(problem["usage_limit"])]))
            next_row += 1
    rows, columns, values = np.concatenate(rows), np.concatenate(columns), np.concatenate(values)
    order = np.lexsort((rows, columns))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = next_column, int(next_row)
    lp.col_cost_ = np.concatenate(objective)
    lp.col_lower_, lp.col_upper_ = np.zeros(next_column), np.concatenate(upper)
    lp.row_lower_, lp.row_upper_ = np.concatenate(low), np.concatenate(high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(columns, minlength=next_column))]).astype(np.int32)
    lp.a_matrix_.index_ = rows[order].astype(np.int32)
    lp.a_matrix_.value_ = values[order]
    binary = int(first[-1])
    kinds = [highspy.HighsVarType.kInteger] * binary
    lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (next_column - binary)
    return lp, len(rows)


def main():
    path, seconds = sys.argv[1], float(sys.argv[2])
    lp, nonzeros = model(load(path), "--without-memory" not in sys.argv)
    if lp is None:
        print(json.dumps({"seconds": None, "optimal": False, "cost": None, "bound": None, "nonzeros": nonzeros}))
        return
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", seconds)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.5)
    start = time.time()
    solver.passModel(lp)
    solver.run()
    elapsed = time.time() - start
    info = solver.getInfo()
    bound = info.mip_dual_bound
    found = info.primal_solution_status == 2
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    print(json.dumps({
        "seconds": elapsed,
        "optimal": optimal,
        "cost": round(info.objective_function_value) if found else None,
        "bound": bound if abs(bound) < 1e30 else None,
        "columns": lp.num_col_,
        "rows": lp.num_row_,
        "nonzeros": nonzeros,
    }))


if __name__ == "__main__":
    main()
