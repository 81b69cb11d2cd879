"""The user's own module runs: nothing that its code does is dropped, frozen or changed.

Replaying a captured program got each of these wrong, most of them silently."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch

WORLD = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The processes' results, by case. They start once for all tests."""
    return launch("habits.py", WORLD, tmp_path_factory.mktemp("found"))


@pytest.mark.parametrize(
    "case",
    [
        "teacher",
        "counted",
        "mapped",
        "squared",
        "straight_through",
        "schedule",
        "checkpoint",
        "reentrant checkpoint",
        "permuted_dropout",
        "branch",
        "recurrent",
        "experts",
    ],
)
def test_losses_and_gradients_are_those_of_one_process(found: dict[str, Any], case: str) -> None:
    assert found[case]["loss"] < 1e-5
    assert found[case]["gradients"] < 1e-5


@pytest.mark.parametrize("case", ["checkpoint", "reentrant checkpoint"])
def test_checkpointed_blocks_run_twice_and_on_shards(found: dict[str, Any], case: str) -> None:
    assert found[case]["runs"] == 2
    assert found[case]["gathered"] == {}


def test_memory_of_gradients_is_used_again_unless_the_user_has_them(found: dict[str, Any]) -> None:
    assert found["held"] == {"case": "held", "changed": 0.0, "fresh": True, "again": True}


def test_transforms_inside_of_a_module_that_cannot_see_shards_are_refused_with_the_line(found: dict[str, Any]) -> None:
    message = found["mapped"]["refused"]
    assert "habits.py" in message and "(y @ w).tanh()" in message and "argument" in message


def test_a_capture_on_values_leaves_the_modules_attributes_as_they_were(found: dict[str, Any]) -> None:
    result = found["counted"]
    assert result["passes"] == 2 and result["seen"] == 2, "the passes of the user"
    assert any("writes into weights (fc.weight)" in w for w in result["warnings"])


def test_autocast_computes_the_loss_in_32_bits(found: dict[str, Any]) -> None:
    assert found["autocast"]["loss"] < 1e-5, "and it has the type of one process"
    assert found["autocast"]["gradients"] < 2e-3, "16 bits"
    assert found["autocast"]["gathered"] == {}


def test_compiled_modules_are_refused_instead_of_run_uncompiled(found: dict[str, Any]) -> None:
    assert "nothing would be compiled" in found["compiled"]["outside"]
    assert "nothing would be compiled" in found["compiled"]["method"]
    assert "compiled: `a`;" in found["compiled"]["inside"]


def test_a_compiled_function_runs_planned_modules_by_their_plan(found: dict[str, Any]) -> None:
    result = found["compiled step"]
    assert result["loss"] < 1e-6 and result["gradients"] < 1e-6
    assert result["graphs"] > 0, "what is around the module is compiled"


def test_batches_of_a_distributed_sampler_give_the_gradients_of_distributed_data_parallel(found: dict[str, Any]) -> None:
    assert found["sampled"]["gradients"] < 1e-6
    assert found["sampled"]["samples"] == 8, "each process has half of them"


def test_a_mapping_of_losses_is_planned_as_their_sum(found: dict[str, Any]) -> None:
    result = found["several losses"]
    assert result["loss"] < 1e-6 and result["gradients"] < 1e-6
    assert result["planned"] == ["boxes", "kinds", "loss.sum"]
    assert any("as the example takes them" in w for w in result["warnings"])


def test_blocks_are_recomputed_and_not_the_loss_around_them(found: dict[str, Any]) -> None:
    result = found["recomputed inside a loss"]
    assert result["loss"] < 1e-6 and result["gradients"] < 1e-5
    assert result["again"] and all(path.startswith("module.") for path in result["again"])


def test_whole_weights_live_for_one_pass(found: dict[str, Any]) -> None:
    result = found["gathered again"]
    assert result["gradients"] < 1e-6
    assert result["seen"] > 0 and result["held"] == 0
    assert result["forward"] > 0 and result["all"] > result["forward"], "the backward pass gathers them again"
    assert "weights were changed" in result["changed"]


def test_batch_norms_keep_their_type_in_mixed_precision(found: dict[str, Any]) -> None:
    result = found["precision of batch norm"]
    assert result["loss"] < 2e-2 and result["gradients"] < 3e-2 and result["statistics"] < 1e-2


