"""How a run is laid out over ranks, read off its checked arguments."""

from argparse import Namespace
from dataclasses import dataclass

import torch

from megatron_dllm.planning.network import Layer, Network


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups of ranks, and what else decides what a rank holds.

    virtual: model chunks of a pipeline rank; expert_data: ranks that hold the same experts; microbatches: of a step, on
    one data-parallel rank; element: bytes of a weight; on_gpu: Flex attention and fused norms, not the CPU's.
    recompute: "" (nothing), "full", or "selective" with `modules`; group: layers recomputed together; recomputed:
    layers of a chunk that are recomputed (None: all).
    """

    tensor: int
    sequence_parallel: bool
    pipeline: int
    virtual: int
    context: int
    gathers: bool
    expert: int
    expert_tensor: int
    data: int
    expert_data: int
    micro_batch: int
    microbatches: int
    element: int
    recompute: str
    modules: frozenset[str]
    group: int
    recomputed: int | None
    distributed_optimizer: bool
    on_gpu: bool

    @classmethod
    def of(cls, args: Namespace, on_gpu: bool) -> "Layout":
        tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
        data = args.world_size // (tp * pp * cp)
        ep = args.expert_model_parallel_size
        etp = args.expert_tensor_parallel_size or tp
        selective = args.recompute_granularity == "selective"
        return cls(
            tensor=tp,
            sequence_parallel=bool(args.sequence_parallel),
            pipeline=pp,
            virtual=args.virtual_pipeline_model_parallel_size or 1,
            context=cp,
            gathers="all_gather" in args.cp_comm_type,
            expert=ep,
            expert_tensor=etp,
            data=data,
            expert_data=max(1, args.world_size // (etp * ep * pp)),
            micro_batch=args.micro_batch_size,
            microbatches=args.global_batch_size // (args.micro_batch_size * data),
            element=torch.empty(0, dtype=args.params_dtype).element_size(),
            recompute=args.recompute_granularity or "",
            modules=frozenset(args.recompute_modules or ["core_attn"]) if selective else frozenset(),
            group=args.recompute_num_layers if args.recompute_method == "uniform" else 1,
            recomputed=args.recompute_num_layers if args.recompute_method == "block" else None,
            distributed_optimizer=bool(args.use_distributed_optimizer),
            on_gpu=on_gpu,
        )

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def shards(self) -> int:
        """Ranks that share out an activation between layers."""
        return self.tensor if self.sequence_parallel else 1


def check_plannable(args: Namespace) -> None:
    """ValueError (one sentence) for flags whose memory or time is not known here."""
    for dest, why in {
        "pipeline_model_parallel_layout": "give stages by --decoder-first-pipeline-num-layers and -last- instead",
        "use_megatron_fsdp": "plan it with --use-distributed-optimizer",
        "use_torch_fsdp2": "plan it with --use-distributed-optimizer",
        "cpu_offloading": "activations on the host are not counted",
        "distribute_saved_activations": "use --sequence-parallel",
    }.items():
        if getattr(args, dest, None):
            raise ValueError(f"--{dest.replace('_', '-')} cannot be planned: {why}.")
    if args.optimizer not in ("adam", "sgd"):
        raise ValueError(f"--optimizer {args.optimizer} cannot be planned: its state is known for adam and sgd only.")


def stages(network: Network, args: Namespace, layout: Layout) -> list[list[list[Layer]]]:
    """[stage][chunk] -> layers, as Megatron's get_num_layers_to_build and get_transformer_layer_offset divide them."""
    pp, v, L = layout.pipeline, layout.virtual, len(network.layers)
    counts = [0] * pp
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if pp == 1:
        counts = [L]
    elif first is not None or last is not None:
        fixed = {place: count for place, count in ((0, first), (pp - 1, last)) if count is not None}
        rest = (L - sum(fixed.values())) // max(1, pp - len(fixed))
        counts = [fixed.get(stage, rest) for stage in range(pp)]
    else:
        extra = [bool(args.account_for_embedding_in_pipeline_split), bool(args.account_for_loss_in_pipeline_split)]
        counts = [(L + sum(extra)) // pp] * pp
        counts[0] -= extra[0]
        counts[-1] -= extra[1]
    result: list[list[list[Layer]]] = [[] for _ in range(pp)]
    place = 0
    for _chunk in range(v):
        for stage in range(pp):
            size = counts[stage] // v
            result[stage].append(list(network.layers[place : place + size]))
            place += size
    return result


def in_flight(layout: Layout, stage: int) -> int:
    """Chunks of the model (virtual ones) whose activations a stage holds at once, in Megatron's schedules: without
    virtual stages as many micro-batches as stages from here on; interleaved, the warm-up and one more."""
    M, pp, v = layout.microbatches, layout.pipeline, layout.virtual
    if pp == 1:
        return 1
    if v == 1:
        return min(pp - stage, M)
    return min((pp - stage - 1) * 2 + (v - 1) * pp + 1, M * v)
