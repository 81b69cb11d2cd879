#!/usr/bin/env bash
# Choices with costs, pairs of choices with costs, and a limit on what may be in use at once: the search core alone.
set -euo pipefail
shardwright=${SHARDWRIGHT:-shardwright}
network=$(dirname "$0")/network.json

# The last line is the choice of every node; the exit status is 0 only if one keeps the limit.
"$shardwright" solve "$network"

# Every assignment tried one by one comes to the same cost.
cost() { "$shardwright" solve "$network" --solver "$1" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["cost"])'; }
test "$(cost exact)" = "$(cost brute)"
