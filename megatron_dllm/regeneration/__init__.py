"""Answers of a target model to the prompts of chat data, asked of an OpenAI-compatible server.

A draft model learns what its target would say, so the data's own answers are replaced by the target's
(`tools/regenerate.py`, docs/regenerate.md).

    source        the input: checked conversations, their other columns, what a run must agree on
    conversations which turns are asked for; messages in one form
    client        one request and its faults: what is retried, what is the sample's fault, what ends the run
    manifest      what decides the content of an output folder
    shards        journals of what has been answered, and the parquet files that are made of them
    command       flags, the loop, progress
"""