@pytest.mark.parametrize("solver", ["data", "fsdp", "megatron"])
def test_mixed_precision_computes_in_16_bits_and_keeps_weights_of_32(found: dict[str, Any], solver: str) -> None:
    result = found[f"precision {solver}"]
    assert result["loss"] < 1e-2 and result["gradients"] < 1e-2
    assert result["types"] == ["torch.float32"]
    assert result["bytes"][0] == result["bytes"][1], "weights are gathered in 16 bits"
    assert result["gathered"] == {}
    assert result["issued"] == result["predicted"], "the plan is of the step that runs"


@pytest.mark.parametrize("solver", ["data", "fsdp", "megatron"])
def test_a_capture_under_autocast_plans_the_types_that_autocast_makes(found: dict[str, Any], solver: str) -> None:
    result = found[f"planned autocast {solver}"]
    assert result["loss"] < 1e-2 and result["gradients"] < 1e-2
    assert result["made"] == ["bf16", "f32"]
    assert result["gathered"] == {}
    assert result["issued"] == result["predicted"]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_planned_recomputation_is_applied(found: dict[str, Any], policy: str) -> None:
    result = found[f"recomputed {policy}"]
    assert result["loss"] < 1e-5 and result["gradients"] < 1e-5
    assert result["runs"] == 4, "forward and again in the backward pass, in two steps"
    assert not result["left"] and result["gathered"] == {}


def test_a_step_runs_in_the_planned_micro_batches(found: dict[str, Any]) -> None:
    result = found["micro-batches"]
    assert result["planned"] == 2
    assert result["loss"] < 1e-6 and result["gradients"] < 1e-6
    assert result["reduced"] == 1, "gradients are exchanged once"
    assert "1, 2, 4, 8 do" in result["refused"]


def test_batches_that_cannot_be_divided_are_told_of_once(found: dict[str, Any]) -> None:
    assert found["uneven"]["told"] == [0, 0, 1, 0, 1]
    assert "5 samples" in found["uneven"]["message"]


def test_ops_without_a_rule_are_named(found: dict[str, Any]) -> None:
    warnings = found["branch"]["warnings"]
    assert any("fft" in w and "habits.py" in w for w in warnings)
    assert any("predicted to take" in w for w in warnings)
    assert any("as the example takes them" in w for w in warnings)


def test_recurrent_networks_are_split_by_samples(found: dict[str, Any]) -> None:
    assert found["recurrent"]["gathered"] == {}


def test_other_batches_evaluation_copies_and_outer_criteria_work(found: dict[str, Any]) -> None:
    result = found["other_batches"]
    assert result["difference"] < 1e-5
    assert result["right"] and not result["training"]


def test_hooks_see_what_they_see_on_one_process(found: dict[str, Any]) -> None:
    result = found["hooks"]
    assert result["seen"][0] == result["seen"][1] > 0
    assert max(result["gradients"], result["hooks"], result["grad"]) < 1e-6


def test_accumulation_clipping_averages_and_frozen_weights(found: dict[str, Any]) -> None:
    result = found["loop"]
    assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-5)
    assert max(result["weights"], result["average"]) < 1e-5
    assert result["names"]


def test_local_batches_are_shards_of_the_global_batch(found: dict[str, Any]) -> None:
    result = found["local_batches"]
    assert result["gradients"] < 1e-6
    assert all(result["shapes"]), "a process gets the results of its own samples"
    assert 'batch="local"' in result["refused"], "different batches are noticed"


def test_a_module_without_data_is_allocated_and_loaded(found: dict[str, Any]) -> None:
    assert found["deferred"]["gradients"] < 1e-6


def test_losses_are_scaled(found: dict[str, Any]) -> None:
    assert found["scaled"]["weights"] < 1e-6


def test_models_are_freed(found: dict[str, Any]) -> None:
    assert found["freed"]["left"] == 0


def test_a_plan_is_made_without_processes_saved_and_loaded(found: dict[str, Any]) -> None:
    result = found["saved"]
    assert result["gradients"] < 1e-6
    assert result["sharded"] > 0
    assert "not one of Distilled" in result["refused"]
