"""tools/generate.py as a user runs it, on a toy for a network: checkpoint, network and process group are stand-ins."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_dllm import generation
from megatron_dllm.data.tokenizer import ByteLevel
from megatron_dllm.generation import load

TOOL = Path(__file__).parents[2] / "tools/generate.py"
BYTES = ByteLevel()
RUN = dict(
    dllm_mode="mdlm",
    dllm_mask_token_id=BYTES.mask_id,
    dllm_block_size=4,
    dllm_block_origin="sequence",
    ar_loss_weight=1.0,
    max_position_embeddings=4096,
    vocab_size=BYTES.vocab_size,
    context_parallel_size=1,
    sequence_parallel=False,
    virtual_pipeline_model_parallel_size=None,
    sft_data_path=None,
    scdd_peak_time=0.5,
    scdd_gamma_shape=1.0,
    scdd_max_ratio=0.2,
    block_diffusion_self_conditioning=0.0,
)


class Letters:
    """A letter for each place, more or less sure; a euro sign is three tokens. Changes its mind if it is `restless`."""

    def __init__(self, restless=False, eos_at=None):
        self.calls, self.restless, self.eos_at = 0, restless, eos_at

    def __call__(self, passes, cache):
        self.calls += 1
        return [self.logits(one.positions[one.wanted]) for one in passes]

    def logits(self, places):
        text = "€uro ".encode() * 1000
        ids = torch.tensor([text[(place + (self.calls // 3 if self.restless else 0)) % len(text)] for place in places])
        ids[places == self.eos_at] = BYTES.eos_id
        logits = torch.zeros(len(places), BYTES.vocab_size)
        logits[torch.arange(len(places)), ids] = 6 + 3 * torch.sin(places * 1.7 + self.calls)
        return logits


@pytest.fixture
def tool(monkeypatch, capsys):
    """Runs the tool: (exit code, stdout, stderr). Flags may be words of a text; `args`: of the run that trained it."""
    spec = importlib.util.spec_from_file_location("generate_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*argv, network=None, terminal=False, **args):
        args = Namespace(**RUN | args)
        network = network or Letters()
        run.planned, run.built = [], []
        plan = lambda path, **options: run.planned.append((path, options)) or Namespace(args=args, tokenizer=BYTES)
        build = lambda planned: run.built.append(planned) or Namespace(model=torch.nn.Identity())
        monkeypatch.setattr(load, "plan", plan)
        monkeypatch.setattr(load, "build", build)
        monkeypatch.setattr(generation, "get_args", lambda: args)
        monkeypatch.setattr(generation, "Network", lambda *unused: network)
        monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, argv)])
        code = 0
        try:
            module.main()
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    run.module = module
    return run
