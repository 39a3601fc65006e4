"""The optimizer state of a checkpoint, in the form that this run's optimizers take.

A checkpoint holds moments by the parameter's name, which suits every layout. The rest (settings of parameter groups,
step, loss scale) comes in forms that megatron-core 0.19.2 cannot turn into each other: in the state of one optimizer or
in numbered states of two (experts have their own with EP > 1 or an expert TP other than TP), and at other levels with
and without --use-distributed-optimizer. These two also name the fp32 weights of a bf16 run differently, and an fp32 run
has a second copy of its weights with it only. `fixes.install` installs this.
"""

import functools
import itertools

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.training import get_args

_MASTERS, _MASTERS_DISTRIBUTED = "optimizer.state.fp32_param.", "optimizer.state.param."
_PLAIN = "dllm_saved_without_distributed_optimizer"
_STEP = "dllm_step"  # as said by all ranks: rank 0, which writes all that is not sharded, may have no parameters
_LR = ("max_lr", "min_lr")
# A parameter group continues the saved one that agrees in all of the first, and in most of the second.
_SAME = [key for key in param_group_identifier_keys if key not in (*_LR, "is_expert_parallel")]
_ALIKE = ("default_config", *_LR, "is_expert_parallel")


def install() -> None:
    load_state_dict = ChainedOptimizer.load_state_dict
    sharded_state_dict = ChainedOptimizer.sharded_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    content_metadata = dist_checkpointing.load_content_metadata
    state_of_float16 = Float16OptimizerWithFloat16Params.sharded_state_dict

    @functools.wraps(load_state_dict)
    def load_state_dict_of_any_form(self, state):
        load_state_dict(self, _in_own_form(self.chained_optimizers, state))

    @functools.wraps(sharded_state_dict)
    def sharded_state_dict_to_load(self, model_state, is_loading=False, **kwargs):
        state = sharded_state_dict(self, model_state, is_loading, **kwargs)
        if is_loading:
            parts = [state] if len(self.chained_optimizers) == 1 else [state[key] for key in sorted(state)]
            for optimizer, part in zip(self.chained_optimizers, parts, strict=True):
                _request(optimizer, part, kwargs.get("metadata") or {})
        else:
            state[_STEP] = _steps_done(self.chained_optimizers)
        return state

    @functools.wraps(set_states)
    def set_states_but_the_weights(self, model_param, tensors):
        return set_states(self, model_param, {"param": None, **tensors})  # None: nothing to copy

    @functools.wraps(content_metadata)
    def content_metadata_for_either(*args, **kwargs):
        metadata = content_metadata(*args, **kwargs)
        if get_args().use_distributed_optimizer and "distrib_optim_sharding_type" not in (metadata or {}):
            metadata = {**(metadata or {}), "distrib_optim_sharding_type": "fully_reshardable", _PLAIN: True}
        return metadata

    @functools.wraps(state_of_float16)
    def state_without_empty_lists(self, *args, **kwargs):
        """Rank 0 writes the lists; where its stage has no experts, empty ones, which match no other stage's."""
        state = state_of_float16(self, *args, **kwargs)
        if not any(state["fp32_from_fp16_params"]):
            del state["fp32_from_fp16_params"]
        return state

    ChainedOptimizer.load_state_dict = load_state_dict_of_any_form
    ChainedOptimizer.sharded_state_dict = sharded_state_dict_to_load
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_the_weights
    dist_checkpointing.load_content_metadata = content_metadata_for_either
    Float16OptimizerWithFloat16Params.sharded_state_dict = state_without_empty_lists


def _steps_done(optimizers: list) -> float:
    """How many steps any rank's optimizers have done. Collective."""
    parts = [part.optimizer for part in optimizers if part.optimizer is not None]
    steps = [float(state["step"]) for part in parts for state in part.state.values() if "step" in state]
    steps += [float(group["step"]) for part in parts for group in part.param_groups if group.get("step") is not None]
    most = torch.tensor(max(steps, default=0.0), device=torch.cuda.current_device())
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return most.item()


