# shellcheck shell=bash
# Sourced by the batch scripts: `srun "${STEP[@]}" COMMAND` runs a command once per task, each with a log of its own.
#
# VENV              the environment to run in, default .venv (examples/environment.sh makes it)
# CONTAINER         an image to run in instead, for clusters with pyxis and enroot (the Dockerfile makes it)
# CONTAINER_MOUNTS  what the container sees besides the repository: "/data:/data,/models:/models"
# LOGS              folder of the logs, default logs/NAME-ID of the job

# One task of an array has the number of all of them.
JOB="$SLURM_JOB_ID"
[ "$JOB" != "${SLURM_ARRAY_JOB_ID:-}" ] || JOB="${JOB}_$SLURM_ARRAY_TASK_ID"
LOGS="${LOGS:-logs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}"
mkdir -p "$LOGS"
LOGS="$(realpath "$LOGS")"

# One rank that fails ends all; a requeued job goes on in the same files. srun gives each task its CPUs only if told so.
# The tasks get what is exported here, also in a job that was submitted with --export=NONE.
STEP=(
  --export=ALL --mpi=none --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"
  --output="$LOGS/rank-%4t.log" --open-mode=append
)
if [ -n "${CONTAINER:-}" ]; then
  STEP+=(--container-image="$CONTAINER" --container-workdir="$PWD"
    --container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
else
  VENV="$(realpath -m "${VENV:-.venv}")"
  if [ ! -x "$VENV/bin/python" ]; then
    echo "There is no environment in $VENV: make it on the login node (bash -c 'source examples/environment.sh;" \
      "use_environment'), or set VENV or CONTAINER." >&2
    exit 2
  fi
  export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
fi
# The code is this repository's, even if the environment or the image was made from another copy of it.
# shellcheck disable=SC2016
STEP+=(bash -c 'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"; exec "$@"' step)

# For tasks that are ranks: who they are, and where rank 0 is. HEAD_NODE: its address, if the node's name does not resolve.
export HEAD_NODE="${HEAD_NODE:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}" PYTHONUNBUFFERED=1
# shellcheck disable=SC2016,SC2034
AS_RANK='export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
  export LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-$SLURM_NTASKS}
  export MASTER_ADDR=$HEAD_NODE MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))'
# Without rank 0, the others would look for it for ever.
require_head_node() {
  getent hosts "$HEAD_NODE" >/dev/null && return
  echo "$HEAD_NODE, where the ranks are to meet, does not resolve: set HEAD_NODE to an address of the job's first node." >&2
  exit 2
}
echo "$(date '+%F %T') job $JOB on $SLURM_JOB_NODELIST, start ${SLURM_RESTART_COUNT:-0}: logs in $LOGS"
