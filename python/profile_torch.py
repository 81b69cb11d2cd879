#!/usr/bin/env python3
"""`python -m shardwright.torch profile` for computers without the package: only PyTorch is needed.

usage: profile_torch.py WORKLOADS.json|attention|experts|convolutions -o COSTS.json [--help]
"""
import argparse
import importlib.util
import os

_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shardwright", "torch", "_profile.py")

if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("profile_ops", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    module.add_arguments(parser)
    module.run(parser.parse_args())
