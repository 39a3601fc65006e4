#!/usr/bin/env bash
# A tiny DiffusionGemma (--dllm-mode block_diffusion, with self-conditioning) on a CPU, in any layout:
#
#   PROCESSES=2 bash examples/block_diffusion/pretrain_diffusion_gemma_cpu.sh --pipeline-model-parallel-size 2
#
# The rest of the command is examples/mdlm/pretrain_cpu.sh; of a flag that is given twice, the last one counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_cpu.sh --dllm-mode block_diffusion --model-preset tiny-diffusion-gemma \
  --block-diffusion-canvases 2 "$@"
