"""An integer program of recomputation on one device, in the manner of Checkmate (Jain et al. 2020), solved by HiGHS.

usage: checkmate.py TABLES.json [SECONDS]

TABLES.json is the output of the example `keep_tables`. The program is restricted to what the planner's space has: each value is
recomputed at most once, and a value that is recomputed is not kept. In the planner's space a clone also stands directly before the
first op that needs it; a second program without that rule shows what it costs. Both know nothing of the planner's network. Prints one
row per limit: percent, our cost, whether it is proved, local search, the program, the program with early clones. Fails where an
optimum differs from a proved answer.

Moments are the runs of ops, and, before every backward or update op, of the clones of forward ops in their order. Variables:
`C[i, j]`, a clone of op i runs before op j; `A[t, q]`, tensor t is held at moment q. Memory at every moment keeps the limit.
"""

import json
import sys

import highspy


class Step:
    """The graph of a step without clones. Views live in the memory of the tensor that they show."""

    def __init__(self, tables):
        self.ops, self.bytes = tables["ops"], tables["tensors"]
        count = len(self.ops)
        self.maker = {t: i for i, op in enumerate(self.ops) for t in op["outputs"]}
        self.root = {}
        for op in self.ops:
            if op["view"]:
                self.root[op["outputs"][0]] = self.shown(op["inputs"][0])
        self.readers = {}
        for i, op in enumerate(self.ops):
            for t in op["inputs"]:
                self.readers.setdefault(self.shown(t), set()).add(i)
        self.leaves = {self.shown(t) for t in tables["outputs"] + tables["updated"]}
        self.updated = set(tables["updated"])
        self.later = [j for j, op in enumerate(self.ops) if not op["forward"]]
        forward = [i for i, op in enumerate(self.ops) if op["forward"]]
        assert max(forward) < min(self.later), "all forward ops come first"
        self.free = [i for i in forward if not self.ops[i]["view"] and not self.leaves & set(self.ops[i]["outputs"])]
        self.end = count

    def shown(self, tensor):
        return self.root.get(tensor, tensor)

    def reads(self, op):
        """The tensors that an op reads, without views of weights and data."""
        return {self.shown(t) for t in self.ops[op]["inputs"]} & self.maker.keys()

    def last(self, tensor):
        """The last op that needs a tensor."""
        if tensor in self.leaves and tensor not in self.updated:
            return self.end - 1
        return max(self.readers.get(tensor, set()) | {self.maker[tensor]})


def solve(step, limit, seconds, early):
    """The least time of clones in picoseconds under a limit of bytes; none where nothing fits. Early clones may stand before any
    later op, others only directly before the first op or clone that needs them."""
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("time_limit", float(seconds))
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.setOptionValue("mip_abs_gap", 0.5)
    time = lambda i: step.ops[i]["time"]
    # A clone of op i before op j.
    clone = {}
    for i in step.free:
        for j in step.later:
            clone[i, j] = highs.addBinary(obj=time(i))
    again = {i: sum(clone[i, j] for j in step.later) for i in step.free}
    for i in step.free:
        highs.addConstr(again[i] <= 1)
    until = {}
    for i in step.free:
        total = None
        for j in step.later:
            total = clone[i, j] if total is None else total + clone[i, j]
            until[i, j] = total
    for j in step.later:
        for t in step.reads(j):
            i = step.maker[t]
            if i in again:
                highs.addConstr(until[i, j] >= again[i])
        for k in step.free:
            for t in step.reads(k):
                i = step.maker[t]
                if i in again:
                    highs.addConstr(until[i, j] + 1 - again[i] >= clone[k, j])
    if not early:
        reads = {k: {step.maker[t] for t in step.reads(k)} for k in range(step.end)}
        for i in step.free:
            for j in step.later:
                readers = [clone[k, j] for k in step.free if i in reads[k]]
                if i not in reads[j]:
                    highs.addConstr(clone[i, j] <= sum(readers) if readers else clone[i, j] <= 0)
    # Held all step long: weights, state and data.
    held_always = sum(size for t, size in enumerate(step.bytes) if t not in step.maker)
    plain = [t for t in step.maker if step.shown(t) == t and t not in step.updated and step.maker[t] not in again]
    moments = [(p, p) for p in range(step.end)] + [(j, k) for j in step.later for k in step.free]
    for slot, op in sorted(moments):
        own = slot == op
        base = held_always
        for t in plain:
            first, last = step.maker[t], step.last(t)
            base += step.bytes[t] if (first <= slot if own else first < slot) and slot <= last else 0
        memory = []
        for i in step.free:
            for t in step.ops[i]["outputs"]:
                if step.bytes[t] == 0 or i > slot:
                    continue
                readers = step.readers.get(t, set())
                forward = [r for r in readers if step.ops[r]["forward"]]
                direct = any(j >= slot for j in readers if not step.ops[j]["forward"])
                if slot <= max(forward, default=i):
                    base += step.bytes[t]
                    continue
                if slot < step.later[0]:
                    # The end of the forward pass: held where anything needs it later, and not recomputed.
                    started = None
                else:
                    slots = [j for j in step.later if (j, i) <= (slot, op if not own else step.end)]
                    started = sum(clone[i, j] for j in slots) if slots else None
                alive = highs.addVariable(lb=0, ub=1)
                memory.append((step.bytes[t], alive))
                # What a clone reads after this moment.
                needs = []
                for k in forward:
                    if k in again:
                        after = [j for j in step.later if (j, k) >= (slot, op if not own else step.end)]
                        needs += [sum(clone[k, j] for j in after)] if after else []
                if direct:
                    highs.addConstr(alive >= 1 - again[i])
                    if started is not None:
                        highs.addConstr(alive >= started)
                for need in needs:
                    highs.addConstr(alive >= need - again[i])
                    if started is not None:
                        highs.addConstr(alive >= started + need - 1)
                if not own and op == i:
                    highs.addConstr(alive >= clone[i, slot])
        if base > limit:
            return None
        if memory:
            # In units of the limit: coefficients near one keep the solver exact.
            scale = 1e3 / limit
            highs.addConstr(sum(size * scale * alive for size, alive in memory) <= (limit - base) * scale)
    highs.run()
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    if status != highspy.HighsModelStatus.kOptimal:
        raise TimeoutError(f"HiGHS: {highs.modelStatusToString(status)}")
    values = highs.getSolution().col_value
    return sum(time(i) for (i, j), column in clone.items() if values[column.index] > 0.5)


def compare(tables, seconds):
    """Per limit: percent, our cost, whether it is proved, local search, and the costs of both programs."""
    step = Step(tables)

    def cost(limit, early):
        try:
            again = solve(step, limit, seconds, early)
        except TimeoutError as error:
            return str(error)
        return None if again is None else tables["kept"]["time"] + again

    for answer in tables["answers"]:
        program = cost(answer["limit"], False)
        if answer["proved"] and not isinstance(program, str) and program != answer["cost"]:
            raise SystemExit(f"at {answer['percent']}%: our optimum is {answer['cost']}, that of the program {program}")
        early = cost(answer["limit"], True)
        yield answer["percent"], answer["cost"], answer["proved"], answer["local"], program, early


if __name__ == "__main__":
    for row in compare(json.load(open(sys.argv[1])), sys.argv[2] if len(sys.argv) > 2 else 60):
        print(*row)
