#!/usr/bin/env bash
# A graph of your own on a machine of your own: two files, and every command takes them.
set -euo pipefail
shardwright=${SHARDWRIGHT:-shardwright}
examples=$(cd "$(dirname "$0")" && pwd)
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT

# The file has a forward pass and its loss; gradients and updates are added.
"$shardwright" models "$examples/own_graph.json"

# The link between the hosts is slow: which of the usual recipes is worst, and what is best?
"$shardwright" compare "$examples/own_graph.json" --machine "$examples/own_machine.toml" --solver auto,data,megatron,fsdp

# A wish, and what it costs: the layer `wide` by samples on all devices.
"$shardwright" plan "$examples/own_graph.json" --machine "$examples/own_machine.toml" --fix 'wide=m4' -o "$here/wish.json"
"$shardwright" plan "$examples/own_graph.json" --machine "$examples/own_machine.toml" -o "$here/plan.json"
"$shardwright" diff "$here/wish.json" "$here/plan.json"

# Any plan can be carried out here, with a thread for each of its devices.
"$shardwright" run "$here/plan.json" --steps 3
