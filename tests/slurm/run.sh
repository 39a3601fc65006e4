#!/usr/bin/env bash
# The batch scripts of examples/slurm on SLURM's own daemons on this machine: bash tests/slurm/run.sh [pytest arguments]
# As root on Debian or Ubuntu; installs slurm-wlm and munge if they are missing. Where that cannot be, it says so and
# ends well. Everything has a time limit.
set -euo pipefail
cd "$(dirname "$0")/../.."

skip() {
  echo "tests/slurm skipped: $1"
  exit 0
}
installed() {
  local program
  for program in munged slurmctld slurmd sbatch; do
    PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null || return 1
  done
}

[ "$(id -u)" = 0 ] || skip "SLURM's daemons need root."
if ! installed; then
  export DEBIAN_FRONTEND=noninteractive
  command -v apt-get >/dev/null || skip "SLURM is not installed, and there is no apt-get."
  { timeout 120 apt-get update && timeout 300 apt-get install -y --no-install-recommends slurm-wlm munge; } \
    >/dev/null 2>&1 || skip "apt-get could not install slurm-wlm and munge."
  installed || skip "slurm-wlm and munge are installed, but not all of SLURM's programs are there."
fi
source examples/environment.sh
use_environment test

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# A sandbox may forbid what daemons need (device nodes, a name for this machine, ports).
timeout 120 python -m tests.slurm.cluster >/dev/null 2>&1 || skip "its daemons do not start here: python -m tests.slurm.cluster"
# An interrupt lets the tests end their daemons and jobs.
exec timeout --foreground --signal=INT --kill-after=60 900 python -m pytest -m slurm tests/slurm "$@"
