"""Samples: where they come from, in which order, and how they are padded into a batch."""
