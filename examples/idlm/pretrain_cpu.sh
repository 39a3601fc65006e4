#!/usr/bin/env bash
# Introspective diffusion (--dllm-mode idlm) of the tiny model on a CPU, in any layout:
#
#   PROCESSES=2 bash examples/idlm/pretrain_cpu.sh --tensor-model-parallel-size 2 --sequence-parallel
#
# The rest of the command is examples/mdlm/pretrain_cpu.sh; of a flag that is given twice, the last one counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_cpu.sh --dllm-mode idlm --dllm-block-size 4 --idlm-clean-loss-weight 0.2 "$@"
