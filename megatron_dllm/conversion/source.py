"""A Hugging Face folder as the source of Megatron weights: checked as a whole, then read slice by slice."""

import copy
import math
from argparse import Namespace

import torch

from megatron_dllm.models import get_family, recognise
from megatron_dllm.models.family import Family
from megatron_dllm.models.hf import Folder, read_config
from megatron_dllm.models.init import draw_rows, global_name, held
from megatron_dllm.models.weights import ADAPTER, STORED_BUFFERS, VOCABULARY, local_name

# Buffers that old checkpoints carry and that follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq",)
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def family_of(config: dict, name: str = "auto") -> Family:
    """The named family, or the one that a config.json belongs to. Raises ValueError."""
    return recognise(config) if name == "auto" else get_family(name)


def check_source(args: Namespace) -> None:
    """Look at the folder that a run begins from, before anything is built. Raises ValueError."""
    source = Source(args.hf_model, get_family(args.dllm_family), args)
    if args.vocab_size < source.args.vocab_size:
        raise ValueError(
            f"--vocab-size {args.vocab_size} is smaller than the {source.args.vocab_size} rows of {args.hf_model}: "
            "leave it out, or raise it for new tokens."
        )


class Source:
    """The weights of a folder under Megatron's names.

    args: the architecture (of `family.read`). Raises ValueError (one sentence) naming a key that is missing, left over
    or of another shape, before any weight is read.
    """

    def __init__(self, path: str, family: Family, args: Namespace):
        self.folder = Folder(path)
        self.family = family
        self.args = copy.copy(args)
        self.args.vocab_size = family.read(read_config(path))["vocab_size"]  # the run may have raised it
        self.mapping = family.mapping(self.args, self.folder.shapes)
        self._check()

    def _check(self) -> None:
        expected, found = self.mapping.hf, self.folder.shapes
        path, family = self.folder.path, self.family.name
        if missing := [key for key in expected if key not in found]:
            raise ValueError(f"{path} lacks {missing[0]} ({len(missing)} missing), which a {family} model has.")
        ignored = lambda key: key.endswith(_DERIVED) or key.startswith(self.family.carried)
        extra = [key for key in found if key not in expected and not ignored(key)]
        if not self.args.untie_embeddings_and_output_weights:
            extra = [key for key in extra if not self._is_tied_copy(key)]
        if extra:
            raise ValueError(f"{path} has {extra[0]} ({len(extra)} left over), which a {family} model does not have.")
        for key, shape in expected.items():
            if found[key] != shape:
                raise ValueError(f"{key} in {path} is {list(found[key])}, but config.json makes it {list(shape)}.")
        for name, (_, rows) in self.mapping.megatron.items():
            if len(kinds := {self.folder.dtypes[piece.key] for piece in rows}) > 1:
                both = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
                raise ValueError(f"{path} stores the parts of {name} in {both}: save it in one precision.")

    def _is_tied_copy(self, key: str) -> bool:
        """Some tied folders store the head all the same: fine if it is the embedding."""
        untied = copy.copy(self.args)
        untied.untie_embeddings_and_output_weights = True
        mapping = self.family.mapping(untied)
        if [piece.key for piece in mapping.megatron[HEAD][1]] != [key]:
            return False
        embedding = mapping.megatron[EMBEDDING][1][0].key
        rows = self.args.vocab_size
        if self.folder.shapes[key] != self.folder.shapes[embedding]:
            return False
        for start in range(0, rows, 8192):
            stop = min(rows, start + 8192)
            if not torch.equal(self.folder.read(key, start, stop), self.folder.read(embedding, start, stop)):
                raise ValueError(
                    f"{key} differs from {embedding}, but config.json ties them (tie_word_embeddings): correct one."
                )
        return True

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        return sum(math.prod(shape) * self.dtype(name).itemsize for name, (shape, _) in self.mapping.megatron.items())

    def dtype(self, name: str) -> torch.dtype:
        return self.folder.dtypes[self.mapping.megatron[name][1][0].key]

    def read(self, name: str, start: int, stop: int, columns: slice = slice(None)) -> torch.Tensor:
        """Rows start..stop of a whole Megatron tensor (local name), and some of its columns; rows beyond the folder's
        vocabulary are zero."""
        pieces = self.mapping.slices(name, start, stop)
        shape = self.mapping.megatron[name][0][1:]
        if len(pieces) == 1 and pieces[0][0] == 0 and pieces[0][1].stop - pieces[0][1].start == stop - start:
            rows = pieces[0][1]
            return self.folder.read(rows.key, rows.start, rows.stop, columns, rows.index)
        width = () if not shape else (len(range(*columns.indices(shape[0]))),)
        out = torch.zeros(stop - start, *width, dtype=self.dtype(name))
        for first, rows in pieces:
            out[first : first + rows.stop - rows.start] = self.folder.read(
                rows.key, rows.start, rows.stop, columns, rows.index
            )
        return out


def load_into(model: torch.nn.Module, source: Source, seed: int) -> None:
    """Fill this rank's part of a model but adapters, reading only what it holds. Vocabulary rows that the folder lacks
    are drawn (see models/init.py); padding rows are zero."""
    weights = dict(model.named_parameters())
    weights |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(STORED_BUFFERS)}
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith(ADAPTER):
                continue
            full = local_name(global_name(model, name))
            runs, columns = held(model, name, weight)
            row = 0
            for run in runs:
                rows = weight[row : row + len(run)]
                rows.copy_(source.read(full, run.start, run.stop, columns))
                row += len(run)
            if full in VOCABULARY and model.true_vocab_size > source.args.vocab_size:
                draw_rows(model, name, weight, seed, source.args.vocab_size, model.true_vocab_size)
