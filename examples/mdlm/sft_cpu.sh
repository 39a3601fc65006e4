#!/usr/bin/env bash
# Supervised fine-tuning on chat data, on a CPU: continues the model that examples/quickstart.sh trained with
# questions and answers made of the same documentation. Prompts are seen and never noised.
set -euo pipefail
cd "$(dirname "$0")/../.."

PROCESSES="${PROCESSES:-1}"
BASE="${BASE:-runs/quickstart}" # its tokenizer.model and checkpoints
CHAT="${CHAT:-runs/sft/chat.jsonl}"
SAVE="${SAVE:-runs/sft/checkpoints}"

[ -e "$CHAT" ] || python examples/python_docs_chat.py "$CHAT"

# --finetune takes the weights of --load and starts at iteration 0 with a fresh optimizer.
export OMP_NUM_THREADS=1
exec torchrun --standalone --nproc-per-node "$PROCESSES" pretrain_dllm.py \
  --dllm-mode mdlm \
  --num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 6 --seq-length 256 \
  --add-qkv-bias --rotary-base 100 --make-vocab-size-divisible-by 8 \
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$BASE/tokenizer.model" \
  --sft-data-path "$CHAT" --dllm-padding ignore \
  --micro-batch-size 8 --global-batch-size 16 --train-iters 20 \
  --lr 5e-4 --min-lr 5e-5 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 \
  --log-interval 5 \
  --load "$BASE/checkpoints" --finetune --save "$SAVE" --save-interval 20 \
  "$@"
