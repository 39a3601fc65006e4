"""How a family's weights lie in Megatron's, declared once and read in both directions.

Whatever a family does to its weights (split or fused query/key/value, gate and up projection, experts one by one or in
one tensor) is a permutation of rows. So a Megatron tensor is a list of `Rows`: pieces of Hugging Face tensors, one
below the other. Reading a tensor-parallel slice, checking a folder's keys and shapes, and writing one all follow from
these lists.

A table maps Megatron's names, with {layer} and {expert} for the numbers, to rules:

    "name"                    the rows of one tensor, as they are
    Stacked("gate", "up")     one tensor below the other
    Interleaved(q, k, v)      Megatron's linear_qkv: for each key/value group its query heads, its key, its value
                              (no value in layers that share it with the key)
    InterleavedFused("qkv")   the same, from one tensor that holds [all queries | all keys | all values]
    ExpertSlice("name")             in place of a "name": that expert's slice of a tensor with experts in dimension 0

Megatron's names are those of its local layers; `local_name` translates those of Transformer Engine's.
"""

import re
from dataclasses import dataclass

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
GEMMA = "diffusion_gemma"  # of --dllm-architecture
ADAPTER = (".lora_A", ".lora_B")  # ends of the names of what models/lora.py adds
STORED_BUFFERS = ("router.expert_bias", "layer_scalar")  # weights that no optimizer trains: ends of their names


@dataclass(frozen=True)
class Rows:
    """Rows start..stop of the Hugging Face tensor `key`, or of its slice `key[index]`."""

    key: str
    start: int
    stop: int
    index: int | None = None


@dataclass(frozen=True)
class ExpertSlice:
    """An expert's slice of a tensor that holds all experts."""

    name: str


@dataclass(frozen=True)
class Stacked:
    """One tensor's rows below another's."""

    first: str | ExpertSlice
    second: str | ExpertSlice


@dataclass(frozen=True)
class Interleaved:
    """For each key/value group its query heads, its key, its value, from three tensors."""

    query: str
    key: str
    value: str


@dataclass(frozen=True)
class InterleavedFused:
    """The same from one tensor, [all queries | all keys | all values]."""

    name: str


Rule = str | ExpertSlice | Stacked | Interleaved | InterleavedFused
Table = dict[str, Rule]


def megatron_shapes(args) -> dict[str, tuple[int, ...]]:
    """Every weight of the model that `args` describe, whole, with the true vocabulary."""
    h, heads = args.hidden_size, args.num_attention_heads
    fc1 = lambda width: ((2 if args.swiglu else 1) * width, h)
    targets = target_layers(args)
    if targets is None:
        shapes = {"embedding.word_embeddings.weight": (args.vocab_size, h)}
    else:
        shapes = {"fc.weight": (h, len(targets) * h), "hidden_norm.weight": (h,)}
    for layer, sparse in enumerate(expert_layers(args)):
        block = f"decoder.layers.{layer}."
        attention, mlp = block + "self_attention.", block + "mlp."
        shapes[block + "input_layernorm.weight"] = (h,)
        groups, d, shared = attention_shape(args, layer)
        shapes[attention + "linear_qkv.weight"] = ((heads + (1 if shared else 2) * groups) * d, h)
        if args.add_qkv_bias:
            shapes[attention + "linear_qkv.bias"] = ((heads + 2 * groups) * d,)
        if args.qk_layernorm:
            shapes[attention + "q_layernorm.weight"] = shapes[attention + "k_layernorm.weight"] = (d,)
        shapes[attention + "linear_proj.weight"] = (h, heads * d)
        shapes[block + "pre_mlp_layernorm.weight"] = (h,)
        gemma = is_gemma(args)
        if not sparse or gemma:
            shapes[mlp + "linear_fc1.weight"], shapes[mlp + "linear_fc2.weight"] = (
                fc1(args.ffn_hidden_size),
                (h, args.ffn_hidden_size),
            )
        if gemma:  # experts beside the dense MLP
            mlp = block + "moe."
            for name in "post_self_attn post_mlp post_dense pre_moe post_moe".split():
                shapes[f"{block}{name}_layernorm.weight"] = (h,)
            shapes[block + "layer_scalar"] = shapes[block + "encoder_layer_scalar"] = (1,)
            shapes[mlp + "router.scale"], shapes[mlp + "router.per_expert_scale"] = (h,), (args.num_experts,)
        if not sparse:
            continue
        shapes[mlp + "router.weight"] = (args.num_experts, h)
        if args.moe_router_enable_expert_bias:
            shapes[mlp + "router.expert_bias"] = (args.num_experts,)
        if args.moe_shared_expert_intermediate_size:
            width = args.moe_shared_expert_intermediate_size
            shapes[mlp + "shared_experts.linear_fc1.weight"] = fc1(width)
            shapes[mlp + "shared_experts.linear_fc2.weight"] = (h, width)
        width = args.moe_ffn_hidden_size or args.ffn_hidden_size
        for expert in range(args.num_experts):
            shapes[mlp + f"experts.local_experts.{expert}.linear_fc1.weight"] = fc1(width)
            shapes[mlp + f"experts.local_experts.{expert}.linear_fc2.weight"] = (h, width)
    shapes["decoder.final_layernorm.weight"] = (h,)
    if is_gemma(args):
        part = "self_conditioning."
        shapes[part + "pre_norm.weight"] = (h,)
        shapes[part + "mlp.linear_fc1.weight"] = fc1(args.ffn_hidden_size)
        shapes[part + "mlp.linear_fc2.weight"] = (h, args.ffn_hidden_size)
    if targets is None and args.untie_embeddings_and_output_weights:
        shapes["output_layer.weight"] = (args.vocab_size, h)
    return shapes


