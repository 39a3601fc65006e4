"""Which layouts a command can be run in, what each of them costs, and which are the fastest that fit.

A layout is tried by setting flags and asking the checks that a run would ask (arguments.check_arguments, then
Megatron's own): nothing here knows what may be combined with what. Flags that the user has given stay as they are.
"""

import contextlib
import copy
import io
import itertools
import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dllm.arguments import check_arguments, check_with_megatron
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.models.weights import is_gemma, target_layers
from megatron_dllm.modes import get_mode
from megatron_dllm.planning.hardware import Gpu
from megatron_dllm.planning.layout import Layout, check_plannable
from megatron_dllm.planning.memory import Memory, rank_memory, worst
from megatron_dllm.planning.network import Network
from megatron_dllm.planning.roofline import Prediction, Roofline
from megatron_dllm.planning.rows import Rows, expected_rows

LARGEST_TENSOR = 8  # of a node
LARGEST_PIPELINE = 16
MICRO_BATCHES = (1, 2, 4, 8)
SHORTEST_PIECE = 2048  # data tokens of a context-parallel rank
TOKENS = 2**22  # of a step, where --global-batch-size is not given
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
# of what Megatron's validation does to arguments, what depends on the layout
_OF_LAYOUT = (
    "world_size tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size "
    "cp_comm_type expert_model_parallel_size expert_tensor_parallel_size micro_batch_size recompute_granularity "
    "recompute_method recompute_num_layers recompute_modules padded_vocab_size seq_length dllm_length_multiple "
    "num_layers_per_virtual_pipeline_stage"
).split()


@dataclass(frozen=True)
class Plan:
    """A layout that the checks accept: flags that say it (beside the user's), its cost, and which stage needs most."""

    flags: tuple[str, ...]
    args: Namespace
    layout: Layout
    network: Network
    rows: Rows
    memories: tuple[Memory, ...]
    prediction: Prediction

    @property
    def memory(self) -> Memory:
        """Of the stage that needs most."""
        return worst(list(self.memories))[1]

    @property
    def name(self) -> str:
        """TP2 PP4 ..., what is larger than 1."""
        lay = self.layout
        sizes = dict(TP=lay.tensor, PP=lay.pipeline, VPP=lay.virtual, CP=lay.context, EP=lay.expert, DP=lay.data)
        if lay.expert > 1 and lay.expert_tensor != 1:
            sizes["ETP"] = lay.expert_tensor
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["one GPU"]
        return " ".join(words) + ("" if lay.context == 1 or not lay.gathers else " (all_gather)")

    @property
    def recompute(self) -> str:
        return " ".join([self.layout.recompute, *sorted(self.layout.modules)]) or "none"


