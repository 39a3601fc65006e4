"""The block modes through the real network: what may influence what, and what equals what."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dllm.models.attention import RuleAttention
from megatron_dllm.modes import bd3lm, mdlm
from megatron_dllm.modes.base import BLOCK, CLEAN, DOCUMENT, NOISY, NUM_ATTRIBUTES, POSITION, STREAM
from megatron_dllm.noise import Draws
from megatron_dllm.parallel import shard
from tests.one_process import OneRank, one_process, randomize, small_config, small_model
from tests.unit.block_cases import MASK, MODES, flags, make_sample
from tests.unit.test_block_modes import sees

V = 61  # MASK is its last id


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    with one_process():
        yield


def model_of(rule):
    """The same wide weights whatever the rule."""
    model = small_model(rule=rule)
    randomize(model)
    return model.eval()


def causal(query, key):
    return (query[..., DOCUMENT] == key[..., DOCUMENT]) & (key[..., POSITION] <= query[..., POSITION])


def logits(model, tokens_BQ, positions_BQ, attributes_BQA):
    with torch.no_grad():
        return model(tokens_BQ, positions_BQ, attributes_BQA)[..., :V]


def samples(lengths=((9, 8), (13,)), supervised=None):
    out = []
    for index, row in enumerate(lengths):
        documents = [d for d, n in enumerate(row) for _ in range(n)]
        tokens = torch.randint(V - 1, (len(documents),), generator=torch.Generator().manual_seed(index))
        out.append(make_sample(documents, supervised, index, tokens))
    return out


def batch_of(mode, args, rows=None, length=19):
    corrupted = [MODES[mode].corrupt(s, Draws(42, s.index), args) for s in rows or samples()]
    return MODES[mode].layout(corrupted, length, args)


def outputs(mode, batch):
    return logits(model_of(MODES[mode].visible), batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA)


# --- leaks ------------------------------------------------------------------------------------------------------------


def reachable(mode, attributes_QA) -> torch.Tensor:
    """[Q, Q] True where a token can influence a row through two layers, from the rule in words."""
    rows = [tuple(row) for row in attributes_QA.tolist()]
    direct = torch.tensor([[sees(mode, q, k) for k in rows] for q in rows])
    return (direct.int() @ direct.int()) > 0


@pytest.mark.parametrize(("mode", "complementary"), [*((mode, False) for mode in MODES), ("bd3lm", True)])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_token_moves_exactly_what_may_depend_on_it(mode, complementary, size):
    args = flags(mode, dllm_block_size=size, bd3lm_complementary_masks=complementary)
    batch = batch_of(mode, args)
    before = outputs(mode, batch)
    Q = batch.tokens_BQ.shape[1]
    for q in range(0, Q, 3):
        tokens = batch.tokens_BQ.clone()
        tokens[:, q] = (tokens[:, q] + 7) % V
        after = logits(model_of(MODES[mode].visible), tokens, batch.position_ids_BQ, batch.attributes_BQA)
        moved = (before != after).any(-1)
        for b in range(len(moved)):
            expected = reachable(mode, batch.attributes_BQA[b])[:, q]
            assert torch.equal(moved[b], expected), (b, q)


@pytest.mark.parametrize("mode", MODES)
def test_no_noisy_row_depends_on_the_clean_tokens_of_its_own_or_a_later_block(mode):
    """The same, in the words that matter: the answer is not visible where it is asked for."""
    args = flags(mode, dllm_block_size=4)
    batch = batch_of(mode, args, samples(((16,), (16,))), 16)
    before = outputs(mode, batch)
    for i in range(16):
        tokens = batch.tokens_BQ.clone()
        tokens[:, 16 + i] = (tokens[:, 16 + i] + 7) % V
        after = logits(model_of(MODES[mode].visible), tokens, batch.position_ids_BQ, batch.attributes_BQA)
        noisy = (before != after).any(-1)[:, :16]
        assert not noisy[:, : (i // 4 + 1) * 4].any()
        assert noisy[:, (i // 4 + 1) * 4 :].all()


# --- equalities -------------------------------------------------------------------------------------------------------


def test_block_diffusion_with_one_block_is_mdlm():
    args = flags("bd3lm", dllm_block_size=19)
    rows = samples(((19,), (11,)))
    batch = batch_of("bd3lm", args, rows)
    plain = mdlm.layout([mdlm.corrupt(s, Draws(42, s.index), args) for s in rows], 19, args)
    assert torch.equal(batch.tokens_BQ[:, :19], plain.tokens_BQ)
    ours = outputs("bd3lm", batch)[:, :19]
    expected = logits(model_of(mdlm.visible), plain.tokens_BQ, plain.position_ids_BQ, plain.attributes_BQA)
    real = plain.attributes_BQA[..., DOCUMENT] >= 0
    assert (ours - expected)[real].abs().max() < 2e-5
    assert torch.equal(batch.terms["dllm"].weights_BQ[:, :19], plain.terms["dllm"].weights_BQ)


def test_blocks_of_one_masked_token_are_the_autoregressive_likelihood():
    """Everything masked, blocks of 1: Σ of -log q(x_i | x_<i), each from a forward of its own over [x_<i, mask]."""
    args = flags("bd3lm", dllm_block_size=1, dllm_eps=1.0)
    rows = samples(((12,),))
    rank = shard(batch_of("bd3lm", args, rows, 12), [0], 1, 0, False)
    model = model_of(bd3lm.visible)
    with torch.no_grad():
        (term,) = model(
            rank.tokens_BQ,
            rank.position_ids_BQ,
            rank.attributes_BQA,
            loss=lambda score: bd3lm.loss(score, args),
            terms=rank.terms,
        )
    reference, x = model_of(causal), rows[0].tokens_S
    expected = 0.0
    for i in range(12):
        tokens = torch.cat([x[:i], torch.tensor([MASK])])[None]
        attributes = torch.zeros(1, i + 1, NUM_ATTRIBUTES, dtype=torch.int32)
        attributes[0, :, POSITION] = torch.arange(i + 1)
        out = logits(reference, tokens, torch.arange(i + 1)[None], attributes)
        expected += torch.nn.functional.cross_entropy(out[0, -1], x[i]).item()
    assert term.sum.item() == pytest.approx(expected, rel=1e-5) and rank.counts["dllm"] == 12


@pytest.mark.parametrize("mode", ["hybrid", "idlm"])
def test_the_clean_stream_is_a_causal_language_model(mode):
    batch = batch_of(mode, flags(mode, dllm_block_size=4))
    clean = slice(19, 38)
    expected = logits(
        model_of(causal), batch.tokens_BQ[:, clean], batch.position_ids_BQ[:, clean], batch.attributes_BQA[:, clean]
    )
    real = batch.attributes_BQA[:, clean, DOCUMENT] >= 0
    ours = outputs(mode, batch)[:, clean]
    assert (ours - expected)[real].abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("mode", ["hybrid", "bd3lm"])
@pytest.mark.parametrize("block", [0, 1, 3])
def test_a_noisy_block_is_a_clean_prefix_and_a_bidirectional_block(mode, block):
    """What a sampler computes: the tokens before, then the block, one stream."""
    args = flags(mode, dllm_block_size=4)
    batch = batch_of(mode, args, samples(((16,),)), 16)
    ours = outputs(mode, batch)[0, block * 4 : block * 4 + 4]
    n = block * 4
    tokens = torch.cat([batch.tokens_BQ[0, 16 : 16 + n], batch.tokens_BQ[0, n : n + 4]])[None]
    attributes = torch.zeros(1, n + 4, NUM_ATTRIBUTES, dtype=torch.int32)
    attributes[0, :, POSITION] = torch.arange(n + 4)
    attributes[0, :, BLOCK] = torch.arange(n + 4) // 4
    attributes[0, :, STREAM] = torch.tensor([CLEAN] * n + [NOISY] * 4)

    def rule(query, key):
        inside = (query[..., STREAM] == NOISY) & (key[..., STREAM] == NOISY)
        before = key[..., BLOCK] <= query[..., BLOCK] if mode == "bd3lm" else key[..., POSITION] <= query[..., POSITION]
        return inside | ((key[..., STREAM] == CLEAN) & before)

    out = logits(model_of(rule), tokens, torch.arange(n + 4)[None], attributes)[0, -4:]
    assert (ours - out).abs().max() < 2e-6 * out.abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_packed_documents_lose_what_they_lose_alone(mode):
    """Σ of two packed documents = Σ of each alone, when each is noised the same."""
    args = flags(mode, dllm_block_size=4, dllm_eps=1.0)  # everything masked: nothing is left to chance
    (row,) = samples(((9, 8),))
    alone = []
    for part in (slice(0, 9), slice(9, 17)):
        alone.append(make_sample([0] * len(row.tokens_S[part]), tokens=row.tokens_S[part]))

    def sums(rows):
        rank = shard(batch_of(mode, args, rows, 20), list(range(len(rows))), 1, 0, False)
        score = lambda view: MODES[mode].loss(view, args)
        with torch.no_grad():
            terms = model_of(MODES[mode].visible)(
                rank.tokens_BQ, rank.position_ids_BQ, rank.attributes_BQA, loss=score, terms=rank.terms
            )
        return {term.name: term.sum.item() for term in terms}, rank.counts

    together, counts = sums([row])
    apart, counts_apart = sums(alone)
    assert counts == counts_apart
    assert together == {name: pytest.approx(value, rel=1e-5) for name, value in apart.items()}


# --- one rule, several readings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 3, 4, 16, 80])
@pytest.mark.parametrize("length", [37, 80])
def test_dense_flex_and_tiles_are_the_element_wise_rule(mode, size, length):
    """Packed documents and padding; lengths that no block or tile divides."""
    args = flags(mode, dllm_block_size=size)
    rows = samples(((length - 9, 7), (length - 20,)))
    attributes = batch_of(mode, args, rows, length).attributes_BQA
    Q = attributes.shape[1]
    g = torch.Generator().manual_seed(size)
    query, key, value = (torch.randn(Q, 2, heads, 16, generator=g) for heads in (4, 2, 2))
    allowed = torch.tensor(
        [[[sees(mode, q, k) for k in row] for q in row] for row in ([tuple(a) for a in b] for b in attributes.tolist())]
    )
    scores = torch.einsum("qbghd,kbgd->bghqk", query.unflatten(2, (2, 2)), key) / 4
    weights = scores.masked_fill(~allowed[:, None, None], float("-inf")).softmax(-1)
    expected = torch.einsum("bghqk,kbgd->qbghd", weights, value).flatten(2)
    for backend in ("sdpa", "flex", "tiled"):
        module = RuleAttention(
            small_config(),
            1,
            None,
            None,
            pg_collection=SimpleNamespace(cp=OneRank()),
            visible=MODES[mode].visible,
            backend=backend,
        )
        with torch.no_grad():
            out = module(query, key, value, attributes)
        assert (out - expected).abs().max() < 5e-6, backend
