"""Tests that `make test` leaves out and `make test-all` runs: each shows once more, in another way,
what a test that always runs shows, and takes long.

A row is the test that is left out (all of its parameters, or one case) and the one that always
runs. Where a case runs through our own backend and through Inductor, what differs is Inductor's
alone, and `numerics/test_inductor.py` is about that. `pytest tests/... --all` runs them too, and so
does the name of one of them.
"""

from __future__ import annotations

ALL_FROM_COSTS = {
    "prefetch": None,
    "backward_prefetch": None,
    "reduces_in_flight": None,
    "split_bytes": None,
    "memory_budget": 0.5,
}
VARIANTS = {
    "numerics/test_captured_step.py::test_optimizers": "::test_models",
    "numerics/test_activation_offload.py::test_dynamic_shapes": (
        "::test_sizes_that_only_data_decides"
    ),
    "numerics/test_activation_offload.py::test_the_model_of_the_peak[recompute-plain]": (
        "[both-tied]"
    ),
    "numerics/test_grad_dtype.py::test_as_unsharded[inductor]": "[compiled_fsdp_eager]",
    "compiler/test_known_values.py::test_left_out_with_symbols": (
        "::test_left_out_with_sizes_that_only_data_decides"
    ),
    **{
        # What a plain forward and backward call is also called under checkpoints, or added up.
        f"numerics/test_any_op_fails.py::{name}[{case}]": other
        for name, case, other in (
            ("test_any_op_runs_out_of_memory", "eager-plain", "[eager-checkpointed]"),
            ("test_any_op_runs_out_of_memory", "eager-kept", "[eager-accumulating]"),
            ("test_any_op_runs_out_of_memory", "compiled-plain", "[compiled-checkpointed]"),
            ("test_any_op_runs_out_of_memory", "compiled-kept", "[compiled-accumulating]"),
            ("test_any_op_runs_out_of_memory", "compiled-finalizing", "[eager-finalizing]"),
            ("test_another_backward_goes_on", "eager-kept", "[eager-plain]"),
            ("test_another_backward_goes_on", "compiled-kept", "[compiled-plain]"),
            ("test_another_backward_goes_on", "compiled-fsdp1", "[eager-fsdp1]"),
        )
    },
    **{
        f"numerics/test_equal_units.py::test_the_same_numbers[{case}]": f"[{other}]"
        for case, other in (
            ("autocast", "autocast, checkpoints"),
            ("budget", "from costs"),
            ("kept in bf16", "plain"),
        )
    },
    **{
        f"numerics/test_equal_units.py::test_left_where_it_stands[{case}]": f"[{other}]"
        for case, other in (
            ("checkpoints that count in a list", "checkpoints that count"),
            ("checkpoints that count in a variable", "checkpoints that count"),
            ("two layers", "checkpoints around two layers"),
            (
                "checkpoints that keep one thing or another",
                "a checkpoint that keeps something else",
            ),
        )
    },
    **{
        f"numerics/test_reads_fsdp1.py::test_as_python_reads[{kind}-flat]": f"[{kind}-originals]"
        for kind in ("Generated", "Numbered")
    },
    **{
        f"numerics/test_assigned.py::test_in_forward[{case}]": f"[{other}]"
        for case, other in (("TyingForAWhile", "TyingLate"), ("TyingInDict", "Tying"))
    },
    "numerics/test_assigned.py::test_exchanged_between_calls[exchanged-one unit]": (
        "[exchanged-three units]"
    ),
    "numerics/test_graphs.py::test_one_forward_and_one_backward_graph_and_no_recompiles[moe]": (
        "[llama_tied_unit]"
    ),
    "numerics/test_inductor.py::test_backward_begins_behind_the_head[centered]": "[cross_entropy]",
    "numerics/test_peak.py::test_a_large_head[batches-compiled_fsdp_eager-True]": (
        "[whole-compiled_fsdp_eager-True]"
    ),
    "numerics/test_checksums.py::test_a_bit_that_flips_on_the_way[position5-graph]": (
        "[position3-graph]"
    ),
    "numerics/test_checksums.py::test_replicas[check_replicas-graph]": "[check_replicas-eager]",
    "wire/test_agreement.py::test_some_ranks_have_no_graph[printing in its own forward, tied]": (
        "[printing at first]"
    ),
    "planning/test_calibrate.py::test_tensor_parallel_ranks_agree": (
        "::test_both_axes_of_hsdp_agree"
    ),
    "compat/fsdp2/test_since_2_15_rows.py::test_grad_dtype[None-float32/bfloat16-all]": (
        "[None-bfloat16/float32-all]"
    ),
    "compat/fsdp2/test_since_2_15_rows.py::test_grad_dtype[torch.float32-bfloat16/float32-all]": (
        "[torch.float32-float32/bfloat16-all]"
    ),
    "compat/fsdp2/test_since_2_15_rows.py::test_grad_dtype[torch.bfloat16-bfloat16/float32-all]": (
        "[torch.bfloat16-float32/bfloat16-all]"
    ),
    **{
        f"compat/fsdp2/test_since_2_15_rows.py::test_grad_dtype[None-bfloat16/float32-{of}]": (
            "[None-bfloat16/float32-biases]"
        )
        for of in ("set after", "set to its own")
    },
    "compiler/test_cache.py::test_a_budget_with_one_warm_cache": (
        "::test_a_warm_cache_gives_the_graph_that_our_passes_made"
    ),
    **{
        f"compat/fsdp2/test_extension_graph_rows.py::test_one_graph[{case}]": "[as_it_is]"
        for case in (
            *("kept", "low_precision", "a_function", "eager_between", "lengths"),
            *("accumulated", "frozen_between", "evaluated_between"),
        )
    },
    **{
        f"compat/fsdp2/test_extension_graph_rows.py::test_plans[{plan}]": "[recompute]"
        for plan in ("parts", "costs", "budget")
    },
    **{
        f"compat/fsdp2/test_promotion_rows.py::test_as_stock[{case}]": "[True-None]"
        for case in ("False-None", "False-torch.float32", "True-torch.float32")
    },
    **{
        f"compat/fsdp2/test_promotion_rows.py::test_units_that_are_called[{name}]": (
            "[in two dtypes]"
        )
        for name in ("both", "twice")
    },
    "compat/fsdp2/test_promotion_rows.py::test_tied_after_sharding[units0]": "[units1]",
    **{
        f"numerics/test_selective.py::test_policies[{name}]": "[all but products]"
        for name in ("sum", "copies", "comparisons")
    },
    "numerics/test_activation_offload.py::test_beside_other_options[parts]": "[codes]",
    "compat/fsdp2/test_parallel_rows.py::test_tensor_parallel[False]": "[True]",
    "compat/fsdp2/test_layout_rows.py::test_other_dims_with_inductor": "::test_other_dims",
    "compat/fsdp2/test_accumulation_rows.py::test_gradient_sync_with_inductor": (
        "::test_gradient_sync"
    ),
    "compat/fsdp2/test_lifecycle_rows.py::test_int_reshard_with_inductor": "::test_int_reshard",
    "compat/fsdp2/test_lifecycle_rows.py::test_reshard_counts_with_inductor": (
        "::test_reshard_after_forward"
    ),
    "compat/fsdp2/test_methods_rows.py::test_all_reduce_hook_with_inductor": (
        "::test_all_reduce_hook"
    ),
    "compat/fsdp1/test_training_rows.py::test_grid[False]": "[True]",
    "compat/fsdp1/test_training_rows.py::test_accumulation[False]": (
        "numerics/test_random_fsdp1.py::test_random_models[0]"
    ),
    "compat/fsdp2/test_methods_rows.py::test_custom_communication_with_inductor": (
        "::test_custom_communication"
    ),
    "compat/fsdp2/test_parallel_rows.py::test_hsdp_and_tensor_parallel[shape1]": "[shape0]",
    "compat/fsdp2/test_parallel_rows.py::test_dims[shard, model first]": "[three]",
    "compat/fsdp2/test_parallel_rows.py::test_dims[two shard]": "[three]",
    "compat/fsdp2/test_parallel_rows.py::test_dims[replicate]": "[three]",
    "benchmarks/test_benchmarks.py::TestBenchmarks::test_others_in_small": (
        "::TestBenchmarks::test_in_small"
    ),
    "planning/test_chunks.py::test_trained_in_as_many_as_costs_say": "::test_ranks_decide_together",
    "numerics/test_overlap.py::test_inductor": "::test_models",
    "numerics/test_muon_step.py::test_inductor": "::test_models",
    "numerics/test_traced_backward.py::test_more_numbers_of_the_loop": "::test_numbers_of_the_loop",
    "numerics/test_muon_step.py::test_four_ranks": "::test_models",
    "numerics/test_experts_step.py::test_inductor": "::test_efsdp",
    "numerics/test_experts_step.py::test_one_process": "::test_efsdp",
    "numerics/test_experts_step.py::test_four_ranks": "::test_efsdp",
    "numerics/test_experts_step.py::test_two_ranks[adamw]": "[accumulated]",
    **{
        # Scaled, by both of their optimizers, clipped, and on a schedule.
        f"numerics/test_experts_step.py::test_two_ranks[{name}]": "[scaled, two optimizers]"
        for name in ("clipped", "scaled", "scaled, fused")
    },
    "numerics/test_experts_step.py::test_two_ranks[reduced once, in chunks]": "[accumulated]",
    "numerics/test_experts_step.py::test_two_ranks[scaled, two fused]": "[scaled, two optimizers]",
    "numerics/test_scaled_step.py::test_inductor": "::test_numbers",
    "numerics/test_checked_steps.py::test_inductor": "::test_whole_steps",
    "numerics/test_peak.py::test_a_large_head[halves-compiled_fsdp-True]": (
        "[whole-compiled_fsdp-True]"
    ),
    "numerics/test_unknown_sizes.py::test_random_programs[5]": "[1]",
    "numerics/test_heads.py::test_unused_heads_with_inductor": "::test_unused_heads",
    "numerics/test_meshes.py::test_int_reshard[unused]": "[odd]",
    "numerics/test_offload.py::test_inductor": "::test_fully_shard[compiled-True]",
    "numerics/test_offload.py::test_wrapper[fsdp1-compiled]": "[fsdp1 whole-compiled]",
    "numerics/test_mixed.py::test_graphs_and_eager_units_with_inductor": (
        "::test_as_unsharded_with_each_gather_once"
    ),
    "numerics/test_inductor.py::test_a_rank_that_comes_late": (
        "::test_buffers_live_until_their_collective_is_awaited"
    ),
    "numerics/test_inductor.py::test_the_planned_order_is_in_the_generated_code[distances]": (
        "[costs]"
    ),
    "numerics/test_meshes.py::test_int_reshard[called_twice]": "[odd]",
    "numerics/test_meshes.py::test_int_reshard[tied]": "[odd]",
    "numerics/test_meshes.py::test_hsdp[tied]": "[unused]",
    "numerics/test_surface.py::test_with_inductor[growing inputs]": "::test_growing_inputs",
    "numerics/test_surface.py::test_with_inductor[checkpointing]": (
        "::test_activation_checkpointing[not_reentrant]"
    ),
    "numerics/test_surface.py::test_with_inductor[selective checkpointing]": (
        "::test_activation_checkpointing[selective]"
    ),
    "numerics/test_tensor_parallel.py::test_layers[compiled]": (
        "compat/fsdp2/test_parallel_rows.py::test_tensor_parallel[True]"
    ),
    "numerics/test_tensor_parallel.py::test_inductor": (
        "compat/fsdp2/test_parallel_rows.py::test_tensor_parallel[True]"
    ),
    "frontend/test_fallback.py::test_four_ranks": "::test_fsdp1",
    "numerics/test_shared_buckets.py::test_inductor": "::test_same_as_stock",
    "numerics/test_shared_buckets.py::test_same_as_stock[llama-1073741824]": (
        "[gpt_of_one_layer-1073741824]"
    ),
    "numerics/test_quantized.py::test_codes_do_not_depend_on_buckets[shared, from costs]": (
        "[parts]"
    ),
    "numerics/test_quantized_fsdp1.py::test_hybrid": "::test_graphs_as_eager[kept, no_sync]",
    "numerics/test_quantized_fsdp1.py::test_whole_step": (
        "::test_as_the_unsharded_model_with_the_same_codes"
    ),
    "numerics/test_quantized.py::test_graphs_as_eager[bf16 gradients]": "[fp16 gradients]",
    f"numerics/test_orders.py::test_decisions_with_other_batches[{ALL_FROM_COSTS}]": (
        "[{'memory_budget': 0.5}]"
    ),
    "compat/fsdp2/test_parallel_rows.py::test_dims[two replicate]": "[three]",
    "compat/fsdp2/test_precision_rows.py::test_nested_policies_with_inductor": (
        "::test_nested_policies"
    ),
    "compat/fsdp1/test_rest_rows.py::test_clip[False]": "[True]",
    "numerics/test_parity.py::test_model[llama]": "[llama_tied_unit]",
    "numerics/test_parity.py::test_model[gpt]": "[llama_tied_unit]",
    "numerics/test_step_in_backward.py::test_inductor": "::test_models",
    "numerics/test_regions.py::test_the_same_numbers[bf16]": "[all in one]",
    "numerics/test_regions.py::test_the_same_numbers[FSDP1]": (
        "numerics/test_random_fsdp1.py::test_with_regions[0]"
    ),
    **{
        f"numerics/test_regions.py::test_the_same_numbers[{case}]": (
            "numerics/test_equal_units.py::test_the_same_numbers[plain]"
        )
        for case in ("units", "units in bf16")
    },
    "numerics/test_captured_step.py::test_inductor": "::test_changes",
    "numerics/test_moe.py::test_two_ranks[accumulated, recomputed]": (
        "[accumulated, clipped, with a bias, in chunks]"
    ),
    "numerics/test_lengths.py::test_packed_sequences_make_no_more_graphs_than_unsharded[flex]": (
        "[op]"
    ),
    "command/test_prediction.py::test_optimizer_state_on_the_host": (
        "::test_activations_on_the_host"
    ),
    "compiler/test_known_values.py::test_left_out": "::test_left_out_with_units",
    "pairs/test_pairs.py::test_mended[checkpointed+reshard_int]": "[checkpointed+stay_gathered]",
    **{
        f"numerics/test_activation_offload.py::test_same_numbers[{kind}]": "[dropout]"
        for kind in ("tied", "complex")
    },
    "numerics/test_activation_offload.py::test_beside_other_options[checksums]": "[codes]",
    "numerics/test_hosted_states.py::test_same_numbers[names1]": "[names0]",
    **{
        f"numerics/test_hosted_states.py::test_scripts[{script}]": "[grouped]"
        for script in ("two_steps", "frozen")
    },
    "numerics/test_experts_step.py::test_two_ranks[plain tensors]": "[accumulated]",
    "numerics/test_activation_offload.py::test_inductor[plain]": "[put]",
    "numerics/test_hosted_states.py::test_inductor": (
        "numerics/test_activation_offload.py::test_inductor[put]"
    ),
    "numerics/test_hosted_states.py::test_replicated": "::test_same_numbers",
    "numerics/test_activation_offload.py::test_replicated": "::test_same_numbers[dropout]",
    "numerics/test_activation_offload.py::test_same_numbers[plain]": "[dropout]",
    "numerics/test_activation_offload.py::test_whole_step[1]": "[2]",
    "numerics/test_activation_offload.py::test_the_model_of_the_peak[offload-plain]": (
        "[offload-tied]"
    ),
    **{
        f"numerics/test_activation_offload.py::test_the_model_of_the_peak[{case}]": "[both-tied]"
        for case in ("recompute-tied", "both-plain")
    },
    "numerics/test_hosted_states.py::test_every_optimizer": "::test_same_numbers",
    "numerics/test_hosted_states.py::test_other_optimizers": "::test_same_numbers",
    "numerics/test_hosted_states.py::test_scripts[momentum_later]": "[grouped]",
    **{
        f"numerics/test_random_models.py::{name}[{first}]": "[0]"
        for name in ("test_in_a_budget", "test_with_regions")
        for first in (4, 8)
    },
    "numerics/test_random_fsdp1.py::test_with_regions[3]": "[0]",
    "numerics/test_equal_units.py::test_the_same_numbers[one frozen]": "[frozen]",
    **{
        f"numerics/test_equal_units.py::test_the_same_numbers[{case}]": "[checkpoints]"
        for case in (
            *("checkpoints of FSDP1", "checkpoints, nothing freed", "reentrant checkpoints"),
            *("checkpoints, bf16, accumulated", "checkpoints, budget", "nested checkpoints"),
            *("checkpoints in units", "wrapped in checkpoints"),
        )
    },
    "numerics/test_equal_units.py::test_a_buffer_that_is_written_to": (
        "::test_left_where_it_stands[a buffer is written to]"
    ),
    "numerics/test_equal_units.py::test_the_same_numbers[split]": "[from costs]",
    "numerics/test_equal_units.py::test_the_same_numbers[accumulated]": "[plain]",
    "numerics/test_equal_units.py::test_units_of_these_classes[True]": "[False]",
    "numerics/test_equal_units.py::test_replicas": "::test_the_same_numbers[plain]",
    **{
        f"numerics/test_recurrent.py::test_a_unit_as_unsharded[{kind}]": "[LSTM]"
        for kind in ("GRU", "RNN")
    },
    "compat/fsdp2/test_extension_graph_rows.py::test_inductor[as_it_is]": "[codes]",
    # What one flat parameter does to reads does not depend on what is read.
    **{
        f"numerics/test_reads_fsdp1.py::test_as_python_reads[{kind}-flat]": f"[{kind}-originals]"
        for kind in ("Halved", "Deleted", "Hidden", "MomentumFirst")
    },
    "numerics/test_choices.py::test_same_as_stock[a parameter each]": "[messages]",
    "numerics/test_choices.py::test_same_as_stock[parts]": "[messages]",
    "numerics/test_choices.py::test_same_as_stock[reduce-scatter]": (
        "::test_what_was_asked_for_is_in_the_graph"
    ),
    "numerics/test_offload.py::test_fully_shard[compiled-False]": "[compiled-True]",
    "compiler/test_trial.py::test_the_same_as_partitioned_anew[llama-policy0-False]": (
        "[llama-policy1-True]"
    ),
    "numerics/test_mixed.py::test_with_casts_at_the_boundaries[shard, m.compile()]": (
        "[blocks = compile(block), shard]"
    ),
    "numerics/test_mixed.py::test_with_casts_at_the_boundaries[compile(shard(m))]": (
        "[blocks = compile(block), shard]"
    ),
    "numerics/test_mixed.py::test_as_unsharded_with_each_gather_once"
    "[item in a unit-compile(shard(m))]": "[break in a unit-compile(shard(m))]",
    "numerics/test_meshes.py::test_accumulation_with_int_reshard": (
        "::test_accumulation_and_evaluation"
    ),
    "numerics/test_parity.py::test_model[one_unit]": "[odd]",
    "numerics/test_parity.py::test_model[list_units]": "[llama_tied_unit]",
    "numerics/test_parity.py::test_reshard_after_forward[list_units-False]": "[frozen-False]",
    "numerics/test_quantized.py::test_graphs_as_eager[bf16]": "[fp16 gradients]",
    "numerics/test_quantized.py::test_graphs_as_eager[kept]": "[evaluated, added up]",
    "numerics/test_heads.py::test_accumulation[False]": "[True]",
    "numerics/test_partial_backward.py::test_partial_backward[accumulated-inputs]": (
        "[trained-inputs]"
    ),
    "numerics/test_partial_backward.py::test_partial_backward[accumulated-create_graph]": (
        "[trained-create_graph]"
    ),
    "numerics/test_partial_backward.py::test_partial_backward_on_hsdp": (
        "::test_partial_backward[accumulated-grad]"
    ),
    "numerics/test_training_loop.py::test_accumulate_three_backwards[frozen-True]": (
        "[unused-False]"
    ),
    "compiler/test_trial.py::test_the_same_as_partitioned_anew[conv-policy3-False]": (
        "[frozen-policy4-True]"
    ),
    "compat/fsdp2/test_read_rows.py::test_momentum[Momentum]": "[MomentumDeep]",
    "numerics/test_orders.py::test_orders[shard torch.compile-1-False]": (
        "numerics/test_parity.py::test_model[odd]"
    ),
    "numerics/test_experts.py::test_inductor": "::test_two_ranks[False]",
    "numerics/test_moe.py::test_two_ranks[bf16]": (
        "[accumulated, clipped, with a bias, in chunks]"
    ),
    "numerics/test_checksums_wide.py::test_200_steps_of_random_models": (
        "::test_random_models_in_which_nothing_happens"
    ),
    "numerics/test_experts_eight.py::test_hsdp": (
        "numerics/test_experts.py::test_with_an_efsdp_axis"
    ),
    "numerics/test_moe.py::test_four_ranks": "numerics/test_experts.py::test_with_an_efsdp_axis",
    "numerics/test_lengths.py::test_packed_sequences_make_no_more_graphs_than_unsharded[mask]": (
        "[op]"
    ),
    "numerics/test_random_models.py::test_random_models[4]": "[0]",
    "numerics/test_random_models.py::test_random_models[8]": "[0]",
    "numerics/test_inductor.py::test_hsdp": "::test_gpt",
    "numerics/test_inductor.py::test_odd_sizes_in_bf16": "::test_gpt",
    "numerics/test_micro_batches.py::test_meshes": "::test_reduced_each",
    "numerics/test_micro_batches.py::test_inductor": "::test_reduced_each",
    "numerics/test_whole_step.py::test_meshes": "::test_models",
    "numerics/test_whole_step.py::test_inductor": "::test_models",
    "numerics/test_mixed.py::test_as_unsharded_with_each_gather_once"
    "[break in the root-compile(shard(m))]": "[break in a unit-compile(shard(m))]",
    "numerics/test_parity.py::test_model[halves]": (
        "numerics/test_mixed_precision.py::test_policy_on_models[halves-policies4]"
    ),
    "compat/fsdp1/test_rest_rows.py::test_summon[False]": "[True]",
    "numerics/test_tensor_parallel.py::test_gradient_accumulation": (
        "compat/fsdp2/test_parallel_rows.py::test_tensor_parallel[True]"
    ),
    "numerics/test_tensor_parallel.py::test_without_data_parallelism[compiled]": "[eager]",
    "numerics/test_compiled_optimizer.py::test_compiled_steps_of_sharded_parameters"
    "[adamw-by_itself]": "[sgd-in_a_function]",
    "planning/test_memory.py::test_peak_with_a_smaller_mesh": "::test_peak_without_inductor[bf16]",
    "planning/test_memory.py::test_peak_without_inductor[kept]": (
        "::test_peak_without_inductor[bf16]"
    ),
    "planning/test_memory.py::test_peak_without_inductor[logits]": (
        "::test_peak_without_inductor[bf16]"
    ),
    "planning/test_memory.py::test_peak_without_inductor[tied]": (
        "::test_peak_without_inductor[bf16]"
    ),
    "planning/test_calibrate.py::test_a_budget_chooses_slices_too": (
        "::test_a_budget_keeps_what_fits"
    ),
    "numerics/test_shared_buckets.py::test_four_ranks[hsdp]": "[1d]",
    "compat/fsdp1/test_training_rows.py::test_accumulation_hybrid": "::test_hybrid",
    "numerics/test_fsdp1.py::test_inductor": "::test_one_graph_each_way",
    "numerics/test_quantized.py::test_inductor": "::test_graphs_as_eager[fp16 gradients]",
    "numerics/test_surface.py::test_with_inductor[tied over units]": "::test_tied_over_units",
    "test_examples.py::test_example[hsdp_tensor_parallel]": "[to_a_report]",
    "numerics/test_meshes.py::test_hsdp_in_bf16": "::test_hsdp[unused]",
    "numerics/test_graphs.py::test_collectives_per_step[llama_tied_unit-False]": "[deep-None]",
    "numerics/test_step_in_backward.py::test_units_that_several_graphs_read": "::test_models",
    "numerics/test_pipelining.py::test_compiled_stages[GPipe]": "[1F1B]",
    "benchmarks/test_elastic.py::test_a_job_that_loses_ranks[twice]": "[once]",
    "numerics/test_shared_buckets.py::test_same_as_stock[moe-1073741824]": (
        "[gpt_of_one_layer-1073741824]"
    ),
    "numerics/test_choices.py::test_other_models[mixed]": "::test_same_as_stock[messages]",
    "numerics/test_fsdp1.py::test_ablation": "compat/fsdp1/test_runtime_rows.py::test_ablation",
    "numerics/test_step_in_backward.py::test_scripts[scheduled]": (
        "numerics/test_overlap.py::test_scripts[scheduled-compiled]"
    ),
    "numerics/test_step_in_backward.py::test_scripts[evaluated]": (
        "numerics/test_overlap.py::test_scripts[evaluated-compiled]"
    ),
    "numerics/test_overlap.py::test_two_optimizers[False]": "[True]",
    "numerics/test_meshes.py::test_one_axis[odd-None]": "::test_int_reshard[odd]",
    "numerics/test_training_loop.py::test_optimizers[sgd]": "[adamw+foreach]",
    "frontend/test_fallback.py::test_after_both_ways": "::test_fsdp1",
    "numerics/test_checksums.py::test_the_same_numbers[inductor]": "[graph]",
    "numerics/test_checksums.py::test_a_fault_that_lasts[all_gather-graph]": "[all_gather-eager]",
    "numerics/test_checksums.py::test_a_fault_that_lasts[all_to_all-graph]": "[all_to_all-eager]",
    "numerics/test_checksums_wide.py::test_all_ranks_hear_of_it[tensor parallelism-True]": (
        "[tensor parallelism-False]"
    ),
    "numerics/test_checksums_wide.py::test_all_ranks_hear_of_it[several meshes-True]": (
        "[several meshes-False]"
    ),
    "numerics/test_checked_steps.py::test_whole_steps[options1]": "[options0]",
    "numerics/test_checked_steps.py::test_whole_steps_of_four": "::test_whole_steps[options0]",
    "numerics/test_checked_steps.py::test_a_step_is_taken_again[True]": "[False]",
    "numerics/test_checksums.py::test_a_bit_that_flips_on_the_way[position1-graph]": (
        "[position3-graph]"
    ),
    "numerics/test_checksums.py::test_a_bit_that_flips_on_the_way[position2-graph]": (
        "[position3-graph]"
    ),
    "numerics/test_checksums.py::test_a_bit_that_flips_on_the_way[position4-graph]": (
        "[position0-graph]"
    ),
    "numerics/test_checksums.py::test_a_bit_that_flips_on_the_way[position6-graph]": (
        "[position7-graph]"
    ),
    "numerics/test_checksums.py::test_a_bit_that_flips_at_rest[between steps-state-graph]": (
        "[before backward-state-graph]"
    ),
    "numerics/test_checksums.py::test_a_bit_that_flips_at_rest[before backward-shard-graph]": (
        "[between steps-shard-graph]"
    ),
    "numerics/test_checksums.py::test_replicas[check_wire_of_one_replica-graph]": (
        "[check_wire_of_one_replica-eager]"
    ),
    "ahead/test_precompile.py::test_with_replicas": (
        "::test_it_computes_what_the_compiled_model_does[plain]"
    ),
    "test_examples.py::test_example[plain_loop]": "[to_a_report]",
    "compat/fsdp2/test_parallel_rows.py::test_dims[both]": "[three]",
    "numerics/test_shared_buckets.py::test_same_as_stock[gpt-300000]": ("::test_fewer_collectives"),
    "planning/test_memory.py::test_peak_without_inductor[checkpoint]": (
        "::test_peak_without_inductor[bf16]"
    ),
    "compat/fsdp2/test_since_2_15_rows.py::test_dtype_of_one_parameter[torch.bfloat16]": "[None]",
    "compat/fsdp2/test_since_2_15_rows.py::test_dtype_of_one_parameter[torch.float32]": "[None]",
    "compat/fsdp2/test_precision_rows.py::test_mean_over_two_axes[None]": "[bfloat16]",
    "compat/fsdp2/test_precision_rows.py::test_mean_over_two_axes[float64]": "[bfloat16]",
    "compat/fsdp2/test_precision_rows.py::test_accumulation_dtype[None]": (
        "compat/fsdp2/test_since_2_15_rows.py::test_reduce_dtype_by_default"
    ),
    "compat/fsdp2/test_precision_rows.py::test_accumulation_dtype[bfloat16]": (
        "compat/fsdp2/test_since_2_15_rows.py::test_reduce_dtype_by_default"
    ),
    "command/test_replacement.py::test_a_script_for_torch_runs_with_ours[False]": "[True]",
    "numerics/test_meshes.py::test_int_reshard_in_bf16": "::test_int_reshard[odd]",
    "numerics/test_meshes.py::test_one_axis[tied-True]": "::test_int_reshard[odd]",
    "numerics/test_meshes.py::test_one_axis[frozen-False]": "::test_int_reshard[odd]",
    "numerics/test_graphs.py::test_one_forward_and_one_backward_graph_and_no_recompiles[gpt]": (
        "[llama_tied_unit]"
    ),
    "numerics/test_graphs.py::test_one_forward_and_one_backward_graph_and_no_recompiles[conv]": (
        "[llama_tied_unit]"
    ),
    "compiler/test_trial.py::test_the_same_as_partitioned_anew[moe-policy2-True]": (
        "[llama-policy1-True]"
    ),
    "compiler/test_budgets.py::test_what_is_compiled_fits[slices]": "[halves]",
    **{
        f"compiler/test_budgets.py::test_what_is_compiled_fits[{case}]": (
            "[activations, slices, from costs]"
        )
        for case in ("activations", "from costs")
    },
    "wire/test_agreement.py::test_some_ranks_have_no_graph[printing]": "[printing at first]",
    "compiler/test_budgets.py::test_what_is_compiled_fits[a whole step from costs]": (
        "[a whole step]"
    ),
    "compiler/test_trial.py::test_a_line_that_moves_is_drawn_anew[Masked]": "[Scaled]",
    "compiler/test_trial.py::test_a_line_that_moves_is_drawn_anew[Backwards]": "[Scaled]",
    "numerics/test_random_fsdp1.py::test_random_models[3]": "[0]",
    "command/test_cli.py::test_as_a_program": (
        "command/test_replacement.py::test_a_script_for_torch_runs_with_ours[True]"
    ),
    "numerics/test_meshes.py::test_ops_run_unlowered": (
        "numerics/test_parity.py::test_ops_run_unlowered"
    ),
    "numerics/test_meshes.py::test_hsdp_and_reshard": "::test_hsdp[unused]",
    "numerics/test_overlap.py::test_hsdp_collectives": (
        "::test_the_same_collectives_in_the_same_order[compiled]"
    ),
    "numerics/test_mixed.py::test_as_unsharded_with_each_gather_once[whole-compile(shard(m))]": (
        "numerics/test_parity.py::test_model[odd]"
    ),
    **{
        # Orders are those of numerics/test_orders.py.
        f"numerics/test_mixed.py::test_as_unsharded_with_each_gather_once[disabled unit-{order}]": (
            "[disabled unit-compile(shard(m))]"
        )
        for order in (
            "shard(compile(m))",
            "shard, m.compile()",
            "m.compile(), shard",
            "block.compile(), shard",
            "blocks = compile(block), shard",
        )
    },
    "numerics/test_mixed.py::test_with_casts_at_the_boundaries[shard, block.compile()]": (
        "[blocks = compile(block), shard]"
    ),
    "numerics/test_training_loop.py::test_optimizers[sgd+foreach]": "[adamw+foreach]",
    "numerics/test_training_loop.py::test_optimizers[adamw+amsgrad]": "[adamw+foreach]",
    "numerics/test_training_loop.py::test_optimizers[adamw+maximize]": "[adamw+foreach]",
    "numerics/test_quantized.py::test_as_the_unsharded_model_with_the_same_codes[gathers in fp8]": (
        "[gradients in fp8]"
    ),
    # Ranks that share no group, told of each other's fallbacks: agreement over both axes.
    "frontend/test_fallback.py::test_replicas": "wire/test_agreement.py::test_hsdp",
    "numerics/test_checksums.py::test_nothing_is_found_where_nothing_happened[graph]": (
        "numerics/test_checksums_wide.py::test_random_models_in_which_nothing_happens"
    ),
    "compat/fsdp2/test_parallel_rows.py::test_dims[shard]": "[three]",
    "compat/fsdp2/test_read_rows.py::test_default_backend": "::test_momentum[MomentumDeep]",
    "numerics/test_overlap.py::test_scripts[dropped-compiled]": "[dropped-eager]",
    "numerics/test_overlap.py::test_scripts[looked_at-compiled]": "[looked_at-eager]",
    "compat/fsdp2/test_arguments.py::test_size_between": (
        "numerics/test_meshes.py::test_int_reshard[odd]"
    ),
    "compat/fsdp1/test_training_rows.py::test_accumulation[True]": (
        "numerics/test_random_fsdp1.py::test_random_models[0]"
    ),
    "numerics/test_regions.py::test_the_same_numbers[all in one, and dropout]": "[all in one]",
    "numerics/test_regions.py::test_dynamic_shapes_are_compiled_in_place": (
        "numerics/test_regions.py::test_the_same_numbers[all in one]"
    ),
    "planning/test_memory.py::test_peak_under_inductor": "::test_peak_without_inductor[bf16]",
    "ahead/test_precompile.py::test_with_tensor_parallelism": "::test_with_experts",
    "ahead/test_precompile.py::test_it_computes_what_the_compiled_model_does[bfloat16]": "[plain]",
    "ahead/test_precompile.py::test_it_computes_what_the_compiled_model_does[tied]": "[plain]",
    "compiler/test_cache.py::test_the_backend_by_name_is_the_default_one": (
        "numerics/test_inductor.py::test_gpt"
    ),
    "numerics/test_gather_next.py::test_two_optimizers": "::test_scripts",
    # Graphs take apart what pytree knows, and break at any object.
    **{
        f"eager/test_outputs.py::test_what_holds_an_output[{way}-compiled]": f"[{other}-compiled]"
        for other, ways in {
            "own dict": ("own list", "ordered"),
            "own in dataclass": ("dataclass",),
            "packed": ("named tuple", "of a named tuple"),
            "object": ("loop", "slots", "namespace"),
            "mixture": ("distribution",),
        }.items()
        for way in ways
    },
    # A registered method that calls the model: both ways in.
    **{
        f"frontend/test_methods.py::test_habits[{habit}-forward]": f"[{habit}-training_step]"
        for habit in (
            *("freezes", "assigns", "loads", "writes", "fails"),
            *("fails in backward", "steps late"),
        )
    },
    **{f"pairs/test_pairs.py::test_programs[{number}]": "[0]" for number in (1, 2, 3)},
    # The same sentence, of another feature.
    **{
        f"pairs/test_pairs.py::test_refused[{names}]": f"[{other}]"
        for other, same in {
            "checksums+extension": (
                "extension+gather_int8",
                "extension+reduce_int8",
                "both_fp8+extension",
            ),
            "cpu_offload+gather_int8": ("cpu_offload+reduce_int8", "both_fp8+cpu_offload"),
            "reduce_int8+reduce_scatter": ("both_fp8+reduce_scatter",),
            "checksums+overlap": ("checksums+in_backward",),
            "fsdp1+overlap": (
                "fsdp1+in_backward",
                "fsdp1_flat+overlap",
                "fsdp1_flat+in_backward",
            ),
            "recompute+regions_units": (
                "offload+regions_units",
                "all_budgets+regions_units",
                "recompute+regions_named",
                "offload+regions_named",
                "all_budgets+regions_named",
            ),
        }.items()
        for names in same
    },
    "programs/test_programs.py::test_random_routed_programs[3]": "[0]",
    "programs/test_programs.py::test_random_steps[1]": "[0]",
    "programs/test_programs.py::test_random_programs_of_which_one_rank_has_no_graph[14]": "[1]",
    **{
        f"programs/test_programs.py::test_a_planted_fault_is_found[{name}]": (
            "[iterating_yields_sharded_parameters]"
        )
        for name in (
            "collectives_of_the_user_are_judged",
            "compiling_in_place_begins_in_torch",
            "substitutions_are_ignored",
            "ties_after_sharding_are_forgotten",
            "every_backward_counts_as_whole",
            "full_parameters_outlive_a_step",
            "reads_stay_inside_of_branches",
            "whole_steps_keep_gradients",
            "writes_in_a_trace_are_not_settled",
            "writes_without_a_version_are_missed",
            "unused_heads_get_zeros",
        )
    },
    **{
        f"compat/fsdp2/test_since_2_15_rows.py::test_grad_dtype[{reduced}-{dtypes}-{of}]": (
            f"[torch.bfloat16-float32/bfloat16-{of}]"
        )
        for of in ("set after", "set to its own", "biases")
        for reduced, dtypes in (
            *(("torch.float32", each) for each in ("bfloat16/float32", "float32/bfloat16")),
            ("torch.bfloat16", "bfloat16/float32"),
            ("None", "float32/bfloat16"),
        )
    },
    **{
        f"frontend/test_warmup.py::test_no_trace[{way}-{when}]": f"[wrap-{other}]"
        for way, when, other in (
            ("wrap flat", "before step", "between"),
            ("wrap flat", "between", "between"),
            ("wrap flat", "before backward", "before backward"),
            ("wrap", "before step", "between"),
        )
    },
    "frontend/test_warmup.py::test_no_trace[shard-before step]": "[shard-between]",
    **{
        f"passes/test_outline.py::test_random_graphs_compute_the_same[{first}-before{i}]": (
            f"[0-before{i}]"
        )
        for first in (50, 100)
        for i in range(3)
    },
    **{
        f"numerics/test_no_sync.py::test_dropped[{when}-True]": f"[{when}-False]"
        for when in ("at once", "before a backward")
    },
    "numerics/test_assigned.py::test_exchanged_between_calls[rotated-one unit]": (
        "[rotated-three units]"
    ),
    **{
        # Programs that say nothing that those before them do not say.
        f"programs/test_programs.py::test_random_programs[{first}]": (
            "programs/test_programs.py::test_the_programs_cover_everything"
        )
        for first in range(40, 100, 5)
    },
}


def left_out(nodes: list[str], *, is_whole: bool) -> set[str]:
    """Returns which of the collected tests `make test` leaves out.

    is_whole: everything was collected, so that every row must name tests.

    Raises:
        ValueError: a row names no test, or none that always runs.
    """
    names = {node: node.removeprefix("tests/") for node in nodes}
    gone = {node for node, name in names.items() if not VARIANTS.keys().isdisjoint(_words(name))}
    stay = {word for node, name in names.items() if node not in gone for word in _words(name)}
    away = {word for node in gone for word in _words(names[node])}
    for row, other in VARIANTS.items():
        shown = _whole(row, other)
        if is_whole and not (row in away and shown in stay):
            raise ValueError(
                f"tests/kit/variants.py: {row!r} is left out, and {shown!r} should show the same: "
                "both should be tests, and the second one that always runs"
            )
    return gone


def _whole(row: str, other: str) -> str:
    """The other test's name: it may be told by its case, or by its function, in the same file."""
    if other[0] == "[":
        return row[: row.index("[")] + other
    return row[: row.index("::")] + other if other[:2] == "::" else other


def _words(name: str) -> set[str]:
    """A test's name, with its case and without."""
    return {name, name.split("[")[0]}
