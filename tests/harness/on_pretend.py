"""Which tests for the CPU run on the pretend accelerator as well, and must then compute the same bits.

A test of a file in ``FILES`` that runs on one or two ranks gets one more variant, ``ranks2-pretend``, and a test of a file in
``AMONG_TWO`` one on four. It is slow, except where ``QUICK`` or ``IN_FULL`` names it; ``LEFT_OUT`` says what has none, and why.
Where a collective is among more than two ranks, gloo adds in another order than the accelerator's process group. Not named are tests
that force an algorithm of gloo, expect what ranks tell each other before a backward, or compare with values on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.results import are_kept

TESTS = Path(__file__).parents[1]

FILES: dict[str, set[str]] = {
    "agreed/test_guarded_pass.py": {"test_random_schedules_train_as_one_process_without_the_failed_steps"},
    "agreed/test_optional_units.py": {"test_random_schedules_train_as_one_process_with_all_batches"},
    "agreed/test_uneven.py": {"test_random_schedules_train_as_one_process_with_all_batches"},
    "checkpoint/test_checkpointer.py": {
        "test_checkpoint_before_the_first_step_changes_nothing",
        "test_resumed_run_continues_bit_for_bit",
    },
    "checkpoint/test_full_state.py": {
        "test_model_state_is_the_unsharded_one_on_rank_0_and_empty_elsewhere",
        "test_tied_parameters_are_one_tensor_under_both_names",
    },
    "checkpoint/test_safetensors_load.py": {
        "test_fused_weights_are_read_by_the_ranks_that_keep_them",
        "test_tied_parameters_come_under_any_of_their_names",
    },
    "checkpoint/test_safetensors_save.py": {"test_converted_to_another_dtype"},
    "extensions/test_training.py": set(),
    "numerics/test_accumulation.py": set(),
    "numerics/test_activation_checkpointing.py": set(),
    "numerics/test_against_ddp.py": set(),
    "numerics/test_against_upstream.py": set(),
    "numerics/test_frozen_budget.py": {
        "test_a_frozen_module_that_trains_again_is_resharded_and_trains_as_the_unsharded_model",
        "test_it_trains_as_without_a_budget",
    },
    "numerics/test_grad_dtype.py": {
        "test_a_narrow_reduction_rounds_each_micro_batch_or_the_sum_with_the_later_ones",
        "test_a_unit_keeps_the_semantics_that_it_was_made_with",
        "test_each_parameter_computes_in_the_dtype_that_the_function_says",
        "test_grad_dtype_may_be_set_on_sharded_parameters_before_the_first_unshard",
        "test_grad_dtype_stays_with_what_takes_a_parameters_place",
        "test_gradients_travel_and_stay_in_the_dtypes_of_that_version",
        "test_one_parameter_with_a_grad_dtype_has_its_group_reduced_wider_and_its_gradient_alone_kept_so",
        "test_reset_iter_state_drops_finished_gradients_too_from_2_15_on",
        "test_unsynced_gradients_are_dropped",
        "test_unsynced_gradients_stay_on_the_unsharded_parameters_and_survive_what_reshards_them",
        "test_zeros_for_unused_parameters_need_a_dtype",
    },
    "numerics/test_graphs.py": {
        "test_a_backward_with_a_gradient_of_its_own_for_a_part_of_the_outputs",
        "test_a_graph_in_pieces",
        "test_a_penalty_on_the_gradient_of_the_input",
        "test_a_teacher_that_is_the_model_itself_without_grad",
        "test_auxiliary_losses",
        "test_forwards_without_grad_inside_of_a_forward_with",
    },
    "numerics/test_inputs_and_outputs.py": set(),
    "numerics/test_list_units.py": {
        "test_a_list_whose_first_input_needs_no_gradient_trains_as_the_unsharded_model",
        "test_an_optimizer_in_hooks_steps_once_for_a_module_that_ran_twice",
    },
    "numerics/test_looking_at_parameters.py": set(),
    "numerics/test_mixed_precision.py": {
        "test_a_gradient_that_is_not_finite_on_one_rank_is_seen_on_all",
        "test_bf16_parameters_reduced_in_fp32",
        "test_fp16_parameters_reduced_in_fp32",
        "test_gradients_accumulate_in_the_reduce_dtype",
        "test_what_is_cast_and_what_is_not",
    },
    "numerics/test_module_kinds.py": {
        "test_a_learning_rate_schedule_and_parameter_groups",
        "test_parameter_lists_and_dicts",
        "test_parametrized_weights",
    },
    "numerics/test_plans_and_collectives.py": {"test_every_gather_plan_and_every_all_gather_is_exact"},
    "numerics/test_replaced_storage.py": {
        "test_a_parameter_replaced_by_another_dtensor",
        "test_a_state_dict_saved_in_the_middle_of_training_is_that_of_the_unsharded_model",
        "test_changing_the_dtype_of_the_model_between_steps",
        "test_loading_a_state_dict_between_steps",
        "test_loading_by_assignment_between_steps",
        "test_optimizers_keep_their_parameters_for_life",
        "test_values_written_in_place_between_steps",
    },
    "numerics/test_resharding.py": {
        "test_a_parameter_written_while_unsharded_is_forgotten_by_reshard",
        "test_every_reshard_after_forward_gives_the_same_numbers",
        "test_keeping_parameters_after_backward_serves_all_micro_batches",
        "test_set_reshard_after_forward_holds_from_the_next_forward_on",
        "test_unsharding_by_hand_changes_nothing",
    },
    "numerics/test_reuse.py": set(),
    "numerics/test_shapes.py": set(),
    "numerics/test_steps.py": set(),
    "numerics/test_toggled_parameters.py": set(),
    "numerics/test_unused_parameters.py": {
        "test_a_backward_that_reaches_only_a_part_of_the_model",
        "test_a_parameter_unused_on_some_ranks_gets_its_gradient_on_all",
        "test_frozen_parameters_share_a_group_with_trainable_ones",
        "test_parameters_unused_on_every_rank_keep_no_gradient",
        "test_requires_grad_may_be_toggled_between_steps",
        "test_unused_parameters_get_zeros_where_that_was_asked_for",
    },
    "optim/test_any_precision.py": set(),
    "optim/test_flat.py": {
        "test_a_flat_optimizer_gives_what_the_ordinary_one_gives",
        "test_gradients_that_were_replaced_or_changed_are_the_ones_that_count",
        "test_groups_of_hyperparameters_and_a_scheduler",
        "test_parameters_without_a_gradient_keep_their_state_and_their_number_of_steps",
    },
    "optim/test_muon.py": {
        "test_a_batch_of_experts_is_made_orthogonal_matrix_by_matrix",
        "test_groups_say_what_gets_muon_and_state_dicts_load",
        "test_sharded_muon_trains_as_torchs_does_unsharded",
    },
    "strategies/test_bytes.py": set(),
    "strategies/test_training.py": {
        "test_a_copy_trains_by_the_same_strategy",
        "test_a_step_before_the_last_micro_batch_is_refused",
        "test_an_exception_and_zero_grad_discard_what_was_accumulated",
        "test_mixed_precision_is_bitwise_that_of_fully_shard",
        "test_training_on_other_numbers_of_ranks_equals_the_unsharded_model",
    },
}
"""The tests of each file; none named: all."""
AMONG_TWO = {"meshes/test_hybrid_sharding.py", "agreed/test_guarded_pass.py", "agreed/test_optional_units.py", "agreed/test_uneven.py"}
"""Files of tests on four ranks, each of whose collectives that add is between two, or that compare with an oracle alone."""
IN_FULL = {
    "strategies/test_bytes.py",
    "strategies/test_training.py",
    "agreed/test_guarded_pass.py",
    "agreed/test_optional_units.py",
    "agreed/test_uneven.py",
}
"""Files whose variants only ``make test-full`` runs: other files train the same through other calls, or they take minutes."""
QUICK = {"test_gradients_reduced_at_every_micro_batch_add_up", "test_negative_dims_of_shard_placement_fn_count_from_the_end"}
LEFT_OUT = {
    "test_channels_last_parameters_keep_their_memory_format": "the accelerator has no convolutions",
    "test_every_algorithm_gives_the_gradients_of_the_unsharded_model": "the algorithms that it forces are for the host",
    "test_inputs_that_are_not_cast_and_do_not_fit_are_the_users_error_in_both": "torch's does not take the module from the CPU there",
    "test_torch_gives_its_own_class_to_a_module_whose_class_we_had_before": "torch's does not take the module from the CPU there",
    "test_training_an_mlp_equals_the_unsharded_model": "Adam's steps come close to their bound where a rank's rows lie in the batch. "
    "Compared between devices they are copied, and the CPU's product of rows of seven floats rounds by their address modulo 64 bytes: "
    "`fed_in_chunks` under `kept()` misses that bound on the CPU alone, by the same number",
    "test_parameters_of_several_dtypes_in_one_call": "there, optimizers round an update in half precision elsewhere",
}


class OnPretend(int):
    """A number of ranks, on the pretend accelerator."""


def on_pretend(path: str, name: str, world_sizes: Sequence[int]) -> list[Any]:
    """The variants, none or one, of the test ``name`` in the file ``path``."""
    try:
        file = Path(path).resolve().relative_to(TESTS).as_posix()
    except ValueError:  # a test that pytester has written
        return []
    world_size = 2 if 2 in world_sizes else min(world_sizes)
    names = FILES.get(file, set[str]() if file in AMONG_TWO else None)
    if names is None or (names and name not in names) or name in LEFT_OUT or world_size > (4 if file in AMONG_TWO else 2):
        return []
    marks = [pytest.mark.full] if file in IN_FULL else [] if name in QUICK else [pytest.mark.slow]
    return [pytest.param(OnPretend(world_size), id=f"ranks{world_size}-pretend", marks=marks)]


def among_two(*mesh: int) -> None:
    """Skip a body that is compared between devices on this mesh, if a collective over an axis adds more than two ranks' numbers."""
    if are_kept() and max(mesh) > 2:
        pytest.skip("needs axes of two ranks: among more, gloo adds in another order")


__all__ = ["OnPretend", "among_two", "on_pretend"]
