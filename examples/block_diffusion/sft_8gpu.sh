#!/usr/bin/env bash
# DiffusionGemma 26B-A4B, fine-tuned on chat data on one node of eight 80 GB GPUs: TP 2 with sequence parallelism x DP 4,
# the experts over EP 8, the distributed optimizer, bf16. By arithmetic a GPU holds 62 GB of weights, gradients and optimizer
# state; on more nodes less, as the state of the experts is then shared too.
# Under SLURM: PRETRAIN=examples/block_diffusion/sft_8gpu.sh sbatch --nodes 2 examples/slurm/pretrain.sbatch
# Written without a GPU at hand: the flags are checked in tests/unit/test_examples.py, a run on GPUs is not.
set -euo pipefail
cd "$(dirname "$0")/../.."

MODEL="${MODEL:-models/diffusiongemma-26B-A4B-it}" # a Hugging Face folder
DATA="${DATA:-data/chat.jsonl}"                    # {"messages": [...]} a line
SAVE="${SAVE:-runs/diffusion_gemma}"
# How the processes find each other; the SLURM script replaces it.
LAUNCH="${LAUNCH:-torchrun --standalone --nproc-per-node 8}"

LAYOUT=(
  --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --bf16
)
SCHEDULE=(
  --micro-batch-size 1 --global-batch-size 64 --train-iters "${TRAIN_ITERS:-2000}"
  --lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 50 --lr-decay-style cosine --weight-decay 0.0 --clip-grad 1.0
)

export CUDA_DEVICE_MAX_CONNECTIONS=1 # lets tensor-parallel communication overlap with matrix products
# shellcheck disable=SC2086
exec $LAUNCH pretrain_dllm.py --dllm-mode block_diffusion \
  --hf-model "$MODEL" --init-from-hf "${LAYOUT[@]}" "${SCHEDULE[@]}" \
  --sft-data-path "$DATA" --seq-length 4096 --num-workers 4 --log-interval 10 --eval-iters 0 \
  --save "$SAVE" --load "$SAVE" --save-interval 200 --tensorboard-dir "$SAVE/tensorboard" \
  "$@"
