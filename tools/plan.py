"""Say what a training run would cost before it is run.

    python tools/plan.py --dllm-mode mdlm --model-preset llada-8b --seq-length 4096 --gpus 64

Memory of every rank by part, floating-point operations of a data token, the layouts that fit, how long a step takes by
a roofline, and the command to run. Needs neither GPUs nor weights. docs/scaling.md explains what it counts.
"""

import sys

import megatron_dllm  # noqa: F401  (before any megatron)
from megatron_dllm.arguments import fail
from megatron_dllm.planning.command import plan_command

if __name__ == "__main__":
    try:
        print(plan_command(sys.argv[1:]))
    except (ValueError, OSError) as error:
        fail(error)
