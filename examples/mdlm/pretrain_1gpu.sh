#!/usr/bin/env bash
# A 160M-parameter masked diffusion model on one GPU, in bf16, PyTorch alone (no Transformer Engine).
# Written without a GPU at hand: the flags are checked in tests/unit/test_examples.py, a run on a GPU is not.
set -euo pipefail
cd "$(dirname "$0")/../.."

DATA="${DATA:-data/corpus_text_document}" # prefix of .bin and .idx, from tools/preprocess_data.py
TOKENIZER="${TOKENIZER:-data/tokenizer}"  # folder with a Hugging Face tokenizer that has a mask token
SAVE="${SAVE:-runs/pretrain_1gpu}"

exec torchrun --standalone --nproc-per-node 1 pretrain_dllm.py \
  --dllm-mode mdlm \
  --num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 --qk-layernorm \
  --seq-length 1024 --bf16 \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
  --data-path "$DATA" --split 99,1,0 --num-workers 4 \
  --micro-batch-size 16 --global-batch-size 256 --train-iters 100000 \
  --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
  --log-interval 10 --eval-interval 1000 --eval-iters 20 \
  --save "$SAVE" --load "$SAVE" --save-interval 1000 --tensorboard-dir "$SAVE/tensorboard" \
  "$@"
