"""What keeps a long run going, or says why it does not (docs/long_runs.md)."""
