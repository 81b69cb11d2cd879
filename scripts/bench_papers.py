"""Prints the tables of docs/benchmarks-papers.md: published figures beside ours.

Ours are search times on this machine (in brackets processor seconds of the whole program) and predicted steps (simulated, with overlap); theirs
were measured on real machines. OptCNN's and PaSE's figures are from the papers themselves, curves read off the vector graphics.
"""

import resource

from bench_planning import print_tables, run_json

# OptCNN, table 3: layers, exhaustive search, the paper's algorithm, on 4 GPUs.
OPTCNN_SEARCH = {
    "lenet5": (6, "5.6 s", "0.01 s"),
    "alexnet": (11, "2.1 h", "0.02 s"),
    "vgg16": (21, "> 24 h", "0.1 s"),
    "inception_v3": (102, "> 24 h", "0.4 s"),
}
# OptCNN, figure 7: images a second on 1, 2, 4, 8 and 16 P100s.
OPTCNN_RATES = {
    "alexnet": {"model": [745, 1303, 1824, 2460, 3303], "data": [745, 1181, 1760, 2484, 3230],
                "owt": [745, 1400, 2029, 3043, 4260], "optcnn": [745, 1492, 2741, 4934, 9045]},
    "vgg16": {"model": [184, 313, 502, 778, 1048], "data": [184, 343, 632, 1080, 1660],
              "owt": [184, 360, 700, 1216, 1990], "optcnn": [184, 364, 727, 1417, 2715]},
    "inception_v3": {"model": [157, 220, 264, 224, 160], "data": [157, 305, 503, 966, 1690],
                     "owt": [157, 310, 522, 992, 1745], "optcnn": [157, 316, 632, 1248, 2430]},
}
OPTCNN_DEVICES = [1, 2, 4, 8, 16]
# OptCNN, table 5: VGG-16 on 4 GPUs.
OPTCNN_VGG = [
    ("conv1_1 to pool4", ["conv1_1", "conv2_1", "conv3_1", "conv4_1"], "n=4"),
    ("conv5_1 to pool5", ["conv5_1", "conv5_2", "conv5_3"], "h=2, w=2"),
    ("fc6, fc7", ["fc6", "fc7"], "c=4 (output channels)"),
    ("fc8", ["fc8"], "c=2 (output channels)"),
]
# PaSE, table I: seconds of exhaustive breadth-first search, FlexFlow and PaSE on 4, 8, 16, 32 and 64 devices.
PASE_SEARCH = {
    "alexnet": (128, [(0.234, 2.54, 0.226), (0.260, 2.77, 0.253), (0.303, 6.98, 0.295), (0.385, 7.92, 0.361), (0.485, 257.3, 0.475)]),
    "inception_v3": (128, [(None, 69.21, 14.398), (None, 146.51, 20.018), (None, 365.82, 39.791), (None, 937.96, 86.039), (None, 2237.04, 196.253)]),
    "rnnlm": (64, [(0.070, 107.07, 0.057), (0.084, 164.29, 0.086), (0.109, 432.19, 0.069), (0.167, 668.22, 0.131), (0.271, 1041.98, 0.215)]),
    "transformer": (64, [(None, None, 9.752), (None, None, 28.798), (None, None, 130.882), (None, None, 553.022), (None, None, 1883.187)]),
}
PASE_DEVICES = [4, 8, 16, 32, 64]
# PaSE, table II: strategies on 32 devices, in the words of our configs (b is n, c is c, n is o).
PASE_STRATEGIES = {
    "alexnet": (128, [("conv1", "n32"), ("conv5", "n16·c2"), ("fc1", "o4·c8"), ("fc2", "o8·c4"), ("fc3", "o4·c8")]),
    "inception_v3": (128, [("conv1a", "n32"), ("mixed7c.branch1.conv1", "n16·o2"), ("fc", "o2·c16")]),
    "rnnlm": (64, [("embedding", "v32"), ("lstm1", "two layers apart, b4·d2·e2"), ("logits", "v32")]),
}


