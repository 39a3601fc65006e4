"""What a rank gets of a micro-batch: the zigzag partition, the scored rows, and the digest that peers compare."""

import copy
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.modes.base import DOCUMENT, NUM_ATTRIBUTES, ModelInput, Term
from megatron_dllm.parallel import RankBatch, digest, pad_multiple, rank_positions, shard
from megatron_dllm.precision import FP8_ROWS


def naive_positions(length, streams, cp_size, cp_rank):
    """Chunk number r from the left and number r from the right, of each stream."""
    out = []
    for stream in range(streams):
        width = length // (2 * cp_size)
        for i in range(length):
            if i // width in (cp_rank, 2 * cp_size - 1 - cp_rank):
                out.append(stream * length + i)
    return out


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_ranks_partition_the_sequence(cp_size, streams):
    length = 24
    ranks = [rank_positions(length, streams, cp_size, r).tolist() for r in range(cp_size)]
    assert sorted(sum(ranks, [])) == list(range(length * streams))
    for r, own in enumerate(ranks):
        assert own == naive_positions(length, streams, cp_size, r)
        # the same positions of every stream
        per_stream = len(own) // streams
        for stream in range(streams):
            part = own[stream * per_stream : (stream + 1) * per_stream]
            assert [p - stream * length for p in part] == own[:per_stream]


def test_causal_work_is_balanced():
    for cp_size in (2, 4):
        work = {sum(p + 1 for p in rank_positions(32, 1, cp_size, r).tolist()) for r in range(cp_size)}
        assert len(work) == 1


