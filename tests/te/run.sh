#!/usr/bin/env bash
# Tests with Transformer Engine, on a machine without a GPU too: bash tests/te/run.sh [pytest arguments]
#
# Makes .venv-te and builds Transformer Engine's PyTorch extension in it, once: about 15 minutes on two cores, 7 GB of
# disk, and 4 GB of memory for each of MAX_JOBS compilers (default 2). It needs a C++ compiler and nvcc under CUDA_HOME
# (default /usr/local/cuda), whose version is asked for but which compiles nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/environment.sh

TRANSFORMER_ENGINE=2.20.2
export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" MAX_JOBS="${MAX_JOBS:-2}"
if [ ! -x "$CUDA_HOME/bin/nvcc" ]; then
  echo "There is no nvcc under CUDA_HOME=$CUDA_HOME: install the CUDA toolkit, or set CUDA_HOME to where it is." >&2
  exit 1
fi
VENV="${VENV:-.venv-te}"
use_environment test

if [ "$(cat "$VENV/.transformer-engine" 2>/dev/null)" != "$TRANSFORMER_ENGINE" ]; then
  echo "Building Transformer Engine $TRANSFORMER_ENGINE (about 15 minutes, once)"
  # PyTorch's wheels bring CUDA's libraries; these two parts of the toolkit are headers that the compiler wants besides
  toolkit="$(python -c 'from importlib.metadata import version; print(version("cuda-toolkit"))')"
  pip install -q "cuda-toolkit[crt,cccl]==$toolkit" "nvidia-cudnn-frontend>=1.29" pybind11 ninja wheel pydantic
  # headers from the nvidia-* wheels; compiled here rather than looked for among released builds
  NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
    pip install -q --no-build-isolation "transformer-engine[pytorch]==$TRANSFORMER_ENGINE"
  echo "$TRANSFORMER_ENGINE" >"$VENV/.transformer-engine"
fi

export OMP_NUM_THREADS=1
exec python -m pytest tests/te "$@"
