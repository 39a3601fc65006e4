"""Weights between Hugging Face folders, Megatron checkpoints and running models, without holding a model twice."""
