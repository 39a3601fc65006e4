#!/usr/bin/env bash
# Lints and tests everything: bash tests/run.sh [pytest arguments]
# Makes .venv if it is missing. Default: all but the slow tests (`bash tests/run.sh -m slow` runs those), those with a
# released model (`-m real`; README.md says what they need), those with lm-eval (`-m eval`; docs/evaluation.md) or ModelOpt
# (`-m quantize`; docs/quantization.md) and those with Transformer Engine (tests/te/run.sh) or SLURM (tests/slurm/run.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/environment.sh
use_environment test

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
ruff check .
shopt -s globstar
shellcheck -x .ci/run {examples,tests}/**/*.sh examples/**/*.sbatch
hadolint --no-color Dockerfile
run=(python -m pytest -m "not slow and not real and not eval and not quantize and not te and not slurm")
[ $# -eq 0 ] || exec "${run[@]}" "$@"

# As many at once as there are processors; one process takes a whole file, and tests/parallel, which takes longest, comes
# first. Every process of these may start four more.
processors="$(env -u OMP_NUM_THREADS nproc)"
exec "${run[@]}" -n $((processors < 8 ? processors : 8)) --dist loadfile --no-loadscope-reorder
