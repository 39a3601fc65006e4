"""Defects of megatron-core 0.19.2 that our layouts hit, on GPU and CPU alike; each has a test.

Installed by `megatron_dllm.training`, the one module that starts Megatron's training loop.
"""

import functools

import torch

from megatron_dllm import optimizer_forms
from megatron_dllm.precision import FP8_ROWS


@functools.cache
def install() -> None:
    """Once per process."""
    objects_run_no_code()
    _torch_adam_in_distributed_optimizer()
    optimizer_forms.install()
    _prebuilt_dataset_helpers()
    _first_logged_interval()
    _fault_tolerance_parses_again()
    _padding_in_the_counts_of_biased_routers()
    _rows_of_experts_in_blocks()


@functools.cache
def objects_run_no_code() -> None:
    """torch unpickles the objects in a checkpoint (arguments, random states) whatever they are, so that a stranger's
    checkpoint could run code. What Megatron's need is on its own list of safe classes."""
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    def load_bytes(self, read_item, value):
        name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    DefaultLoadPlanner.load_bytes = load_bytes


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
        self.optimizer.state[None] = {"step": torch.tensor(0.0)}  # no parameter here: see optimizer_forms
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


def _padding_in_the_counts_of_biased_routers() -> None:
    """To balance by selection biases, the router counts its choices [tokens, experts] without padding: with a mask
    [tokens], which fits only by accident."""
    from megatron.core.transformer.moe.router import TopKRouter

    apply_expert_bias = TopKRouter._apply_expert_bias

    @functools.wraps(apply_expert_bias)
    def count_without_padding(self, routing_map, padding_mask=None):
        return apply_expert_bias(self, routing_map, None if padding_mask is None else padding_mask[:, None])

    TopKRouter._apply_expert_bias = count_without_padding


def _rows_of_experts_in_blocks() -> None:
    """Each expert's tokens are filled up to what a product in FP8 takes: Megatron knows 16 and MXFP8's 32, and takes 16
    for block scaling too, which shares scales among 128."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    known = moe_utils.get_fp8_align_size
    moe_utils.get_fp8_align_size = lambda recipe: FP8_ROWS.get(getattr(recipe, "value", recipe)) or known(recipe)