def is_gemma(args) -> bool:
    """Whether the network is that of gemma_layers.py rather than Megatron's usual one."""
    return getattr(args, "dllm_architecture", None) == GEMMA


def attention_shape(args, layer: int) -> tuple[int, int, bool]:
    """Key/value heads of a layer, counted from 0, their size, and whether a value is the key's projection."""
    if is_gemma(args) and layer in args.dllm_full_attention_layers:
        return args.dllm_full_query_groups, args.dllm_full_kv_channels, True
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return groups, args.kv_channels, False


def expert_layers(args) -> list[bool]:
    """Of each layer, whether its MLP is a mixture of experts (Megatron's --moe-layer-freq)."""
    frequency = args.moe_layer_freq
    if args.num_experts is None:
        return [False] * args.num_layers
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(args.num_layers)]
    return [bool(x) for x in frequency]


def target_layers(args) -> list[int] | None:
    """Layers of its target that a draft reads, instead of having an embedding and a head; None: a whole model."""
    return getattr(args, "dflash_target_layers", None)


def local_name(name: str) -> str:
    """The local layers' name of a weight of Transformer Engine's, whose linear layers hold the norm before them and
    whose grouped experts number their weights."""
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    return re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", name)


class Mapping:
    """A table applied to one model: the weights of both sides, and where each one's rows are on the other.

    megatron:  name -> (shape, its Rows in order)
    hf:        key -> shape
    Raises ValueError if the model has a weight that the table does not know.
    """

    def __init__(self, table: Table, args):
        self._args = args
        self._experts = args.num_experts
        self.megatron: dict[str, tuple[tuple[int, ...], list[Rows]]] = {}
        self.hf: dict[str, tuple[int, ...]] = {}
        for name, shape in megatron_shapes(args).items():
            numbers = {}
            pattern = name
            for what, regex in (("layer", r"(?<=layers\.)\d+"), ("expert", r"(?<=local_experts\.)\d+")):
                if found := re.search(regex, pattern):
                    numbers[what] = int(found.group())
                    pattern = re.sub(regex, f"{{{what}}}", pattern, count=1)
            if pattern not in table:
                raise ValueError(f"this family has no place for the weight {name}.")
            rows = self._rows(table[pattern], shape[0], numbers)
            self.megatron[name] = (shape, rows)
            for piece in rows:
                self._note(piece, shape[1:])
        self.places = self._inverse()

    def _rows(self, rule: Rule, count: int, numbers: dict[str, int]) -> list[Rows]:
        def piece(tensor: str | ExpertSlice, start: int, stop: int) -> Rows:
            if isinstance(tensor, ExpertSlice):
                return Rows(tensor.name.format(**numbers), start, stop, numbers["expert"])
            return Rows(tensor.format(**numbers), start, stop)

        if isinstance(rule, (str, ExpertSlice)):
            return [piece(rule, 0, count)]
        if isinstance(rule, Stacked):
            return [piece(tensor, 0, count // 2) for tensor in (rule.first, rule.second)]
        heads = self._args.num_attention_heads
        groups, d, shared = attention_shape(self._args, numbers["layer"])
        share = heads // groups * d
        rows = []
        for g in range(groups):
            if isinstance(rule, Interleaved):
                rows += [
                    piece(rule.query, g * share, (g + 1) * share),
                    piece(rule.key, g * d, (g + 1) * d),
                ]
                if not shared:
                    rows.append(piece(rule.value, g * d, (g + 1) * d))
            else:
                keys = heads * d + g * d
                values = keys + groups * d
                rows += [
                    piece(rule.name, g * share, (g + 1) * share),
                    piece(rule.name, keys, keys + d),
                    piece(rule.name, values, values + d),
                ]
        return rows

    def _note(self, piece: Rows, columns: tuple[int, ...]) -> None:
        known = self.hf.get(piece.key)
        rows = max(piece.stop, known[-1 - len(columns)] if known else 0)
        experts = () if piece.index is None else (self._experts,)
        self.hf[piece.key] = (*experts, rows, *columns)

    def _inverse(self) -> dict[str, list[tuple[str, int, Rows]]]:
        """key -> [(Megatron name, first row there, the rows)]"""
        places: dict[str, list] = {key: [] for key in self.hf}
        for name, (_, rows) in self.megatron.items():
            row = 0
            for piece in rows:
                places[piece.key].append((name, row, piece))
                row += piece.stop - piece.start
        return places

    def slices(self, name: str, start: int, stop: int) -> list[tuple[int, Rows]]:
        """Rows start..stop of a Megatron tensor: [(first row, counted from `start`, the Hugging Face rows)].

        Rows beyond the true vocabulary are left out."""
        found, row = [], 0
        for piece in self.megatron[name][1]:
            length = piece.stop - piece.start
            first, last = max(start, row), min(stop, row + length)
            if first < last:
                rows = Rows(piece.key, piece.start + first - row, piece.start + last - row, piece.index)
                found.append((first - start, rows))
            row += length
        return found
