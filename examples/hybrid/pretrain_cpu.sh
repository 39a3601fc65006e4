#!/usr/bin/env bash
# Diffusion and autoregression in one network (--dllm-mode hybrid) of the tiny model on a CPU, in any layout:
#
#   PROCESSES=2 bash examples/hybrid/pretrain_cpu.sh --tensor-model-parallel-size 2 --sequence-parallel
#
# The rest of the command is examples/mdlm/pretrain_cpu.sh; of a flag that is given twice, the last one counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_cpu.sh --dllm-mode hybrid --dllm-block-size 16 --diffusion-loss-weight 0.3 "$@"
