#!/usr/bin/env bash
# A DFlash draft (--dllm-mode dflash) of two layers beside SmolLM2-135M, on packed text and on a CPU, in any layout but
# pipelines. The README ("Start from a released model") makes the target's folder and the data:
#
#   PROCESSES=2 bash examples/dflash/pretrain_cpu.sh --context-parallel-size 2
#
# What is given on the command line is added to the flags below. The losses do not depend on the layout.
set -euo pipefail
cd "$(dirname "$0")/../.."

PROCESSES="${PROCESSES:-1}"
TARGET="${TARGET:-runs/smollm2}" # a Hugging Face folder, or the folder of a run
MASK_TOKEN="${MASK_TOKEN:-16}" # an id that text never contains
DATA="${DATA:-data/smollm2_text_document}" # in the target's tokens
SAVE="${SAVE:-}" # where to keep checkpoints and go on from the latest; empty: nowhere
LAUNCH="${LAUNCH:-torchrun --standalone --nproc-per-node $PROCESSES}" # the SLURM script replaces it

export OMP_NUM_THREADS=1
# shellcheck disable=SC2086
exec $LAUNCH pretrain_dllm.py \
  --dllm-mode dflash --dflash-target "$TARGET" --dllm-mask-token-id "$MASK_TOKEN" \
  --num-layers 2 --dllm-block-size 8 --dflash-num-anchors 16 --cp-comm-type all_gather \
  --seq-length 128 --data-path "$DATA" --split 90,10,0 \
  --micro-batch-size 2 --global-batch-size 8 --train-iters "${TRAIN_ITERS:-20}" \
  --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 \
  --log-interval 5 --eval-interval 20 --eval-iters 4 \
  ${SAVE:+--save "$SAVE" --load "$SAVE" --save-interval 100} \
  "$@"
