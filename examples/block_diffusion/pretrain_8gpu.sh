#!/usr/bin/env bash
# Encoder and canvas (--dllm-mode block_diffusion): the 8B model of examples/mdlm/pretrain_8gpu.sh on eight GPUs. Four
# canvases of 256 tokens a sequence, which makes it a quarter longer.
# Under SLURM: PRETRAIN=examples/block_diffusion/pretrain_8gpu.sh sbatch --nodes 8 examples/slurm/pretrain.sbatch
# Written without a GPU at hand: the flags are checked in tests/unit/test_examples.py, a run on GPUs is not.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_8gpu.sh --dllm-mode block_diffusion --dllm-block-size 256 \
  --block-diffusion-canvases 4 --tensor-model-parallel-size 4 --micro-batch-size 1 "$@"
