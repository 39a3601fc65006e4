"""Where weights lie: every row exactly once on both sides, and the same as naive loops say."""

from argparse import Namespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.moe.router import TopKRouter

from megatron_dllm.models import FAMILIES, get_family, recognise
from megatron_dllm.models.hf import read_config
from megatron_dllm.models.weights import Mapping, local_name, megatron_shapes
from tests import drafts, gemma
from tests.hf_models import MODELS, make
from tests.one_process import one_process
from tests.parity.test_families import build


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """(model, number of a table) -> (args, mapping)."""
    found = {}
    others = dict(dflash_draft=drafts.make, diffusion_gemma=lambda folder: gemma.make_folder(str(folder)))
    for name in (*MODELS, *others):
        folder = tmp_path_factory.mktemp("hf")
        config = read_config(others[name](folder) if name in others else make(name, folder)[0])
        family = recognise(config)
        args = Namespace(**family.read(config))
        found |= {(name, number): (args, Mapping(table, args)) for number, table in enumerate(family.weights)}
    return found


CASES = [(name, number) for name in MODELS for number in range(2 if "llada2" in name else 1)]
CASES += [("dflash_draft", 0), ("diffusion_gemma", 0)]


def test_no_table_is_left_out(cases):
    assert set(cases) == set(CASES)
    assert {name.split()[0] for name, _ in CASES} == set(FAMILIES) - {"fast_dllm_v2"}
    assert get_family("fast_dllm_v2").weights is get_family("qwen2").weights


def ids(mapping):
    """Every element of every Hugging Face tensor gets a number of its own."""
    tensors, start = {}, 0
    for key, shape in mapping.hf.items():
        count = torch.Size(shape).numel()
        tensors[key] = torch.arange(start, start + count).view(shape)
        start += count
    return tensors, start


def naive(name, args, mapping, tensors):
    """A Megatron tensor from Hugging Face tensors, with loops, by what the tensors are called there."""
    numbers = [int(word) for word in name.split(".") if word.isdigit()]
    wanted = [piece.key for piece in mapping.megatron[name][1]]
    heads, groups, d = args.num_attention_heads, args.num_query_groups, args.kv_channels
    parts = "qkv"
    if numbers and numbers[0] in (args.dllm_full_attention_layers or ()):  # a value is the key's projection
        groups, d, parts = args.dllm_full_query_groups, args.dllm_full_kv_channels, "qk"
    if "linear_qkv" in name:
        if "query_key_value" in wanted[0]:
            whole = tensors[wanted[0]]
            q, k, v = whole[: heads * d], whole[heads * d : (heads + groups) * d], whole[(heads + groups) * d :]
        else:
            q, k, *v = (tensors[key] for key in wanted[: len(parts)])
            v = v[0] if v else None
            assert [key.rsplit(".", 2)[1][0] for key in wanted[: len(parts)]] == list(parts)
        rows = []
        for group in range(groups):
            for head in range(heads // groups):
                for i in range(d):
                    rows.append(q[(group * (heads // groups) + head) * d + i])
            for part in (k, v)[: len(parts) - 1]:
                for i in range(d):
                    rows.append(part[group * d + i])
        return torch.stack(rows)
    parts = [tensors[key] for key in wanted]
    if "local_experts" in name and "shared" not in name and parts[0].dim() == 3:
        parts = [part[numbers[1]] for part in parts]
    if "linear_fc1" in name and "gate_up_proj" in wanted[0]:
        assert len(parts) == 1
    elif "linear_fc1" in name:
        gates = ("gate_proj", "ff_proj")
        assert any(gate in wanted[0] for gate in gates) and "up_proj" in wanted[1] and len(parts) == 2
    else:
        assert len(parts) == 1
    for number, key in zip(numbers[:1], wanted, strict=False):
        assert f".{number}." in key
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_every_row_once_and_where_loops_put_it(cases, name, number):
    args, mapping = cases[name, number]
    tensors, count = ids(mapping)
    seen = []
    for ours, (shape, pieces) in mapping.megatron.items():
        gathered = torch.cat(
            [tensors[p.key][slice(None) if p.index is None else p.index][p.start : p.stop] for p in pieces]
        )
        assert tuple(gathered.shape) == shape
        assert torch.equal(gathered, naive(ours, args, mapping, tensors)), ours
        seen.append(gathered.flatten())
    seen = torch.cat(seen)
    assert len(seen) == count and torch.equal(seen.sort().values, torch.arange(count))


@pytest.mark.parametrize(("name", "number"), CASES)
def test_places_are_the_inverse(cases, name, number):
    """Writing piece by piece, the way an export does, fills every tensor."""
    _, mapping = cases[name, number]
    tensors, _ = ids(mapping)
    megatron = {
        ours: torch.cat([tensors[p.key][slice(None) if p.index is None else p.index][p.start : p.stop] for p in pieces])
        for ours, (_, pieces) in mapping.megatron.items()
    }
    for key, places in mapping.places.items():
        out = torch.full(mapping.hf[key], -1)
        for ours, row, piece in places:
            target = out if piece.index is None else out[piece.index]
            target[piece.start : piece.stop] = megatron[ours][row : row + piece.stop - piece.start]
        assert torch.equal(out, tensors[key])


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_slices_are_rows_of_the_whole(cases, data):
    _, mapping = cases[data.draw(st.sampled_from(CASES))]
    name = data.draw(st.sampled_from(sorted(mapping.megatron)))
    shape, pieces = mapping.megatron[name]
    whole = [(p.key, p.index, row) for p in pieces for row in range(p.start, p.stop)]
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0] + 7))  # padding rows of a vocabulary are beyond
    rows = [None] * (stop - start)
    for first, p in mapping.slices(name, start, stop):
        for i, row in enumerate(range(p.start, p.stop)):
            assert rows[first + i] is None
            rows[first + i] = (p.key, p.index, row)
    assert rows == whole[start:stop] + [None] * max(0, stop - max(start, shape[0]))


@pytest.mark.parametrize("name", ["llama tied", "qwen2", "qwen3_moe", "llada2", "nemotron", "dflash_draft"])
def test_shapes_are_the_model_s(tmp_path, name):
    path = drafts.make(tmp_path) if name == "dflash_draft" else make(name, tmp_path)[0]
    config = read_config(path)
    args = Namespace(**recognise(config).read(config))
    with one_process():
        model = build(path, "--make-vocab-size-divisible-by", "1")
        built = {local_name(key): tuple(x.shape) for key, x in model.named_parameters()}
        for key, module in model.named_modules():
            if isinstance(module, TopKRouter) and module.expert_bias is not None:
                built[f"{key}.expert_bias"] = tuple(module.expert_bias.shape)
    assert built == megatron_shapes(args)


def test_a_weight_without_a_place(cases):
    args, _ = cases["qwen3", 0]
    with pytest.raises(ValueError, match="no place for the weight decoder.layers.0.self_attention.q_layernorm.weight"):
        Mapping(get_family("llama").weights[0], args)


def test_transformer_engine_s_names():
    block = "decoder.layers.3."
    assert local_name(block + "self_attention.linear_qkv.layer_norm_weight") == block + "input_layernorm.weight"
    assert local_name(block + "mlp.linear_fc1.layer_norm_weight") == block + "pre_mlp_layernorm.weight"
    expert = block + "mlp.experts.local_experts.12.linear_fc2.weight"
    assert local_name(block + "mlp.experts.linear_fc2.weight12") == local_name(expert) == expert
