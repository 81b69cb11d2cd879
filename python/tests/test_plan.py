"""`shardwright.plan`."""

import json
import os
import signal
import threading
import time

import pytest

import shardwright


def test_errors_of_bad_requests_name_the_cause():
    for options, reason in [
        ({"model": "no-such-model"}, "no-such-model"),
        ({"model": "mlp", "machine": "no-such-machine"}, "no-such-machine"),
        ({"model": "mlp", "solver": "no-such-solver"}, "no-such-solver"),
        ({"model": "mlp", "memory": "much"}, "much"),
        ({"model": "mlp", "optimizer": "magic"}, "magic"),
        ({"model": "mlp", "time": float("nan")}, "nan is not a duration"),
        ({"model": "missing.mlir"}, "missing.mlir"),
        ({"model": "module {\n  oops\n}"}, "program.mlir:"),
    ]:
        with pytest.raises(shardwright.PlanError, match=reason):
            shardwright.plan(**options)


def test_too_little_memory_raises_does_not_fit():
    with pytest.raises(shardwright.DoesNotFit, match="does not fit|fits|memory"):
        shardwright.plan("mlp", machine="flat:4", memory="1000B")


def test_text_and_file_give_the_same_plan(tmp_path):
    text = """module @f {
  func.func public @main(%w: tensor<64x32xf32>, %x: tensor<16x64xf32>) -> tensor<16x32xf32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<16x64xf32>, tensor<64x32xf32>) -> tensor<16x32xf32>
    return %0 : tensor<16x32xf32>
  }
}
"""
    path = tmp_path / "f.mlir"
    path.write_text(text)
    ops = [shardwright.plan(model, machine="flat:4").data["ops"] for model in (text, path)]
    assert ops[0] == ops[1]


def test_a_saved_plan_contains_its_text(tmp_path):
    text = "module @f {\n  func.func public @main(%w: tensor<64x32xf32>) -> tensor<64x32xf32> {\n"
    text += "    %0 = stablehlo.add %w, %w : tensor<64x32xf32>\n    return %0 : tensor<64x32xf32>\n  }\n}\n"
    plan = shardwright.plan(text, machine="flat:4")
    plan.save(tmp_path / "plan.json")
    assert os.listdir(tmp_path) == ["plan.json"]
    saved = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert saved == plan.data
    # The command line opens this (crates/cli/tests/cli/export.rs).
    assert (saved["request"]["model"], saved["request"]["text"]) == ("program.mlir", text)
    assert "text" not in shardwright.plan("mlp", machine="flat:2").data["request"]


def test_reports_are_written_whole(tmp_path):
    plan = shardwright.plan("mlp", machine="flat:2")
    page = plan.report(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == page
    assert os.listdir(tmp_path) == ["plan.html"]
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert all(layer["name"] in page for layer in plan.data["layers"])
    assert all(layer["name"] in plan._repr_html_() for layer in plan.data["layers"])


def test_json_is_what_the_command_line_reads():
    data = json.loads(shardwright.plan("mlp", machine="flat:2").to_json())
    assert data["format_version"] == 1
    assert data["request"]["model"] == "mlp"


def test_other_threads_run_while_a_plan_is_made():
    ticks = []
    done = threading.Event()

    def tick():
        while not done.wait(0.005):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    shardwright.plan("alexnet", machine="p100x16", batch=512, solver="exact", threads=1)
    end = time.monotonic()
    done.set()
    thread.join()
    during = [t for t in ticks if start < t < end]
    assert len(during) >= 2


def test_an_interrupt_returns_the_best_so_far():
    # The first progress report interrupts the search.
    def interrupt(elapsed, best, bound):
        if best is not None and not reported:
            reported.append(best)
            os.kill(os.getpid(), signal.SIGINT)

    reported: list[float] = []
    # A background process may have been started with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        plan = shardwright.plan("alexnet", machine="p100x16", batch=512, solver="mcmc", time=300, progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    if not reported:
        pytest.skip("the search ended before it could be interrupted")
    assert plan.step_seconds > 0
    assert plan.proved_optimal or any("interrupted" in warning for warning in plan.warnings)
