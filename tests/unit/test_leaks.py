"""Who can influence whom, probed by perturbing tokens of the real model: what must not move, moves by not one bit.

With experts "not one bit" becomes "only by rounding": an expert's matrix product has as many rows as tokens came
to it, and the kernel's order of summation depends on that number.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import router as router_module

from megatron_dllm.data.sample import Sample
from megatron_dllm.modes import mdlm
from megatron_dllm.noise import Draws
from megatron_dllm.parallel import shard
from tests.one_process import MOE, attributes_of, one_process, packed, randomize, small_config, small_model

V, Q = 61, 24
VARIANTS = {"dense": {}, "mixture of experts": MOE}


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    with one_process():
        yield


@pytest.fixture(scope="module", params=VARIANTS)
def model(request, parallel_state):
    model = small_model(small_config(**VARIANTS[request.param]))
    randomize(model)
    return model.eval()


def tokens_of(B, seed=0):
    return torch.randint(V, (B, Q), generator=torch.Generator().manual_seed(seed))


def logits(model, tokens_BQ, documents_BQ, positions_BQ):
    with torch.no_grad():
        return model(tokens_BQ, positions_BQ, attributes_of(documents_BQ, positions_BQ))


def moved(model, tokens_BQ, changed_BQ, documents_BQ, positions_BQ) -> torch.Tensor:
    """[B, Q] True where a logit changed when other tokens were put at `changed_BQ`."""
    other = torch.where(changed_BQ, (tokens_BQ + 7) % V, tokens_BQ)
    before = logits(model, tokens_BQ, documents_BQ, positions_BQ)[..., :V]
    after = logits(model, other, documents_BQ, positions_BQ)[..., :V]
    rounding = 0.0 if model.config.num_moe_experts is None else 1e-5 * before.abs().max()
    return ((before - after).abs() > rounding).any(-1)


def test_padding_moves_no_real_token(model):
    documents_BQ, positions_BQ = packed([[9, 7], [15], [1]], Q)
    pads = documents_BQ < 0
    out = moved(model, tokens_of(3), pads, documents_BQ, positions_BQ)
    assert not out[~pads].any()
    assert out[pads].all()  # the probe does something


@pytest.mark.parametrize("document", [0, 1, 2])
def test_a_document_moves_itself_and_no_other(model, document):
    documents_BQ, positions_BQ = packed([[9, 7, 5], [4, 4, 16]], Q)
    changed = documents_BQ == document
    out = moved(model, tokens_of(2), changed, documents_BQ, positions_BQ)
    assert torch.equal(out, changed)


def test_a_row_moves_no_other_row(model):
    documents_BQ, positions_BQ = packed([[Q], [Q]], Q)
    changed = torch.zeros(2, Q, dtype=torch.bool)
    changed[0] = True
    assert torch.equal(moved(model, tokens_of(2), changed, documents_BQ, positions_BQ), changed)


@pytest.mark.parametrize("place", [0, 11, Q - 1])
def test_every_token_moves_its_whole_document_in_both_directions(model, place):
    documents_BQ, positions_BQ = packed([[Q]], Q)
    changed = torch.arange(Q)[None] == place
    assert moved(model, tokens_of(1), changed, documents_BQ, positions_BQ).all()


def test_cross_document_attention_is_one_document(model):
    """--dllm-cross-document-attention: the data source gives every token document 0 and running positions."""
    documents_BQ, positions_BQ = torch.zeros(1, Q, dtype=torch.int64), torch.arange(Q)[None]
    changed = torch.arange(Q)[None] >= 15
    assert moved(model, tokens_of(1), changed, documents_BQ, positions_BQ).all()


def test_positions_matter_and_only_as_distances(model):
    """Rotary positions: shifting a document changes nothing but rounding, stretching it does."""
    documents_BQ, positions_BQ = packed([[Q]], Q)
    reference = logits(model, tokens_of(1), documents_BQ, positions_BQ)
    shifted = logits(model, tokens_of(1), documents_BQ, positions_BQ + 5)
    stretched = logits(model, tokens_of(1), documents_BQ, positions_BQ * 2)
    assert (reference - shifted)[..., :V].abs().max() < 1e-3 < (reference - stretched)[..., :V].abs().max()


# --- how far a batch is padded -------------------------------------------------------------------------------------


def samples() -> list[Sample]:
    """Two packed rows of 17 and 11 tokens, the prompt of each document not supervised."""
    out = []
    for index, lengths in enumerate(([10, 7], [11])):
        (documents,), (positions,) = packed([lengths], sum(lengths))
        tokens = torch.randint(V - 1, (sum(lengths),), generator=torch.Generator().manual_seed(index))
        out.append(Sample(tokens, positions >= 3, documents.int(), positions, index))
    return out


FLAGS = SimpleNamespace(
    dllm_mask_token_id=V - 1,
    dllm_pad_token_id=0,
    dllm_eps=1e-3,
    dllm_loss_normalization="supervised",
    mdlm_shift_logits=False,
)


def run(model, length: int):
    """(rows' nll, Σ weight·nll, gradients) of the two samples padded to `length`."""
    corrupted = [mdlm.corrupt(s, Draws(42, s.index), FLAGS) for s in samples()]
    batch = shard(mdlm.layout(corrupted, length, FLAGS), [0, 1], 1, 0, mdlm.FULL_WITHIN_DOCUMENT)
    kept = {}

    def loss(score):
        (term,) = mdlm.loss(score, FLAGS)
        kept.update(score.nll)
        return term.sum

    model.zero_grad()
    total = model(batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA, loss=loss, terms=batch.terms)
    total.backward()
    return kept["dllm"], total.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def close_gradients(a: dict, b: dict):
    for name in a:
        assert (a[name] - b[name]).abs().max() <= 2e-5 * a[name].abs().max() + 1e-7, name


def test_doubling_the_padding_changes_neither_loss_nor_gradients(model):
    nll, total, gradients = run(model, 20)
    longer_nll, longer_total, longer_gradients = run(model, 40)
    assert len(nll) > 3
    assert torch.allclose(nll, longer_nll, atol=2e-5)
    assert torch.allclose(total, longer_total, rtol=1e-5)
    close_gradients(gradients, longer_gradients)


# --- routers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss"])
def test_padding_is_neither_routed_in_the_statistics_nor_balanced(balancing, monkeypatch):
    """Router gradients of the auxiliary loss alone, and the loss itself, with and without 50 % padding."""
    config = small_config(**(MOE | dict(moe_router_load_balancing_type=balancing, moe_aux_loss_coeff=0.1)))
    model = small_model(config)
    randomize(model)
    model.train()
    values = []
    attach = router_module.TopKRouter.attach_and_log_load_balancing_loss

    def watch(self, activation, coefficient, loss, *args, **kwargs):
        values.append(loss.item())
        return attach(self, activation, coefficient, loss, *args, **kwargs)

    monkeypatch.setattr(router_module.TopKRouter, "attach_and_log_load_balancing_loss", watch)

    def auxiliary(length):
        values.clear()
        model.zero_grad()
        # both rows full at 12 tokens
        documents_BQ, positions_BQ = packed([[7, 5], [12]], length)
        tokens_BQ = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(3))
        tokens_BQ = torch.cat([tokens_BQ, torch.full((2, length - 12), 5)], dim=1)
        out = model(tokens_BQ, positions_BQ, attributes_of(documents_BQ, positions_BQ))
        (out[:, :1] * 0).sum().backward()  # nothing but the auxiliary loss
        return list(values), {n: p.grad.clone() for n, p in model.named_parameters() if "router" in n}

    loss, gradients = auxiliary(12)
    padded_loss, padded_gradients = auxiliary(24)
    assert len(loss) == 2 and min(loss) > 0
    assert padded_loss == pytest.approx(loss, rel=1e-5)
    assert all(g.abs().max() > 0 for g in gradients.values())
    close_gradients(gradients, padded_gradients)
