#!/usr/bin/env bash
# Self-correcting diffusion (--dllm-mode scdd) of the tiny model on a CPU, in any layout:
#
#   PROCESSES=2 bash examples/scdd/pretrain_cpu.sh --tensor-model-parallel-size 2 --sequence-parallel
#
# The rest of the command is examples/mdlm/pretrain_cpu.sh; of a flag that is given twice, the last one counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_cpu.sh --dllm-mode scdd --scdd-max-ratio 0.1 "$@"
