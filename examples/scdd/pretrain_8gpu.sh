#!/usr/bin/env bash
# Self-correcting diffusion (--dllm-mode scdd): the 8B model of examples/mdlm/pretrain_8gpu.sh on eight GPUs. The same layout as mdlm.
# Under SLURM: PRETRAIN=examples/scdd/pretrain_8gpu.sh sbatch --nodes 8 examples/slurm/pretrain.sbatch
# Written without a GPU at hand: the flags are checked in tests/unit/test_examples.py, a run on GPUs is not.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_8gpu.sh --dllm-mode scdd --scdd-max-ratio 0.1 "$@"
