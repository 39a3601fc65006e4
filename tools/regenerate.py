"""Replaces the answers of chat data by those of a target model, asked of an OpenAI-compatible server.

    python tools/regenerate.py --input-data chat.jsonl --output-dir data/regenerated --model target \\
        --target-server http://localhost:30000/v1 --concurrency 64

A draft model is trained on what its target would say. Writes parquet shards with the columns index (row of the input),
messages, original_messages, and the input's others. May be killed at any moment: --resume goes on. Answers that are cut
off or empty, and conversations that the server refuses, are left out and listed in shard-000000.json and so on. An API
key is read from the environment. docs/regenerate.md tells the rest.
"""

import sys

from megatron_dllm.regeneration.command import main

if __name__ == "__main__":
    sys.exit(main(description=__doc__))
