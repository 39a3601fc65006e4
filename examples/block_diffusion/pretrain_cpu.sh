#!/usr/bin/env bash
# Encoder and canvas (--dllm-mode block_diffusion) of the tiny model on a CPU, in any layout:
#
#   PROCESSES=2 bash examples/block_diffusion/pretrain_cpu.sh --pipeline-model-parallel-size 2
#
# The rest of the command is examples/mdlm/pretrain_cpu.sh; of a flag that is given twice, the last one counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_cpu.sh --dllm-mode block_diffusion --dllm-block-size 16 --block-diffusion-canvases 4 "$@"
