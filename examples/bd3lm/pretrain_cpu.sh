#!/usr/bin/env bash
# Block diffusion (--dllm-mode bd3lm) of the tiny model on a CPU, in any layout. Blocks grow from 1 to 16 tokens.
#
#   PROCESSES=2 bash examples/bd3lm/pretrain_cpu.sh --tensor-model-parallel-size 2 --sequence-parallel
#
# The rest of the command is examples/mdlm/pretrain_cpu.sh; of a flag that is given twice, the last one counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec bash examples/mdlm/pretrain_cpu.sh --dllm-mode bd3lm --bd3lm-complementary-masks \
  --dllm-block-size-schedule 1:4:16 --dllm-block-size-schedule-iters 5 "$@"
