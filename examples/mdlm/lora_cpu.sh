#!/usr/bin/env bash
# As sft_cpu.sh, but the quickstart's model stays as it is: adapters beside its layers learn (docs/lora.md).
set -euo pipefail
cd "$(dirname "$0")/../.."

export SAVE="${SAVE:-runs/lora/checkpoints}"
exec bash examples/mdlm/sft_cpu.sh --lora-rank 8 --lora-alpha 16 --lr 5e-3 --min-lr 5e-4 "$@"