def model_input(B, length, streams, seed=0, documents=3) -> ModelInput:
    g = torch.Generator().manual_seed(seed)
    Q = length * streams
    ids = lambda: torch.randint(1000, (B, Q), generator=g)
    terms = {}
    for name in ("dllm", "other"):
        weights = torch.rand(B, Q, generator=g) * (torch.rand(B, Q, generator=g) < 0.4)
        terms[name] = Term(ids(), weights, float((weights > 0).sum()), torch.rand(B, Q, generator=g))
    attributes = torch.randint(documents, (B, Q, NUM_ATTRIBUTES), generator=g, dtype=torch.int32)
    return ModelInput(ids(), ids(), attributes, terms, streams, dict(supervised=1.0))


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 3),
    cp_size=st.sampled_from([1, 2, 4]),
    streams=st.sampled_from([1, 2]),
    chunk=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_all_ranks_together_train_on_the_whole_micro_batch(B, cp_size, streams, chunk, seed):
    length = 2 * cp_size * chunk
    batch = model_input(B, length, streams, seed)
    ranks = [shard(batch, list(range(B)), cp_size, r, False) for r in range(cp_size)]
    scored = {name: [] for name in batch.terms}
    order = []
    for r, rank in enumerate(ranks):
        own = naive_positions(length, streams, cp_size, r) if cp_size > 1 else list(range(length * streams))
        order += own
        assert torch.equal(rank.tokens_BQ, batch.tokens_BQ[:, own])
        assert torch.equal(rank.position_ids_BQ, batch.position_ids_BQ[:, own])
        for name, term in rank.terms.items():
            for n, row in enumerate(term.rows_N.tolist()):
                b, position = row % B, own[row // B]  # hidden states are [Q, B]: sequence first
                values = (term.targets_N[n].item(), term.weights_N[n].item(), term.levels_N[n].item())
                scored[name].append((b, position, *values))
        assert rank.counts == {name: term.count for name, term in batch.terms.items()}
        assert rank.tokens == batch.tokens and rank.index == list(range(B))
    for name, term in batch.terms.items():
        expected = [
            (b, q, term.targets_BQ[b, q].item(), term.weights_BQ[b, q].item(), term.levels_BQ[b, q].item())
            for b in range(B)
            for q in range(length * streams)
            if term.weights_BQ[b, q] != 0
        ]
        assert sorted(scored[name]) == expected
    for rank in ranks:  # attributes: of all ranks, in the order of their concatenation
        assert torch.equal(rank.attributes_BQA, batch.attributes_BQA[:, order])


@pytest.mark.parametrize("cp_size", [1, 2])
def test_attributes_are_dropped_only_where_the_rule_is_plain_full(cp_size):
    batch = model_input(2, 8, 1)
    batch.attributes_BQA[..., DOCUMENT] = 0
    assert shard(batch, [0, 1], cp_size, 0, full_within_document=True).attributes_BQA is None
    assert shard(batch, [0, 1], cp_size, 0, full_within_document=False).attributes_BQA is not None
    for other in (-1, 1):
        batch.attributes_BQA[..., DOCUMENT] = 0
        batch.attributes_BQA[1, -1, DOCUMENT] = other
        assert shard(batch, [0, 1], cp_size, 0, full_within_document=True).attributes_BQA is not None


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recipe", [None, *FP8_ROWS])
def test_the_least_length_that_a_layout_can_cut(tp, cp, sequence_parallel, recipe):
    def fits(length):
        if cp > 1 and length % (2 * cp):
            return False
        shards = cp * (tp if sequence_parallel else 1)
        return length % shards == 0 and (length // shards) % FP8_ROWS.get(recipe, 1) == 0

    assert pad_multiple(tp, cp, sequence_parallel, recipe) == next(n for n in range(1, 10000) if fits(n))


def test_lengths_that_others_got_wrong():
    """Reported of other trainers: shards that FP8 could not multiply, because padding went by the whole length, by 16
    under every recipe, or came before the context-parallel cut."""
    padded = lambda length, *layout: -(-length // pad_multiple(*layout)) * pad_multiple(*layout)
    assert padded(4092, 4, 1, True, "tensorwise") == 4096
    assert padded(31936, 4, 1, True, "mxfp8") == 32000 and 32000 // 4 % 32 == 0 and 31936 // 4 % 32 != 0
    assert padded(31936, 4, 1, True, "delayed") == 31936
    assert padded(184, 1, 2, False, "delayed") == 192
    assert padded(1000, 2, 2, True, "blockwise") == 1024


def test_the_digest_sees_every_input():
    batch = model_input(2, 8, 1)
    reference = digest(batch, [3, 4])
    assert reference == digest(copy.deepcopy(batch), [3, 4]) and 0 <= reference < 2**63
    seen = {reference, digest(batch, [4, 3])}

    def changed(edit):
        other = copy.deepcopy(batch)
        edit(other)
        seen.add(digest(other, [3, 4]))

    changed(lambda x: x.tokens_BQ[1, 5].add_(1))
    changed(lambda x: x.position_ids_BQ[1, 5].add_(1))
    changed(lambda x: x.attributes_BQA[1, 5, 2].add_(1))
    for name in batch.terms:
        changed(lambda x, name=name: x.terms[name].targets_BQ[0, 0].add_(1))
        changed(lambda x, name=name: x.terms[name].weights_BQ[0, 0].add_(1e-3))
        changed(lambda x, name=name: x.terms[name].levels_BQ[0, 0].add_(1e-3))
        changed(lambda x, name=name: setattr(x.terms[name], "count", 0.5))
    assert len(seen) == 2 + 3 + 8


def test_a_batch_moves_to_a_device_as_a_whole():
    """`meta` stands for a GPU: no tensor may be forgotten."""
    rank = shard(model_input(2, 8, 1), [0, 1], 1, 0, False)
    assert rank.to("cpu") is rank
    moved = rank.to("meta")
    tensors = [getattr(moved, f.name) for f in fields(RankBatch)]
    tensors += [value for term in moved.terms.values() for value in vars(term).values()]
    devices = {tensor.device.type for tensor in tensors if torch.is_tensor(tensor)}
    assert devices == {"meta"}
