"""Conversion holds a tensor or so, not a model: 3 GB go through both ways within 1.5 GB of memory."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_dllm.models import get_family
from megatron_dllm.models.hf import Folder, FolderWriter
from tests.hf_models import write_tokenizer

ROOT = Path(__file__).parents[2]
CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=2048,
    num_hidden_layers=20,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=8192,
    vocab_size=64_000,
    rms_norm_eps=1e-5,
    max_position_embeddings=2048,
    mask_token_id=2,
)
LIMIT = 1.5e9
# The tool, and then the peak of its resident memory (a child's ru_maxrss would count its parent's).
MEASURED = """
import atexit, runpy, sys
atexit.register(lambda: print(*(x for x in open("/proc/self/status") if x.startswith("VmHWM"))))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_folder(path: Path, shard_bytes: int) -> None:
    args = Namespace(**get_family("llama").read(CONFIG))
    shapes = get_family("llama").mapping(args).hf
    writer = FolderWriter(str(path), {key: (shape, torch.bfloat16) for key, shape in shapes.items()}, shard_bytes)
    writer.start()
    for number, (key, shape) in enumerate(shapes.items()):
        for start in range(0, shape[0], 1024):
            rows = min(1024, shape[0] - start)
            generator = torch.Generator().manual_seed(number * 100 + start)
            writer.write(key, start, torch.randn(rows, *shape[1:], generator=generator).mul_(0.02).bfloat16())
    writer.close()
    writer.finish()
    write_tokenizer(str(path), CONFIG["vocab_size"])
    (path / "config.json").write_text(json.dumps(CONFIG))


def convert(*argv) -> float:
    """Run the tool; bytes of memory at its peak."""
    command = [sys.executable, "-c", MEASURED, ROOT / "tools/convert_checkpoint.py", *argv]
    start = time.perf_counter()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) * 1024
    print(f"{argv[0]}: {peak / 1e9:.2f} GB at the peak, {time.perf_counter() - start:.0f} s")
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("shard", (10**9, 10**11), ids=("shards", "one file"))
def test_peak_of_memory(tmp_path, shard):
    try:
        write_folder(tmp_path / "hf", shard)
        source = Folder(str(tmp_path / "hf"))
        size = sum(os.path.getsize(path) for path in (tmp_path / "hf").glob("*.safetensors"))
        assert size > 3e9
        assert convert("import", "--hf-model", tmp_path / "hf", "--save", tmp_path / "run") < LIMIT
        assert convert(
            "export", "--load", tmp_path / "run", "--save", tmp_path / "back", "--max-shard-size", f"{shard}B"
        ) < LIMIT
        back = Folder(str(tmp_path / "back"))
        assert back.shapes == source.shapes
        for key, shape in source.shapes.items():
            assert torch.equal(back.read(key, 0, shape[0]), source.read(key, 0, shape[0])), key
    finally:
        shutil.rmtree(tmp_path)
