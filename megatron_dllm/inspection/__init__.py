"""Looks at single samples as the network sees them; tools/inspect_batch.py is its command."""
