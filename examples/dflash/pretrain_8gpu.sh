#!/usr/bin/env bash
# A DFlash draft (--dllm-mode dflash) of five layers beside Qwen3-8B, on chat data and on one node of eight 80 GB GPUs:
# TP 2 with sequence parallelism, which shards the target too, x DP 4 with the distributed optimizer, bf16.
# Under SLURM: PRETRAIN=examples/dflash/pretrain_8gpu.sh sbatch --nodes 8 examples/slurm/pretrain.sbatch
# Written without a GPU at hand: the flags are checked in tests/unit/test_examples.py, a run on GPUs is not.
set -euo pipefail
cd "$(dirname "$0")/../.."

TARGET="${TARGET:-models/Qwen3-8B}" # a Hugging Face folder; its shape and its tokenizer are the draft's
MASK_TOKEN="${MASK_TOKEN:-151669}" # a row of the target's embedding that no token has
CHAT="${CHAT:-data/chat.jsonl}" # best: answers that the target wrote itself
SAVE="${SAVE:-runs/dflash_8gpu}"
TRAIN_ITERS="${TRAIN_ITERS:-20000}"
# How the processes find each other; the SLURM script replaces it.
LAUNCH="${LAUNCH:-torchrun --standalone --nproc-per-node 8}"

MODEL=(
  --dflash-target "$TARGET" --dllm-mask-token-id "$MASK_TOKEN"
  --num-layers 5 --dllm-block-size 16 --dflash-num-anchors 512 --seq-length 3072
)
LAYOUT=(
  --tensor-model-parallel-size 2 --sequence-parallel --cp-comm-type all_gather
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --bf16
)
SCHEDULE=(
  --micro-batch-size 1 --global-batch-size 64 --train-iters "$TRAIN_ITERS"
  --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 800
  --weight-decay 0.01 --clip-grad 1.0
)

export CUDA_DEVICE_MAX_CONNECTIONS=1 # lets tensor-parallel communication overlap with matrix products
# shellcheck disable=SC2086
exec $LAUNCH pretrain_dllm.py --dllm-mode dflash \
  "${MODEL[@]}" "${LAYOUT[@]}" "${SCHEDULE[@]}" \
  --sft-data-path "$CHAT" --num-workers 4 \
  --log-interval 10 \
  --save "$SAVE" --load "$SAVE" --save-interval 1000 --save-hf-interval 1000 --tensorboard-dir "$SAVE/tensorboard" \
  "$@"
