#!/usr/bin/env bash
# Block diffusion (--dllm-mode bd3lm): the 8B model of examples/mdlm/pretrain_8gpu.sh on eight GPUs. Three streams
# triple the tokens: TP 4. Blocks grow from 1 to 32 tokens early in the run, a warm-up from autoregression.
# Under SLURM: PRETRAIN=examples/bd3lm/pretrain_8gpu.sh sbatch --nodes 8 examples/slurm/pretrain.sbatch
# Written without a GPU at hand: the flags are checked in tests/unit/test_examples.py, a run on GPUs is not.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_8gpu.sh --dllm-mode bd3lm --bd3lm-complementary-masks \
  --dllm-block-size-schedule 1:4:32 --dllm-block-size-schedule-iters 2000 \
  --tensor-model-parallel-size 4 --micro-batch-size 1 "$@"
