"""Model-parallel training of diffusion language models on Megatron-Core.

Importing this package on a machine without a GPU installs the CPU backend (`megatron_dllm.cpu`), which has
to happen before anything imports `megatron`. With a GPU nothing of it is imported.
"""

import warnings

import torch

# Megatron imports ModelOpt wherever that is installed, which says this in every process of every tool
for _message in ("transformers .* is not tested with current version of modelopt", "`torch.jit.script` is deprecated"):
    warnings.filterwarnings("ignore", message=_message)

if not torch.cuda.is_available():
    from megatron_dllm import cpu

    cpu.install()

__version__ = "0.1.0"
