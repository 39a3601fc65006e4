#!/usr/bin/env bash
# Any parallel layout of the tiny debug model on a CPU, on the text that examples/quickstart.sh prepared:
#
#   bash examples/mdlm/pretrain_cpu.sh
#   PROCESSES=4 bash examples/mdlm/pretrain_cpu.sh --tensor-model-parallel-size 2 --sequence-parallel \
#     --pipeline-model-parallel-size 2
#
# What is given on the command line is added to the flags below. The losses do not depend on the layout.
set -euo pipefail
cd "$(dirname "$0")/../.."

PROCESSES="${PROCESSES:-1}"
SAVE="${SAVE:-}" # where to keep checkpoints and go on from the latest; empty: nowhere
DATA="${DATA:-runs/quickstart/docs_text_document}"
TOKENIZER="${TOKENIZER:-runs/quickstart/tokenizer.model}"

LAUNCH="${LAUNCH:-torchrun --standalone --nproc-per-node $PROCESSES}" # the SLURM script replaces it

export OMP_NUM_THREADS=1
# shellcheck disable=SC2086
exec $LAUNCH pretrain_dllm.py \
  --dllm-mode mdlm --model-preset tiny --seq-length 128 \
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER" \
  --data-path "$DATA" --split 90,10,0 \
  --micro-batch-size 2 --global-batch-size 16 --train-iters "${TRAIN_ITERS:-20}" \
  --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 \
  --log-interval 5 --eval-interval 20 --eval-iters 4 \
  ${SAVE:+--save "$SAVE" --load "$SAVE" --save-interval 100} \
  "$@"
