"""Models of Hugging Face folders in this very process, loaded by the training program's own path."""

import contextlib
import sys

import torch

from megatron_dllm.arguments import read_command_line
from megatron_dllm.modes import MODES
from megatron_dllm.modes.base import NUM_ATTRIBUTES, POSITION

B, Q = 2, 24
RULES = {
    "full": lambda q, k: torch.ones_like(q[..., POSITION] == k[..., POSITION]),
    "causal": lambda q, k: q[..., POSITION] >= k[..., POSITION],
    "block-causal": lambda q, k: q[..., POSITION] // 5 >= k[..., POSITION] // 5,
}


@contextlib.contextmanager
def command(*argv):
    """The arguments of a training command as Megatron's global ones."""
    from megatron.training import global_vars

    before = sys.argv
    sys.argv = [
        "pretrain_dllm.py",
        *"--seq-length 32 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --sft-data-path none.jsonl".split(),
        *argv,
    ]
    try:
        args, _ = read_command_line()
        global_vars.set_args(args)
        yield args
    finally:
        sys.argv = before
        global_vars.unset_global_variables()


def build(path, *argv, rule=None):
    from megatron_dllm.training import model_provider

    mode = MODES["mdlm"]
    visible = mode.visible
    with command("--dllm-mode", "mdlm", "--hf-model", path, "--init-from-hf", *argv):
        try:
            mode.visible = rule or visible
            return model_provider().eval()
        finally:
            mode.visible = visible


def inputs():
    tokens = torch.randint(4, 90, (B, Q), generator=torch.Generator().manual_seed(3))
    attributes = torch.zeros(B, Q, NUM_ATTRIBUTES, dtype=torch.int32)
    attributes[..., POSITION] = torch.arange(Q)
    return tokens, torch.arange(Q).expand(B, Q), attributes


def oracle(model, tokens, rule):
    _, _, attributes = inputs()
    allowed = rule(attributes[:, :, None], attributes[:, None])
    mask = torch.zeros(B, 1, Q, Q).masked_fill(~allowed[:, None], torch.finfo(torch.float32).min)
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
