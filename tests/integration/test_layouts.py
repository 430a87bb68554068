"""Layouts of the debug model through ./run_train.sh: losses and gradient norms of FSDP2, of each other, of one process."""

from __future__ import annotations

import pytest

from .training_runs import GRAD_NORM, LOSS

FSDP2 = ["--experimental.custom_import", "tests.fsdp2_peer", "--model.name", "fsdp2.llama3"]
EACH_MICROBATCH = ["--simple_fsdp.replica_reduction", "per_microbatch"]
NATIVE = ["--simple_fsdp.reduction", "native"]
REPLICATE_2 = ["--parallelism.data_parallel_replicate_degree", "2"]
REPLICATE_4 = ["--parallelism.data_parallel_replicate_degree", "4"]
TP_2 = ["--parallelism.tensor_parallel_degree", "2"]
CP_2 = ["--parallelism.context_parallel_degree", "2"]
PP_2 = ["--parallelism.pipeline_parallel_degree", "2"]
BATCH_1 = ["--training.local_batch_size", "1"]
BATCH_2 = ["--training.local_batch_size", "2"]
BATCH_4 = ["--training.local_batch_size", "4"]
BATCH_8 = ["--training.local_batch_size", "8"]
COMPILE = ["--compile.enable", "--compile.backend", "aot_eager", "--compile.components", "model"]
BLOCKS = ["--simple_fsdp.compile_unit", "block"]
AC_FULL = ["--activation_checkpoint.mode", "full"]
AC_OP = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]
BF16 = ["--training.mixed_precision_param", "bfloat16"]
DUAL_PIPE = ["DualPipeV", "--parallelism.no_pipeline_parallel_expert_parallel_overlap"]

# name: processes, flags of ours, flags of the FSDP2 run that it must equal; beyond 2 ranks the native reduction has its bits
LIKE_FSDP2 = {
    "fully_shard": (4, BATCH_2 + NATIVE, BATCH_2),
    "fully_shard in bfloat16": (4, BATCH_2 + NATIVE + BF16, BATCH_2 + BF16),
    # FSDP2 has no replicate mode in torchtitan; the same data-parallel degree gives the same sums
    "replicate": (4, BATCH_2 + NATIVE + REPLICATE_4, BATCH_2),
    "hybrid_shard 2x2": (4, BATCH_2 + NATIVE + REPLICATE_2, BATCH_2 + REPLICATE_2),
    "fully_shard 2 x tp 2": (4, BATCH_4 + TP_2, BATCH_4 + TP_2),
    "fully_shard 2 x tp 2 in bfloat16": (4, BATCH_4 + TP_2 + BF16, BATCH_4 + TP_2 + BF16),
    "replicate 2 x tp 2": (4, BATCH_4 + REPLICATE_2 + TP_2, BATCH_4 + TP_2),
    "replicate 2 x tp 2 in bfloat16": (4, BATCH_4 + REPLICATE_2 + TP_2 + BF16, BATCH_4 + TP_2 + BF16),
    "selective checkpointing": (4, BATCH_2 + NATIVE + AC_OP, BATCH_2),
    "full checkpointing": (4, BATCH_2 + NATIVE + AC_FULL, BATCH_2),
    "one compiled graph": (4, BATCH_2 + NATIVE + COMPILE, BATCH_2),
    "one compiled graph with full checkpointing": (4, BATCH_2 + NATIVE + COMPILE + AC_FULL, BATCH_2),
    "compiled blocks with selective checkpointing": (4, BATCH_2 + NATIVE + COMPILE + BLOCKS + AC_OP, BATCH_2),
    "one compiled graph with selective checkpointing and tp 2": (4, BATCH_4 + COMPILE + AC_OP + TP_2, BATCH_4 + TP_2),
    "hybrid_shard 2x2 x tp 2": (8, BATCH_2 + NATIVE + REPLICATE_2 + TP_2, BATCH_2 + REPLICATE_2 + TP_2),
}

