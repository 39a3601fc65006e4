"""The frozen target of a draft, by where it comes from: Megatron's layers, transformers' own class, files on disk."""