def _request(optimizer, part: dict, metadata: dict) -> None:
    """Ask the checkpoint only for what it has, by the name that it has there; `part`: what `optimizer` would load."""
    if not isinstance(optimizer, DistributedOptimizer):
        # the numbers of their parameters, which would be merged with the saved groups one by one
        del part.get("optimizer", part)["param_groups"]
        if "distrib_optim_sharding_type" in metadata:
            for tensor in itertools.chain(*part.get("fp32_from_fp16_params", ())):
                tensor.key = tensor.key.replace(_MASTERS, _MASTERS_DISTRIBUTED, 1)
    elif _PLAIN in metadata:
        for tensors in part["param_state"].values():
            if optimizer.config.bf16 or optimizer.config.fp16:
                tensors["param"].key = tensors["param"].key.replace(_MASTERS_DISTRIBUTED, _MASTERS, 1)
            else:
                del tensors["param"]  # a view of the weights, which are loaded


def _in_own_form(optimizers: list, state: dict) -> dict:
    """`state`: the tensors where `optimizers` asked for them, the rest where the checkpoint has it."""
    numbered = {key: part for key, part in state.items() if isinstance(key, int)}
    alone = {key: part for key, part in state.items() if key not in numbered}
    saved = [alone, *numbered.values()]
    levels = [level for part in saved for level in (part, part.get("optimizer", {}))]
    groups = [group for level in levels for group in level.get("param_groups", ())]
    # A stage without experts has saved step 0 for them, or none; all optimizers have done the same steps.
    steps = [alone.pop(_STEP)] if _STEP in alone else []
    steps += [level["state"]["common_step"] for level in levels if "common_step" in level.get("state", {})]
    steps += [group["step"] for group in groups if group.get("step") is not None]
    step = max(map(float, steps), default=None)
    scalers = [part["grad_scaler"] for part in saved if "grad_scaler" in part]
    parts = {number: numbered.get(number, {}) for number in range(len(optimizers))} if len(optimizers) > 1 else alone
    for number, optimizer in enumerate(optimizers):
        part = parts[number] if len(optimizers) > 1 else parts
        own = part if isinstance(optimizer, FP32Optimizer) else part.setdefault("optimizer", {})
        own["param_groups"] = [_continued(group, groups) for group in optimizer.param_groups]
        if isinstance(optimizer, DistributedOptimizer):
            part.setdefault("param_state_sharding_type", "fully_reshardable")
        else:
            own.setdefault("state", {})
            numbers = itertools.count()
            for group, mine in zip(own["param_groups"], optimizer.param_groups, strict=True):
                group["params"] = [next(numbers) for _ in mine["params"]]
        if isinstance(optimizer, Float16OptimizerWithFloat16Params):
            part.setdefault("fp32_from_fp16_params", [])
        if scalers:
            part.setdefault("grad_scaler", scalers[0])
        _set_step(optimizer, own, step)
    return parts


def _continued(group: dict, saved: list[dict]) -> dict:
    """The settings of `group` as this run goes on with them.

    Its learning rates are this run's (the scheduler asks for --override-opt-param-scheduler where they differ), or the
    checkpoint's with --use-checkpoint-opt-param-scheduler. For Megatron they are a part of what identifies a group, so
    that one with another learning rate is not found.
    """
    agree = lambda other, key: other.get(key) == group.get(key)
    candidates = [other for other in saved if all(agree(other, key) for key in _SAME)]
    if not candidates:
        kind = ", ".join(f"{key} {group.get(key)}" for key in _SAME if group.get(key) is not None)
        raise ValueError(f"the checkpoint's optimizer has no parameter group with {kind}: use --no-load-optim.")
    like = max(candidates, key=lambda other: sum(agree(other, key) for key in _ALIKE))
    if get_args().use_checkpoint_opt_param_scheduler:
        group.update({key: like[key] for key in _LR})
    own = {key: group[key] for key in (*param_group_identifier_keys, "default_config") if key in group}
    return {**like, **own}


def _set_step(optimizer, state: dict, step: float | None) -> None:
    """Where this optimizer keeps it: plain with torch's Adam by parameter, else in the groups."""
    if step is None:
        return
    by_parameter = isinstance(optimizer.optimizer, torch.optim.Adam)  # AdamW is one; Transformer Engine's is not
    if by_parameter and not isinstance(optimizer, DistributedOptimizer):
        state["state"]["common_step"] = torch.tensor(step)
    for group in state["param_groups"]:
        group.pop("step", None)
        if isinstance(optimizer, DistributedOptimizer) or not by_parameter:
            group["step"] = step if by_parameter else int(step)
