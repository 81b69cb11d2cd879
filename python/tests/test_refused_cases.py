"""Every refusal names a line of the user's code, and every place of the package that refuses is reached by a case."""

import ast
import importlib.util

import pytest
import refused_cases
from refused_cases import PACKAGE, REFUSED, lines_of, message_of, outcome

# Functions whose refusals no case reaches: they need several processes, or a kind of equation that JAX does not write today.
UNREACHED = {("_processes.py", "planned_once"), ("_sample_flow.py", "_of_bodies"), ("_sample_flow.py", "_loop")}
# Cases that need Flax, and the functions that only they reach.
NNX = [name for name, function in REFUSED.items() if "nnx" in function.__code__.co_names]
HAS_FLAX = importlib.util.find_spec("flax") is not None
if not HAS_FLAX:
    UNREACHED |= {("_capture.py", "__call__"), ("_capture.py", "_changes"), ("_nnx.py", "states_of")}
# Functions that make a refusal for others to raise.
MAKERS = {"PlanError", "DoesNotFit", "Refused", "refuse"}


@pytest.fixture(scope="module")
def tried():
    """The errors of all cases, and the lines of the package that they ran."""
    seen = set()
    able = {name: function for name, function in REFUSED.items() if HAS_FLAX or name not in NNX}
    return {name: outcome(function, seen) for name, function in able.items()}, seen


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_line(tried, name):
    if name not in tried[0]:
        pytest.skip("flax is not installed")
    error, lines = tried[0][name], lines_of(REFUSED[name])
    assert error is not None, "nothing was refused"
    assert lines, "no line is marked"
    named = [f"{refused_cases.__file__}:{line}" for line in lines]
    text = message_of(error)
    # A longer number is another line.
    assert any(f"{place}{end}" in text for place in named for end in (" ", ":")), (text, lines)


def test_every_refusal_of_the_package_is_tried(tried):
    left = []
    for path in sorted(PACKAGE.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or (path.name, function.name) in UNREACHED:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Raise) and _makes_a_refusal(node.exc):
                    lines = range(node.lineno, node.end_lineno + 1)
                    if not any((path.name, line) in tried[1] for line in lines):
                        left.append(f"{path.name}:{node.lineno} ({function.name})")
    assert not left, left


def _makes_a_refusal(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS
