# NVIDIA's PyTorch image (PyTorch, CUDA, NCCL, Transformer Engine) with megatron_dllm in /opt/megatron_dllm.
#
#   docker build -t megatron_dllm .
#   docker run --rm -it --gpus all --ipc host --ulimit memlock=-1 -v "$PWD/data:/opt/megatron_dllm/data" megatron_dllm
#
# docs/slurm.md says how SLURM runs it. The steps are tested without Docker: bash tests/run.sh -m slow -k dockerfile
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.01-py3
FROM ${FROM_IMAGE_NAME}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The image pins what it ships with PIP_CONSTRAINT, which also refuses newer versions of what we need. Only its
# PyTorch and Transformer Engine, which are built for each other, must stay: those versions are the constraint.
ENV PIP_CONSTRAINT=""
RUN python3 -m pip list --format freeze | grep -iE '^(torch|transformer[-_]engine)==' > /etc/megatron_dllm_keep.txt

# Ubuntu packages venv apart from Python, of which the image has the distribution's: another version would not fit.
# hadolint ignore=DL3008
RUN python3 -c 'import ensurepip, venv' \
    || { apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*; }

WORKDIR /opt/megatron_dllm
COPY . .

# An environment on top of the image's packages, the one that quickstart.sh and tests/run.sh look for.
RUN . examples/environment.sh \
    && VENV_OPTIONS=--system-site-packages PIP_OPTIONS="--no-cache-dir -c /etc/megatron_dllm_keep.txt" \
       use_environment test
ENV VIRTUAL_ENV=/opt/megatron_dllm/.venv \
    PATH=/opt/megatron_dllm/.venv/bin:${PATH}
