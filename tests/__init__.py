import megatron_dllm  # noqa: F401  (installs the CPU backend, before any test imports megatron)