class Search:
    """args, given: of a parsed command, unchecked, with its number of processes; tokenizer: a stand-in where the
    command names none; document, answer: see expected_rows; rows: what another search for the same command has
    counted."""

    def __init__(
        self,
        args: Namespace,
        given: set[str],
        tokenizer: Tokenizer,
        gpu: Gpu,
        node: int = 8,
        document: int | None = None,
        answer: float = 1.0,
        rows: dict[tuple, Rows] | None = None,
    ):
        self.args, self.given, self.tokenizer, self.gpu, self.node = args, given, tokenizer, gpu, node
        self.document, self.answer = document, answer
        self.refusals: dict[str, int] = {}
        self._validated: Namespace | None = None
        self.rows = {} if rows is None else rows
        self._networks: dict[tuple, Network] = {}

    def plans(self) -> list[Plan]:
        """The fastest first. Of a layout no more is recomputed than must be, and no larger micro-batch is tried than
        fits at all. Raises ValueError (one sentence) if no layout passes the checks."""
        plans = []
        for flags, data in self.candidates():
            for micro in self._micro(data):
                tried = self._least_recomputed([*flags, *micro])
                plans += tried
                if tried and not self.fits(tried[-1]):
                    break
        if not plans:
            world, batch = self.args.world_size, self.args.global_batch_size
            why = f"none has {world} ranks and shares --global-batch-size {batch} out evenly; try a multiple."
            why = max(self.refusals, key=self.refusals.get) if self.refusals else why
            raise ValueError(f"no layout of {self.args.world_size} GPU(s) passes the checks; most often: {why}")
        return sorted(plans, key=lambda plan: (plan.prediction.step, plan.memory.total))

    def fits(self, plan: Plan) -> bool:
        return plan.memory.total <= self.gpu.memory

    def _least_recomputed(self, flags: list[str]) -> list[Plan]:
        """One plan, the first that fits; all if none does."""
        tried = []
        for again in self._again():
            if (plan := self.try_layout((*flags, *again))) is not None:
                tried.append(plan)
                if self.fits(plan):
                    return [plan]
        return tried

    # --- candidates ---

    def candidates(self) -> Iterator[tuple[list[str], int]]:
        """(flags of a layout, its data-parallel ranks); those that are obviously no division of the ranks left out."""
        world, args = self.args.world_size, self.args
        tensor = self._sizes("tensor_model_parallel_size", min(LARGEST_TENSOR, self.node, world))
        pipeline = self._sizes("pipeline_model_parallel_size", min(LARGEST_PIPELINE, args.num_layers, world))
        # a sequence is not cut into shorter pieces than it pays to
        context = self._sizes("context_parallel_size", max(1, min(world, args.seq_length // SHORTEST_PIECE)))
        for tp, pp, cp in itertools.product(tensor, pipeline, context):
            if world % (tp * pp * cp):
                continue
            data = world // (tp * pp * cp)
            for more in itertools.product(self._experts(tp, pp, cp, data), self._virtual(pp), self._exchanges(cp)):
                sizes = {
                    "tensor-model-parallel-size": tp,
                    "pipeline-model-parallel-size": pp,
                    "context-parallel-size": cp,
                }
                flags = [word for name, size in sizes.items() for word in self._flag(name, size) if size > 1]
                if tp > 1 and "sequence_parallel" not in self.given:
                    flags.append("--sequence-parallel")
                yield list(itertools.chain(flags, *more)), data

    def _sizes(self, dest: str, largest: int) -> list[int]:
        if dest in self.given:
            return [getattr(self.args, dest)]
        return [2**i for i in range(largest.bit_length()) if 2**i <= largest]

    def _flag(self, name: str, value) -> list[str]:
        """Nothing if the user has said it already."""
        return [] if name.replace("-", "_") in self.given else [f"--{name}", str(value)]

    def _experts(self, tp: int, pp: int, cp: int, data: int) -> list[list[str]]:
        if {"expert_model_parallel_size", "expert_tensor_parallel_size"} & self.given or self.args.num_experts is None:
            return [[]]
        ranks = self.args.world_size // pp
        sizes = [2**i for i in range(min(ranks, self.args.num_experts).bit_length()) if ranks % 2**i == 0]
        choices = [[]] if tp == 1 else [["--expert-tensor-parallel-size", "1"], []]
        return [
            [*(["--expert-model-parallel-size", str(ep)] if ep > 1 else []), *etp] for ep in sizes for etp in choices
        ]

    def _virtual(self, pp: int) -> list[list[str]]:
        names = {"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"}
        uneven = {"decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"} & self.given
        layers = self.args.num_layers // pp
        if pp == 1 or names & self.given or uneven or self.args.num_layers % pp:
            return [[]]
        virtual = [["--num-layers-per-virtual-pipeline-stage", str(layers // v)] for v in (2, 4) if layers % v == 0]
        return [[], *virtual]

    def _exchanges(self, cp: int) -> list[list[str]]:
        if cp == 1 or "cp_comm_type" in self.given:
            return [[]]
        return [["--cp-comm-type", kind] for kind in ("a2a", "all_gather")]

    def _micro(self, data: int) -> list[list[str]]:
        if "micro_batch_size" in self.given:
            return [[]]
        batch = self.args.global_batch_size
        return [["--micro-batch-size", str(b)] for b in MICRO_BATCHES if batch % (b * data) == 0]

    def _again(self) -> list[list[str]]:
        if "recompute_granularity" in self.given:
            return [[]]  # as it is
        part = "moe" if self.args.num_experts is not None else "mlp"
        selective = ["--recompute-granularity", "selective", "--recompute-modules", part]
        return [[], selective, FULL]

    # --- one of them ---

    def try_layout(self, flags: tuple[str, ...]) -> Plan | None:
        """None if a check refuses it (counted in `refusals`)."""
        args = _with_flags(self.args, flags)
        try:
            _quietly(check_arguments, args, set(self.given), copy.copy(self.tokenizer))
            if is_gemma(args) and args.recompute_granularity == "selective" and args.recompute_modules == ["mlp"]:
                return None
            args = self._completed(args)
            check_plannable(args)
        except ValueError as error:
            self.refusals[str(error)] = self.refusals.get(str(error), 0) + 1
            return None
        return self._cost(flags, args)

    def _completed(self, args: Namespace) -> Namespace:
        """As Megatron's validation leaves them. It is asked once, and again for what is shown (`confirmed`)."""
        if self._validated is None:
            validated = copy.copy(args)
            _quietly(check_with_megatron, validated)
            self._validated = validated
        completed = copy.copy(self._validated)
        for name in _OF_LAYOUT:
            setattr(completed, name, getattr(args, name))
        layers = args.num_layers_per_virtual_pipeline_stage
        chunks = args.num_layers // args.pipeline_model_parallel_size // layers if layers else 1
        completed.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        return completed

    def _cost(self, flags: tuple[str, ...], args: Namespace) -> Plan:
        key = args.padded_vocab_size
        if key not in self._networks:
            self._networks[key] = Network.of(args)
        network = self._networks[key]
        beside = hasattr(get_mode(args.dllm_mode), "model_length") or target_layers(args) is not None
        # blocks beside the text are padded to what the layout can split
        lengths = args.seq_length, args.dllm_length_multiple if beside else 1
        if lengths not in self.rows:
            self.rows[lengths] = expected_rows(args, self.document, self.answer)
        rows, layout = self.rows[lengths], Layout.of(args, on_gpu=True)
        memories = tuple(rank_memory(network, rows, args, layout))
        prediction = Roofline(network, rows, args, layout, self.gpu, self.node).predict()
        return Plan(flags, args, layout, network, rows, memories, prediction)

    def confirmed(self, plan: Plan) -> bool:
        """Whether Megatron's own validation accepts it too."""
        args = _with_flags(self.args, plan.flags)
        try:
            _quietly(check_arguments, args, set(self.given), copy.copy(self.tokenizer))
            _quietly(check_with_megatron, args)
        except ValueError as error:
            self.refusals[str(error)] = self.refusals.get(str(error), 0) + 1
            return False
        return True


def _with_flags(args: Namespace, flags: tuple[str, ...]) -> Namespace:
    """As a parser would read them."""
    args = copy.copy(args)  # checks put new lists in place of old ones
    name = None
    for word in flags:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            setattr(args, name, True)
            continue
        value = int(word) if word.isdigit() else word
        setattr(args, name, [value] if name in ("recompute_modules", "cp_comm_type") else value)
    return args


def _quietly(function, *args) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        function(*args)


def default_batch(length: int, ranks: list[int]) -> int:
    """Samples of a step: about TOKENS tokens, a power of two if all these numbers of ranks can share it out."""
    samples = max(1, TOKENS // length)
    samples = 2 ** (samples.bit_length() - 1)
    shared = math.lcm(*ranks)
    return -(-samples // shared) * shared
