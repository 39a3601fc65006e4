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

# The multi-process tests wait for each other much of the time: they run beside the others, and are shown afterwards.
parallel="$(mktemp)"
trap 'rm -f "$parallel"; kill $(jobs -p) 2>/dev/null || true' EXIT
"${run[@]}" tests/parallel >"$parallel" 2>&1 &
failed=0
# The tests of one process come second: the others take longer, and leave processors idle. They are in the foreground,
# because in the background a shell ignores interrupts.
nice -n 10 "${run[@]}" --ignore=tests/parallel || failed=$?
wait $! || failed=$?
cat "$parallel"
exit "$failed"