# name: processes, flags of ours, flags of the fully_shard run that it must equal, all with the exact reduction
LIKE_FULLY_SHARD = {
    "replicate": (4, BATCH_2 + REPLICATE_4, BATCH_2),
    "hybrid_shard 2x2 in bfloat16": (4, BATCH_2 + BF16 + REPLICATE_2, BATCH_2 + BF16),
    "hybrid_shard 2x2 x tp 2": (8, BATCH_2 + REPLICATE_2 + TP_2, BATCH_2 + TP_2),
    "hybrid_shard 2x2, each of 2 microbatches reduced": (4, BATCH_1 + REPLICATE_2 + EACH_MICROBATCH, BATCH_1),
}

# name: processes, flags; each sums over other parts of the batch, sequence or layers than one process does, in fp32
LIKE_ONE_PROCESS = {
    "fully_shard 4": (4, BATCH_2),
    "fully_shard 2 x tp 2": (4, BATCH_4 + TP_2),
    "cp 2": (2, BATCH_8 + CP_2),
    "replicate 2, 4 microbatches": (2, BATCH_1 + REPLICATE_2),
    "fully_shard 2, 4 microbatches": (2, BATCH_1),
    "pp 2": (2, BATCH_8 + PP_2),
    "pp 2 x tp 2": (4, BATCH_8 + PP_2 + TP_2),
    "pp 2 x replicate 2": (4, BATCH_4 + PP_2 + REPLICATE_2),
    **{
        f"pp 2 x fully_shard 2, {schedule[0]}": (
            4,
            BATCH_4 + PP_2 + ["--parallelism.pipeline_parallel_schedule", *schedule],
        )
        for schedule in (
            ["1F1B"],
            ["GPipe"],
            ["Interleaved1F1B"],
            ["LoopedBFS"],
            ["InterleavedZeroBubble"],
            ["ZBVZeroBubble"],
            DUAL_PIPE,
        )
    },
}


@pytest.mark.parametrize("ngpu, flags, fsdp2_flags", LIKE_FSDP2.values(), ids=LIKE_FSDP2.keys())
def test_a_layout_trains_bitwise_like_fsdp2(runs, ngpu, flags, fsdp2_flags):
    ours, fsdp2 = runs.get_scalars(ngpu, *flags), runs.get_scalars(ngpu, *FSDP2, *fsdp2_flags)
    assert ours == fsdp2
    assert ours[LOSS][-1] < ours[LOSS][0]


@pytest.mark.parametrize("ngpu, flags, fully_shard_flags", LIKE_FULLY_SHARD.values(), ids=LIKE_FULLY_SHARD.keys())
def test_modes_train_bitwise_alike_with_the_exact_reduction(runs, ngpu, flags, fully_shard_flags):
    assert runs.get_scalars(ngpu, *flags) == runs.get_scalars(ngpu, *fully_shard_flags)
    assert "with the exact reduction" in runs.get_result(ngpu, *flags).log


@pytest.mark.parametrize("ngpu, flags", LIKE_ONE_PROCESS.values(), ids=LIKE_ONE_PROCESS.keys())
def test_a_layout_has_the_losses_and_gradient_norms_of_one_process(runs, ngpu, flags):
    ours, one_process = runs.get_scalars(ngpu, *flags), runs.get_scalars(1, *BATCH_8)
    # fp32 has 7 digits, and sums in another order differ in the last of them; training makes the difference grow slowly
    assert ours[GRAD_NORM][0] == pytest.approx(one_process[GRAD_NORM][0], rel=1e-6)
    assert ours[GRAD_NORM] == pytest.approx(one_process[GRAD_NORM], rel=1e-5)
    assert ours[LOSS] == pytest.approx(one_process[LOSS], rel=1e-6)


def test_the_user_sees_the_real_loss_of_a_pipeline(runs):
    layout = (2, *BATCH_8, *PP_2)
    assert runs.get_printed_losses(*layout) == [f"{loss:.5f}" for loss in runs.get_scalars(*layout)[LOSS]]
