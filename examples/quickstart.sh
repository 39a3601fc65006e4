#!/usr/bin/env bash
# From nothing to a trained diffusion language model: bash examples/quickstart.sh
#
# Installs the package, makes a corpus of real text, a tokenizer and Megatron's .bin/.idx of it, trains a small
# masked diffusion model on two processes with tensor parallelism (GPUs if there are any, else the CPU), stops,
# resumes, compares it with a model without context, and lets it fill in text. Run again, it keeps what is there.
#
# QUICKSTART_DIR   where everything goes, default runs/quickstart (delete it to start over)
# PYTHON           the Python to install with, see environment.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/environment.sh
use_environment ""
export TOKENIZERS_PARALLELISM=false

DIR="${QUICKSTART_DIR:-runs/quickstart}"
ITERATIONS=1200
HALF=600
mkdir -p "$DIR"

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

if [ ! -s "$DIR/docs_text_document.idx" ]; then
  step "Data: the Python language reference"
  python examples/python_docs_corpus.py "$DIR/docs.jsonl"
  python tools/train_tokenizer.py --input "$DIR/docs.jsonl" --vocab-size 1024 --output-prefix "$DIR/tokenizer"
  python tools/preprocess_data.py --input "$DIR/docs.jsonl" --output-prefix "$DIR/docs" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DIR/tokenizer.model" --append-eod
fi

# Two processes hold half of every matrix each; a machine with one GPU trains on that.
GPUS="$(python -c 'import torch; print(torch.cuda.device_count())')"
PROCESSES=2
[ "$GPUS" != 1 ] || PROCESSES=1
[ "$GPUS" != 0 ] || export OMP_NUM_THREADS=1

# shellcheck disable=SC2054
TRAINING=(
  --dllm-mode mdlm
  --tensor-model-parallel-size "$PROCESSES"
  --num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 6 --seq-length 128
  --add-qkv-bias --rotary-base 100 --init-method-std 0.07
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DIR/tokenizer.model"
  --make-vocab-size-divisible-by 8
  --data-path "$DIR/docs_text_document" --split 90,10,0
  --micro-batch-size 8 --global-batch-size 8 --train-iters "$ITERATIONS"
  --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1 --adam-beta2 0.98
  --log-interval 50 --eval-interval 400 --eval-iters 80
  --save "$DIR/checkpoints" --load "$DIR/checkpoints" --save-interval "$HALF"
)

reached() { cat "$DIR/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

# Trains on from the latest checkpoint. Megatron says a lot: all of it is in training.log, the gist is shown.
train() {
  if ! torchrun --standalone --nproc-per-node "$PROCESSES" pretrain_dllm.py "${TRAINING[@]}" "$@" 2>&1 |
    tee -a "$DIR/training.log" |
    sed -nuE -e 's/^ *\[.*iteration +([0-9]+)\/ *([0-9]+) .*elapsed time per iteration \(ms\): ([0-9.]+).* \| loss: ([^ ]+).*/iteration \1 of \2: loss \4, \3 ms/p' \
      -e 's/^ *(validation loss at iteration [0-9]+).*\| loss value: ([^ ]+) .*/\1: \2/p' \
      -e 's/^.*(successfully (saved|loaded) checkpoint.*) \[.*/\1/p'; then
    grep -E "^(\[rank[0-9]+\]: )?(pretrain_dllm.py: error|[A-Za-z.]*(Error|Exception)):" "$DIR/training.log" |
      grep -v ChildFailedError | tail -n 3 >&2 || true
    echo "Training failed: all of its output is in $DIR/training.log" >&2
    exit 1
  fi
}

if [ "$(reached)" -lt "$HALF" ]; then
  step "Training: the first $HALF of $ITERATIONS iterations"
  train --exit-interval "$HALF"
fi
if [ "$(reached)" -lt "$ITERATIONS" ]; then
  step "Training: resuming at iteration $(reached)"
  train
fi

step "What it learned"
python examples/unigram_entropy.py "$DIR/docs_text_document" --split 90,10,0 2>/dev/null | tee "$DIR/unigram.txt"
bound="$(grep -oE "validation loss at iteration $ITERATIONS .*" "$DIR/training.log" | tail -n 1 |
  sed -E 's/.*\| loss value: ([^ ]+) .*/\1/')"
awk -v bound="$bound" '
  /entropy of the corpus/ { unigram = $(NF - 3) }
  END {
    printf "bound on held-out text after training: %.3f nats per token\n", bound
    verdict = bound < unigram ? "below" : "NOT below"
    printf "The model is %s the unigram entropy, by %.3f nats: %s.\n", verdict, unigram - bound,
      bound < unigram ? "it uses context" : "something is wrong"
    exit !(bound < unigram)
  }' "$DIR/unigram.txt"

step "Filling in gaps"
python tools/generate.py --load "$DIR/checkpoints" --infill --steps 8 --temperature 0.7 --remasking random --seed 1 \
  --prompt 'The [MASK:2] of the [MASK:2] is a [MASK:2].' \
  --prompt 'If the object does not define [MASK:3], a [MASK:2] exception is raised.' \
  --prompt 'object.__[MASK:1]__(self[MASK:1] other[MASK:1]' 2>/dev/null
echo
echo "Minutes of training teach frequent pieces, not sense: README.md says how to go on. All files are in $DIR."
