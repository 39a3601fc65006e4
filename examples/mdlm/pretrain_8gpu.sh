#!/usr/bin/env bash
# An 8B masked diffusion model of LLaDA's shape and schedule on one node of eight 80 GB GPUs: TP 2 with sequence
# parallelism x DP 4 with the distributed optimizer, bf16, Transformer Engine. By arithmetic a GPU holds 36 GB of
# weights, gradients and optimizer state. For many nodes: examples/slurm/pretrain.sbatch, which starts this file.
# Written without a GPU at hand: the flags are checked in tests/unit/test_examples.py, a run on GPUs is not.
set -euo pipefail
cd "$(dirname "$0")/../.."

DATA="${DATA:-data/corpus_text_document}" # prefix of .bin and .idx, or a blend: "0.7 data/web 0.3 data/code"
TOKENIZER="${TOKENIZER:-data/tokenizer}"  # folder with a Hugging Face tokenizer that has a mask token
SAVE="${SAVE:-runs/pretrain_8gpu}"
TRAIN_ITERS="${TRAIN_ITERS:-100000}"
# How the processes find each other; the SLURM script replaces it.
LAUNCH="${LAUNCH:-torchrun --standalone --nproc-per-node 8}"

MODEL=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32
  --seq-length 4096 --rotary-base 500000 --norm-epsilon 1e-5
)
LAYOUT=(
  --tensor-model-parallel-size 2 --sequence-parallel
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --recompute-granularity selective
  --transformer-impl transformer_engine --bf16
)
SCHEDULE=(
  --micro-batch-size 2 --global-batch-size 1280 --train-iters "$TRAIN_ITERS"
  --lr 4e-4 --min-lr 1e-5 --lr-warmup-iters 2000
  --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters "$((TRAIN_ITERS / 10))"
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
)

export CUDA_DEVICE_MAX_CONNECTIONS=1 # lets tensor-parallel communication overlap with matrix products
# shellcheck disable=SC2086
exec $LAUNCH pretrain_dllm.py --dllm-mode mdlm \
  "${MODEL[@]}" "${LAYOUT[@]}" "${SCHEDULE[@]}" \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
  --data-path $DATA --split 999,1,0 --num-workers 4 \
  --log-interval 10 --eval-interval 1000 --eval-iters 4 \
  --save "$SAVE" --load "$SAVE" --save-interval 500 --tensorboard-dir "$SAVE/tensorboard" \
  "$@"
