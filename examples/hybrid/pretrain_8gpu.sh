#!/usr/bin/env bash
# Diffusion and autoregression in one network (--dllm-mode hybrid): the 8B model of examples/mdlm/pretrain_8gpu.sh on eight GPUs. Two streams double the tokens: TP 4.
# Under SLURM: PRETRAIN=examples/hybrid/pretrain_8gpu.sh sbatch --nodes 8 examples/slurm/pretrain.sbatch
# Written without a GPU at hand: the flags are checked in tests/unit/test_examples.py, a run on GPUs is not.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_8gpu.sh --dllm-mode hybrid --dllm-block-size 32 --diffusion-loss-weight 0.3 \
  --tensor-model-parallel-size 4 --micro-batch-size 1 "$@"
