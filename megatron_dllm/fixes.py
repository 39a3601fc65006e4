"""Defects of megatron-core 0.19.2 that our layouts hit, on GPU and CPU alike; each has a test.

Installed by `megatron_dllm.training`, the one module that starts Megatron's training loop.
"""

import functools

import torch


@functools.cache
def install() -> None:
    """Once per process."""
    _torch_adam_in_distributed_optimizer()
    _optimizer_of_experts()
    _prebuilt_dataset_helpers()
    _first_logged_interval()
    _fault_tolerance_parses_again()


def _torch_adam_in_distributed_optimizer() -> None:
    """Without Transformer Engine and Apex the optimizer is torch's AdamW, with a `step` per parameter.

    DistributedOptimizer then (a) asserts that a step exists when it only describes a fresh optimizer for
    loading, or has no parameter on this rank, (b) looks for `step` among the sharded states, (c) loads ONE step
    tensor into all parameters, so that every optimizer step advances it once per parameter: bias correction, and
    with it the loss, drifts after a resume without any error.
    """
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    state_dict = DistributedOptimizer.state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict

    @functools.wraps(state_dict)
    def state_dict_of_fresh_optimizer(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if "step" not in state:
                    state["step"] = torch.tensor(0.0)
                    state.setdefault("exp_avg", torch.zeros_like(parameter.data))
                    state.setdefault("exp_avg_sq", torch.zeros_like(parameter.data))
        if self.optimizer.state:
            return state_dict(self)
        self.optimizer.state[None] = {"step": torch.tensor(0.0)}  # no parameter here: see _share_step
        try:
            return state_dict(self)
        finally:
            del self.optimizer.state[None]

    @functools.wraps(set_states)
    def set_states_without_step(self, model_param, tensors):
        return set_states(self, model_param, {"step": None, **tensors})  # None: nothing to copy

    @functools.wraps(load_state_dict)
    def load_state_dict_with_own_steps(self, state):
        load_state_dict(self, state)
        for parameter_state in self.optimizer.state.values():
            if torch.is_tensor(parameter_state.get("step")):
                parameter_state["step"] = parameter_state["step"].clone()

    DistributedOptimizer.state_dict = state_dict_of_fresh_optimizer
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_without_step
    DistributedOptimizer.load_state_dict = load_state_dict_with_own_steps


def _optimizer_of_experts() -> None:
    """Experts have an optimizer of their own with EP > 1 or an expert TP other than TP; else one has all parameters.

    A checkpoint holds moments by the parameter's name, which suits both. The rest (settings of parameter groups,
    step, loss scale) lies in the state of the one optimizer, or in numbered states of two, so that ChainedOptimizer
    finds the tensors it asked for at one level and the rest at the other. It is moved to where the tensors are.
    Rank 0 writes the rest; where its pipeline stage has no experts, their optimizer is saved without a step, and with
    empty lists of fp32 parameters that match no other stage's. All optimizers have done the same steps.
    """
    from megatron.core.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params

    load_state_dict = ChainedOptimizer.load_state_dict
    sharded_state_dict = Float16OptimizerWithFloat16Params.sharded_state_dict

    @functools.wraps(load_state_dict)
    def load_state_dict_of_one_or_two(self, state):
        several = len(self.chained_optimizers) > 1
        numbered = {key: state[key] for key in state if isinstance(key, int)} if isinstance(state, dict) else {}
        if numbered and len(numbered) < len(state):
            alone = {key: state[key] for key in state if key not in numbered}
            state, saved = (numbered, [alone]) if several else (alone, list(numbered.values()))
            for number, optimizer in enumerate(self.chained_optimizers):
                _complete(state.setdefault(number, {}) if several else state, optimizer.param_groups, saved)
        if numbered and several:
            _share_step(list(state.values()))
            for part in state.values():
                if "optimizer" in part:  # else the state of a plain fp32 optimizer
                    part.setdefault("fp32_from_fp16_params", [])
        load_state_dict(self, state)

    @functools.wraps(sharded_state_dict)
    def sharded_state_dict_without_empty_lists(self, *args, **kwargs):
        state = sharded_state_dict(self, *args, **kwargs)
        if not any(state["fp32_from_fp16_params"]):
            del state["fp32_from_fp16_params"]
        return state

    ChainedOptimizer.load_state_dict = load_state_dict_of_one_or_two
    Float16OptimizerWithFloat16Params.sharded_state_dict = sharded_state_dict_without_empty_lists


def _complete(state: dict, groups: list[dict], saved: list[dict]) -> None:
    """Give `state`, the tensors of an optimizer with these parameter groups, what else is in the `saved` states."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    level = lambda part: part.setdefault("optimizer", {}) if "optimizer" in saved[0] else part
    kind = lambda group: [group.get(key) for key in param_group_identifier_keys if key != "is_expert_parallel"]
    own, candidates = level(state), [group for part in saved for group in level(part)["param_groups"]]
    # what a state has of its groups are the numbers of their parameters; the distributed optimizer's has nothing
    numbers = own.get("param_groups", [{}] * len(groups))
    own["param_groups"] = []
    for group, numbers_of_group in zip(groups, numbers, strict=True):
        like = next((other for other in candidates if kind(other) == kind(group)), {})  # {}: Megatron will complain
        own["param_groups"].append({**like, "is_expert_parallel": group["is_expert_parallel"], **numbers_of_group})
    for part in saved:
        if "common_step" in level(part).get("state", {}):
            own.setdefault("state", {})["common_step"] = level(part)["state"]["common_step"]
    state.update({key: saved[0][key] for key in ("grad_scaler", "param_state_sharding_type") if key in saved[0]})


def _share_step(states: list[dict]) -> None:
    """Give the step (of an optimizer, and in its parameter groups) to those of `states` that lack it or have 0."""
    levels = [state.get("optimizer", state) for state in states]
    for key, holders in (
        ("common_step", [level.setdefault("state", {}) for level in levels]),
        ("step", [group for level in levels for group in level["param_groups"]]),
    ):
        step = next((holder[key] for holder in holders if holder.get(key)), None)
        for holder in holders if step is not None else ():
            holder[key] = holder.get(key) or step


def _prebuilt_dataset_helpers() -> None:
    """The wheel ships the compiled dataset helpers but no Makefile: do not rebuild what imports."""
    import importlib.util

    import megatron.core.datasets.utils as dataset_utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None


def _first_logged_interval() -> None:
    """The line logged after the first iteration does not reset the running sums.

    That is meant for a first iteration inside an interval. When the first iteration ends one (always, with
    --log-interval 1), the next line would show a mean over both.
    """
    import megatron.training.training as training
    from megatron.training import get_args

    training_log = training.training_log

    @functools.wraps(training_log)
    def log_whole_intervals(*args, **kwargs):
        iteration = kwargs["iteration"] if "iteration" in kwargs else args[3]
        if iteration % get_args().log_interval == 0:
            kwargs["is_first_iteration"] = False
        return training_log(*args, **kwargs)

    training.training_log = log_whole_intervals


def _fault_tolerance_parses_again() -> None:
    """`pretrain` parses sys.argv a second time with Megatron's flags alone, and fails on a value that is ours."""
    import types

    from megatron.training import ft_integration, get_args

    ft_integration.arguments = types.SimpleNamespace(parse_args=lambda ignore_unknown_args: get_args())
