"""Megatron's torch_dist checkpoints, read and written one tensor at a time.

Which file keys hold a parameter, and at which offsets, is Megatron's own answer: it is asked with a model whose tensors
have shapes and no memory (`pieces`). Writing goes through torch's checkpoint writer, which asks for one tensor after
the other; reading picks chunks out of what any layout has saved.
"""

import io
from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_dllm.models.init import global_name
from megatron_dllm.models.weights import VOCABULARY, local_name


class Piece:
    """Consecutive rows of a whole parameter (under its local name) as they lie in a checkpoint."""

    def __init__(self, name: str, start: int, sharded: ShardedTensor):
        self.name, self.start, self.rows = name, start, sharded.local_shape[0]
        self.key = sharded.key
        axes = sharded.prepend_axis_num  # layers of one kind are stacked
        self.offsets = tuple(sharded.global_offset)
        self.sizes = (1,) * axes + tuple(sharded.local_shape)
        self.shape = tuple(sharded.local_shape)
        self.global_shape = tuple(sharded.global_shape)


def pieces(model: torch.nn.Module, metadata: dict) -> tuple[list[Piece], dict[str, object]]:
    """Every weight of a whole model (one process, tensors on the meta device), and its state that is no tensor, by key.

    metadata: of the checkpoint's content.
    """
    owners = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        full = local_name(global_name(model, name))
        owners[tensor.untyped_storage()._cdata] = (full, tensor.stride(0))
    state = model.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    found, objects = [], {}
    for sharded in nested_values(state):
        if isinstance(sharded, ShardedObject):
            objects[sharded.unique_key] = sharded.data  # where Transformer Engine would keep its scales
            continue
        name, row = owners[sharded.data.untyped_storage()._cdata]
        found.append(Piece(name, sharded.data.storage_offset() // row, sharded))
    return found, objects


class _WritePlanner(dcp.DefaultSavePlanner):
    """Announces all tensors, and makes each when it is written."""

    def __init__(self, all_pieces: list[Piece], dtype: Callable, read: Callable, objects: dict[str, object]):
        super().__init__(flatten_state_dict=False)
        self._pieces = {MetadataIndex(piece.key, torch.Size(piece.offsets)): piece for piece in all_pieces}
        self._dtype, self._read, self._objects = dtype, read, objects

    def create_local_plan(self):
        items = []
        for index, piece in self._pieces.items():
            properties = TensorProperties(dtype=self._dtype(piece.name))
            chunk = ChunkStorageMetadata(offsets=index.offset, sizes=torch.Size(piece.sizes))
            data = dcp_planner.TensorWriteData(
                chunk=chunk, properties=properties, size=torch.Size(piece.global_shape)
            )
            items.append(dcp_planner.WriteItem(index=index, type=dcp_planner.WriteItemType.SHARD, tensor_data=data))
        for key in self._objects:
            items.append(dcp_planner.WriteItem(index=MetadataIndex(key), type=dcp_planner.WriteItemType.BYTE_IO))
        self.plan = dcp_planner.SavePlan(items)
        return self.plan

    def resolve_data(self, write_item):
        if write_item.type == dcp_planner.WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save([self._objects[write_item.index.fqn]], data)
            return data
        piece = self._pieces[write_item.index]
        return self._read(piece).view(piece.sizes)


def write(
    folder: str, all_pieces: list[Piece], objects: dict[str, object], dtype: Callable, read: Callable, common: dict
) -> None:
    """Write a checkpoint into an existing empty folder. dtype(name) and read(piece) say what each weight is; common:
    Megatron's state beside the model's (arguments, iteration, ...)."""
    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    planner = _WritePlanner(all_pieces, dtype, read, objects | {key: common})
    dcp.save({}, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)
    save_config(CheckpointingConfig("torch_dist", 1), folder)


class _ReadPlanner(dcp_planner.LoadPlanner):
    """Where what has been read goes: into one tensor. Torch's reader asks a planner for no more; the plan is ours."""

    def __init__(self, target: torch.Tensor):
        self._target = target

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        raise NotImplementedError

    def create_local_plan(self):
        raise NotImplementedError

    def create_global_plan(self, global_plan):
        raise NotImplementedError

    def finish_plan(self, central_plan):
        raise NotImplementedError

    def load_bytes(self, read_item, value):
        raise NotImplementedError

    def resolve_tensor(self, read_item):
        target = self._target
        for axis, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(axis, offset, length)
        return target

    def commit_tensor(self, read_item, tensor):
        pass


class Reader:
    """The weights of a checkpoint, in whatever layout it was saved. Raises ValueError if one is not there."""

    def __init__(self, folder: str, all_pieces: list[Piece]):
        self.folder = folder
        self._reader = dcp.FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = metadata.state_dict_metadata
        self._pieces: dict[str, list[Piece]] = {}
        for piece in all_pieces:
            stored = self._stored.get(piece.key)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"{folder} holds no {piece.key}: its arguments describe another model.")
            vocabulary = piece.name in VOCABULARY  # padded for the layout that saved it
            if tuple(stored.size)[vocabulary:] != piece.global_shape[vocabulary:]:
                raise ValueError(
                    f"{piece.key} in {folder} is {list(stored.size)}, but its arguments make it "
                    f"{list(piece.global_shape)}."
                )
            self._pieces.setdefault(piece.name, []).append(piece)
        keys = {piece.key for piece in all_pieces}
        foreign = ("optimizer.", "optimizer_state", "chained_", "rng_state", "rerun_state", "common_state")
        for key, stored in self._stored.items():
            if isinstance(stored, TensorStorageMetadata) and key not in keys and not key.startswith(foreign):
                raise ValueError(f"{folder} holds {key}, which is no weight of the model that its arguments describe.")

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[self._pieces[name][0].key].properties.dtype

    def read(self, name: str, rows: int) -> torch.Tensor:
        """The first `rows` rows of a whole parameter."""
        first = self._pieces[name][0]
        out = torch.empty(rows, *first.shape[1:], dtype=self.dtype(name))
        for piece in self._pieces[name]:
            stop = min(rows, piece.start + piece.rows)
            axes = len(piece.sizes) - len(piece.shape)
            sizes = (*piece.sizes[:axes], stop - piece.start, *piece.sizes[axes + 1 :])
            wanted = ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(sizes))
            items = create_read_items_for_chunk_list(piece.key, self._stored[piece.key], [wanted])
            covered = sum(torch.Size(item.lengths).numel() for item in items)
            if covered != wanted.sizes.numel():
                raise ValueError(f"{self.folder} holds only a part of {name}: load another checkpoint.")
            planner = _ReadPlanner(out[piece.start : stop].view(sizes))
            self._reader.read_data(dcp_planner.LoadPlan(items), planner)
        return out

