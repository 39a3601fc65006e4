"""The first of two passes sees what it needs and no more."""

from argparse import Namespace

import pytest
import torch

from megatron_dllm.data.sample import Sample
from megatron_dllm.modes import block_diffusion as mode
from megatron_dllm.modes.base import CLEAN, DOCUMENT, STREAM
from megatron_dllm.noise import Draws
from megatron_dllm.parallel import first_pass_input
from megatron_dllm.self_conditioning import _known

ARGS = Namespace(
    dllm_eps=1e-3,
    dllm_block_size=4,
    vocab_size=50,
    dllm_pad_token_id=0,
    dllm_eos_token_id=1,
    dllm_sequence_length=32,
    dllm_length_multiple=2,
    dllm_variable_lengths=True,
    block_diffusion_canvases=1,
    block_diffusion_eos_fill=True,
    block_diffusion_self_conditioning=0.5,
    encoder_ar_loss_weight=1.0,
    expert_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    moe_token_dispatcher_type="alltoall",
)


def batch(samples: int = 6, **changes):
    """Conversations of two turns, laid out; about half of them with a coin that is on."""
    args = Namespace(**vars(ARGS) | changes)
    rows = []
    for index in range(samples):
        g = torch.Generator().manual_seed(index)
        n = 20 + index
        mask = torch.zeros(n, dtype=torch.bool)
        mask[3:9], mask[12:n] = True, True
        tokens, documents = torch.randint(3, 50, (n,), generator=g), torch.zeros(n, dtype=torch.int32)
        sample = Sample(tokens, mask, documents, torch.arange(n), index)
        rows.append(mode.corrupt(sample, Draws(1, index), args))
    return mode.layout(rows, 32, args), args


def test_rows_whose_coin_is_on_their_canvases_and_the_text_that_these_see():
    whole, args = batch()
    first = first_pass_input(whole, args)
    rows = whole.self_conditioned_B.nonzero()[:, 0]
    assert 0 < len(rows) < len(whole.tokens_BQ) and first.terms == {}
    S, short, D = 32, first.tokens_BQ.shape[1] - first.drafted, first.drafted
    assert short < S and whole.drafted == D and short % args.dllm_length_multiple == 0
    for name in ("tokens_BQ", "position_ids_BQ", "attributes_BQA"):
        kept, all_of = getattr(first, name), getattr(whole, name)[rows]
        assert torch.equal(kept[:, :short], all_of[:, :short]) and torch.equal(kept[:, short:], all_of[:, S:])
    attributes = whole.attributes_BQA[rows]
    seen = mode.visible(attributes[:, S:, None], attributes[:, None])[:, :, :S]
    real = attributes[:, S:, DOCUMENT] >= 0
    seen = (seen & real[..., None]).any(1)
    assert not seen[:, short:].any() and seen[:, short - args.dllm_length_multiple : short].any()
    assert (first.attributes_BQA[:, :short, STREAM] == CLEAN).all()


@pytest.mark.parametrize(
    "changes",
    [
        dict(pipeline_model_parallel_size=2, dllm_variable_lengths=False),
        dict(expert_model_parallel_size=2, moe_token_dispatcher_type="allgather"),
    ],
)
def test_whole_where_others_count_on_the_length(changes):
    whole, args = batch(**changes)
    first = first_pass_input(whole, args)
    assert first.tokens_BQ is whole.tokens_BQ and first.terms == {}


def test_rows_are_named_where_the_states_are():
    """Coins come from the CPU, hidden states do not."""
    coins = Namespace(self_conditioned_B=torch.tensor([True, False, True]))
    for passed in (2, 3):  # the rows alone, or all of the batch
        states, rows = _known(torch.empty(4, passed, 5, device="meta"), coins)
        assert states.shape == (4, 2, 5) and rows.device == states.device
    assert _known(torch.empty(4, 3, 5), Namespace(self_conditioned_B=torch.zeros(3, dtype=torch.bool))) is None


def test_no_coin_no_pass():
    whole, args = batch(block_diffusion_self_conditioning=0.0)
    assert whole.self_conditioned_B is None and first_pass_input(whole, args) is None
    whole, args = batch()
    whole.self_conditioned_B[:] = False
    assert first_pass_input(whole, args) is None


def test_a_sample_without_an_answer_needs_no_text():
    """Its canvases are padding: the least that the layout can split is kept."""
    whole, args = batch(1)
    whole.self_conditioned_B[:] = True
    whole.attributes_BQA[:, 32:, DOCUMENT] = -1
    first = first_pass_input(whole, args)
    assert first.tokens_BQ.shape[1] - first.drafted == args.dllm_length_multiple
