#!/usr/bin/env bash
# A first session: find a plan, ask why, look at the step, and run it for real on this computer's cores.
set -euo pipefail
shardwright=${SHARDWRIGHT:-shardwright}
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cd "$here"

# What is there to choose from?
"$shardwright" models mlp
"$shardwright" machines

# A large layer on four GPUs: data parallelism would send all of its gradients.
"$shardwright" plan mlp:batch=64,hidden=2048,layers=3 --machine p100x16:4 -o gpu.json
"$shardwright" explain gpu.json fc2              # why fc2 is split so
"$shardwright" simulate gpu.json --trace step.json   # open step.json in Perfetto
"$shardwright" report gpu.json -o gpu.html       # the page for the browser

# The same question for two cores of this computer, and the answer put to the test: `run` trains for some steps, trains
# the serial program as well, and ends with an error if they differ by more than rounding explains.
"$shardwright" plan mlp:batch=64,hidden=256,layers=3 --machine cpu:2 -o cpu.json
"$shardwright" run cpu.json --steps 3
