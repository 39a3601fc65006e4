"""What is in a checkpoint, read without Megatron."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def saved_tensors(iteration: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """Whole tensors of a torch_dist checkpoint by name, weights and optimizer state."""
    reader = dcp.FileSystemReader(iteration)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata) and wanted(name)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state