def seconds(value):
    return "–" if value is None else f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def found(program, *args):
    """A plan, with how long it took to find."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    plan = run_json(program, "plan", *args)
    plan["took"] = f"{seconds(plan['search_seconds'])} ({resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before:.2f})"
    return plan


def optcnn_search(program):
    print("| model | layers | exhaustive (paper) | OptCNN (paper) | ours: `optcnn` | `pase` | `exact` |")
    print("|---|---|---|---|---|---|---|")
    for model, (layers, exhaustive, theirs) in OPTCNN_SEARCH.items():
        ours = [
            found(program, model, "--machine", "p100x16:4", "--batch", 128, "--solver", solver)["took"]
            for solver in ["optcnn", "pase", "exact"]
        ]
        print(f"| {model} | {layers} | {exhaustive} | {theirs} | {' | '.join(ours)} |", flush=True)


def optcnn_rates(program):
    print("| model | strategy | " + " | ".join(f"{count}" for count in OPTCNN_DEVICES) + " | 16 over 1 | paper: 16 | paper: 16 over 1 |")
    print("|---|---|" + "---|" * (len(OPTCNN_DEVICES) + 3))
    for model, paper in OPTCNN_RATES.items():
        names = [*paper, "auto"]
        answer = run_json(
            program, "compare", model, "--machine", "p100x16", "--solver", ",".join(names),
            "--devices", ",".join(map(str, OPTCNN_DEVICES)), "--batch-per-device", 32,
        )
        for name in names:
            steps = {
                scale["devices"]: row["step_seconds"] for scale in answer["scaling"] for row in scale["rows"] if row["solver"] == name
            }
            rates = [32 * count / steps[count] for count in OPTCNN_DEVICES]
            theirs = paper.get(name)
            shown = f"{theirs[-1]} | {theirs[-1] / theirs[0]:.1f}" if theirs else " | "
            print(f"| {model} | {name} | {' | '.join(f'{rate:.0f}' for rate in rates)} | {rates[-1] / rates[0]:.1f} | {shown} |", flush=True)


def optcnn_strategy(program):
    print("| VGG-16 on 4 P100s | paper | ours: `optcnn` | `exact` |")
    print("|---|---|---|---|")
    plans = {}
    for solver in ["optcnn", "exact"]:
        plan = run_json(program, "plan", "vgg16", "--machine", "p100x16:4", "--batch", 128, "--solver", solver)
        plans[solver] = {layer["name"]: layer["config"] for layer in plan["layers"]}
    for title, layers, theirs in OPTCNN_VGG:
        ours = [", ".join(dict.fromkeys(plans[solver][layer] for layer in layers)) for solver in ["optcnn", "exact"]]
        print(f"| {title} | {theirs} | {' | '.join(ours)} |", flush=True)


def pase_search(program):
    print("| model | devices | exhaustive (paper) | FlexFlow (paper) | PaSE (paper) | ours: `pase` | `exact` | on |")
    print("|---|---|---|---|---|---|---|---|")
    for model, (batch, rows) in PASE_SEARCH.items():
        for devices, (exhaustive, flexflow, theirs) in zip(PASE_DEVICES, rows):
            options = ["--machine", f"1080tix64:{devices}", "--batch", batch, "--time", 60]
            plans = {solver: found(program, model, *options, "--solver", solver) for solver in ["pase", "exact"]}
            axes = "prime axes" if plans["pase"]["space"]["prime_axes"] else "merged axes"
            ours = " | ".join(plan["took"] for plan in plans.values())
            print(f"| {model} | {devices} | {seconds(exhaustive)} | {seconds(flexflow)} | {seconds(theirs)} | {ours} | {axes} |", flush=True)


def pase_strategies(program):
    print("| model | layer | paper (table II) | ours: `exact` |")
    print("|---|---|---|---|")
    for model, (batch, layers) in PASE_STRATEGIES.items():
        plan = run_json(program, "plan", model, "--machine", "1080tix64:32", "--batch", batch, "--solver", "exact", "--time", 60)
        ours = {layer["name"]: layer["config"] for layer in plan["layers"]}
        for layer, theirs in layers:
            print(f"| {model} | {layer} | {theirs} | {ours[layer]} |", flush=True)


if __name__ == "__main__":
    print_tables(
        __doc__,
        {
            "optcnn-search": optcnn_search, "optcnn-rates": optcnn_rates, "optcnn-strategy": optcnn_strategy,
            "pase-search": pase_search, "pase-strategies": pase_strategies,
        },
    )
