"""block_diffusion through the real network: what may influence what, and what must not change anything."""

import pytest
import torch

from megatron_dllm.modes import block_diffusion as mode
from megatron_dllm.modes.base import DOCUMENT
from megatron_dllm.parallel import shard
from tests.one_process import MOE, one_process, randomize, small_config, small_model
from tests.unit.block_cases import make_sample
from tests.unit.canvas_cases import V, flags, laid_out, sees


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    with one_process():
        yield


@pytest.fixture(scope="module")
def model(parallel_state):
    model = small_model(rule=mode.visible)
    randomize(model)
    return model.eval()


def logits(model, batch, tokens_BQ=None):
    tokens_BQ = batch.tokens_BQ if tokens_BQ is None else tokens_BQ
    with torch.no_grad():
        return model(tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA)[..., :V]


def moved(model, batch, place: int) -> torch.Tensor:
    """[B, Q] True where a logit changes with the token at `place`."""
    tokens = batch.tokens_BQ.clone()
    tokens[:, place] = (tokens[:, place] + 7) % V
    return (logits(model, batch) != logits(model, batch, tokens)).any(-1)


def conversation(index=0):
    """Prompt 0-2, answer 3-8, prompt 9-10, answer 11-15: with canvases of 4 two and two, the last ones filled."""
    tokens = torch.randint(V, (16,), generator=torch.Generator().manual_seed(index))
    return make_sample([0] * 16, [0] * 3 + [1] * 6 + [0] * 2 + [1] * 5, index, tokens)


def packed(index=1):
    return make_sample([0] * 7 + [1] * 6, None, index)


def test_every_token_moves_exactly_what_may_depend_on_it(model):
    """Two layers, so two steps of the rule in words. Row 0 has two turns, row 1 two documents and padding."""
    _, batch = laid_out([conversation(), packed()], flags(), 18)
    rows = [[tuple(row) for row in sample] for sample in batch.attributes_BQA.tolist()]
    direct = torch.tensor([[[sees(q, k) for k in row] for q in row] for row in rows]).int()
    reachable = (direct @ direct) > 0
    for place in range(batch.tokens_BQ.shape[1]):
        assert torch.equal(moved(model, batch, place), reachable[:, :, place]), place


def test_no_canvas_depends_on_its_own_clean_tokens_or_later_ones(model):
    """The same, in the words that matter: the answer is not visible where it is asked for."""
    _, batch = laid_out([conversation()], flags())
    first = [3, 7, 11, 15]
    for i in range(16):
        out = moved(model, batch, i)[0]
        assert torch.equal(out[:16], torch.arange(16) >= i)  # the text is causal
        for number, start in enumerate(first):
            canvas = out[16 + 4 * number : 20 + 4 * number]
            assert canvas.all() if i < start else not canvas.any(), (i, number)
    for number in range(4):
        for k in range(4):
            out = moved(model, batch, 16 + 4 * number + k)[0]
            assert out[16 + 4 * number : 20 + 4 * number].all() and out.sum() == 4  # no text, no other canvas


def test_a_canvas_does_not_depend_on_which_others_are_denoised(model):
    """Canvases never look at each other: chosen alone, with others or with padding, a block has the same logits."""
    sample = conversation()
    (every,), batch = laid_out([sample], flags())
    full = logits(model, batch)[0, 16:].view(4, 4, V)
    for seed_index in range(6):
        (one,), alone = laid_out(
            [sample], flags(block_diffusion_canvases=1, dllm_length_multiple=6), 18, seed=seed_index
        )
        number = every.places_NK[:, 0].tolist().index(int(one.places_NK[0, 0]))
        alone.tokens_BQ[0, 18:22] = batch.tokens_BQ[0, 16 + 4 * number : 20 + 4 * number]  # the same noise
        ours = logits(model, alone)[0]
        assert torch.isfinite(ours).all()
        assert (ours[18:22] - full[number]).abs().max() < 2e-5


@pytest.mark.parametrize("experts", [False, True])
def test_padding_changes_neither_loss_nor_gradients(parallel_state, experts):
    """More padding in the text, more padding canvases and padding behind them, other ids in all of them."""
    model = small_model(small_config(**(MOE if experts else {})), rule=mode.visible)
    randomize(model)
    results = []
    for extra, multiple, pad in ((0, 1, 7), (8, 11, 9)):
        args = flags(dllm_length_multiple=multiple, dllm_pad_token_id=pad)
        samples = [conversation(), packed(), make_sample([0] * 3, [0, 0, 1], 2)]
        corrupted, batch = laid_out(samples, args, 16 + extra)
        assert (batch.attributes_BQA[..., DOCUMENT] < 0).any()
        rank = shard(batch, [0, 1, 2], 1, 0, mode.FULL_WITHIN_DOCUMENT)
        weigh = lambda score, args=args, rank=rank: sum(
            term.weight * term.sum / rank.counts[term.name] for term in mode.loss(score, args)
        )
        model.zero_grad()
        loss = model(rank.tokens_BQ, rank.position_ids_BQ, rank.attributes_BQA, loss=weigh, terms=rank.terms)
        loss.backward()
        results.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    (loss, gradients), (other, other_gradients) = results
    assert torch.allclose(loss, other, rtol=1e-5)
    for name, gradient in gradients.items():
        assert (gradient - other_gradients[name]).abs().max() <= 2e-5 * gradient.abs().max() + 1e-7, name
