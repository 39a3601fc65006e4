"""What a family declares is needed: each of these mistakes loads without an error and changes the logits.

So a comparison of logits, as in test_families.py, notices them, and its models are wide enough for that.
"""

import dataclasses

import pytest
import torch

from megatron_dllm.conversion.source import Source
from megatron_dllm.models.family import Family
from megatron_dllm.models.weights import Interleaved, InterleavedFused, Mapping, Rows, Stacked
from tests.hf_models import make
from tests.parity.loading import RULES, build, inputs, oracle

pytestmark = pytest.mark.usefixtures("parallel_state")


def table(change):
    """Rules of the weights: change(name, rule, table) -> rule."""

    def apply(monkeypatch):
        mapping = Family.mapping

        def changed(family, args, keys=None):
            tables = tuple({name: change(name, rule, t) for name, rule in t.items()} for t in family.weights)
            return mapping(dataclasses.replace(family, weights=tables), args, keys)

        monkeypatch.setattr(Family, "mapping", changed)

    return apply


def arguments(**changes):
    """What config.json is read as."""

    def apply(monkeypatch):
        read = Family.read
        monkeypatch.setattr(Family, "read", lambda family, config: read(family, config) | changes)

    return apply


def heads_in_a_row(kind, ending: str):
    """Query, key and value as [all queries | all keys | all values]."""

    def apply(monkeypatch):
        make_rows = Mapping._rows

        def rows(mapping, rule, count, numbers):
            in_order = make_rows(mapping, rule, count, numbers)
            if not isinstance(rule, kind) or not in_order[0].key.endswith(ending):
                return in_order
            if kind is InterleavedFused:
                return [Rows(in_order[0].key, 0, count)]
            stops = {}
            for piece in in_order:
                stops[piece.key] = piece.stop
            return [Rows(key, 0, stop) for key, stop in stops.items()]

        monkeypatch.setattr(Mapping, "_rows", rows)

    return apply


def no_selection_bias(monkeypatch):
    read = Source.read

    def zeroed(source, name, *place):
        weight = read(source, name, *place)
        return torch.zeros_like(weight) if name.endswith("expert_bias") else weight

    monkeypatch.setattr(Source, "read", zeroed)


def swapped(part: str):
    """Gate and up projection of the MLPs whose names contain `part`."""
    return table(lambda name, rule, _: Stacked(rule.second, rule.first) if part in name and "fc1" in name else rule)


def norms_swapped(name, rule, rules):
    other = {"q_layernorm": "k_layernorm", "k_layernorm": "q_layernorm"}
    return next((rules[name.replace(a, b)] for a, b in other.items() if a in name), rule)


MISTAKES = {
    "query, key, value in a row": ("qwen3", heads_in_a_row(Interleaved, "weight")),
    "fused query, key, value left in a row": ("llada2", heads_in_a_row(InterleavedFused, "weight")),
    "bias of query, key, value in a row": ("dream", heads_in_a_row(Interleaved, "bias")),
    "gate and up swapped": ("llama", swapped("mlp.linear")),
    "gate and up of experts swapped": ("llada2", swapped("local_experts")),
    "gate and up of merged experts swapped": ("llada2 merged", swapped("local_experts")),
    "gate and up of the shared expert swapped": ("llada2", swapped("shared_experts")),
    "norms of query and key swapped": ("qwen3", table(norms_swapped)),
    "another rotary base": ("llama", arguments(rotary_base=10000)),
    "the whole head rotated": ("llada2", arguments(rotary_percent=1.0)),
    "llama3's scaling ignored": ("llama llama3", arguments(dllm_rope_scaling=None)),
    "yarn ignored": ("nemotron", arguments(dllm_rope_scaling=None)),
    "selection bias zeroed": ("llada2", no_selection_bias),
    "no scaling of experts": ("llada2", arguments(moe_router_topk_scaling_factor=None)),
    "no groups of experts": ("llada2", arguments(moe_router_num_groups=None, moe_router_group_topk=None)),
    "softmax before choosing": ("qwen3_moe", arguments(moe_router_pre_softmax=True)),
    "softmax after choosing": ("llada_moe", arguments(moe_router_pre_softmax=False)),
    "other scores": ("llada2", arguments(moe_router_score_function="sqrtsoftplus")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_changes_the_logits(tmp_path, monkeypatch, mistake):
    name, make_mistake = MISTAKES[mistake]
    path, theirs = make(name, tmp_path)
    tokens, positions, attributes = inputs()
    with torch.no_grad():
        expected = oracle(theirs, tokens, RULES["full"])
        make_mistake(monkeypatch)
        logits = build(path, rule=RULES["full"])(tokens, positions, attributes)[..., : expected.shape[-1]]
    assert (logits - expected).abs().max() > 1e-2
