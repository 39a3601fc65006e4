"""A draft beside its target: the loss from transformers' hidden states, block by block; and what a block cannot see."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dllm.conversion import plain_draft
from megatron_dllm.models.dlm import DiffusionLM
from megatron_dllm.modes import dflash
from megatron_dllm.noise import Draws
from megatron_dllm.parallel import shard
from tests import drafts, hf_models
from tests.drafts import BLOCK, CONFIG, tensors
from tests.parity.loading import command
from tests.unit.block_cases import make_sample
from tests.unit.dflash_cases import anchored, flags

pytestmark = pytest.mark.usefixtures("parallel_state")
MASK, LAYERS = 2, [0, 3]  # the first and the last, after which transformers applies the final norm
TARGETS = ("qwen3 tied", "llama")
VARIANTS = {
    "": "",
    "causal block, window": "--dflash-causal-block --dflash-window 5",
    "variable prefix": "--dflash-loss variable-prefix",
    "distilled": "--dflash-loss variable-prefix --dflash-kl-weight 0.7 --dflash-kl-temperature 1.5",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: (folder of a target, its transformers model)}, and a draft's folder."""
    folder = tmp_path_factory.mktemp("dflash")
    own = dict(mask_token_id=MASK, target_layer_ids=LAYERS)
    draft = drafts.make(folder, tokenizer=False, num_target_layers=4, dflash_config=own)
    return {name: hf_models.make(name, folder) for name in TARGETS} | dict(draft=draft)


def build(folders, target: str, options: str = "") -> tuple[torch.nn.Module, SimpleNamespace]:
    """(draft with its target, arguments) of a training command."""
    from megatron_dllm.training import model_provider

    argv = ["--dllm-mode", "dflash", "--dflash-target", folders[target][0], "--hf-model", folders["draft"]]
    with command(*argv, "--init-from-hf", "--dflash-num-anchors", "5", *options.split()) as args:
        return model_provider().eval(), args


def packed(lengths: list[int], index: int = 0):
    documents = [d for d, n in enumerate(lengths) for _ in range(n)]
    draw = torch.Generator().manual_seed(index)
    tokens = torch.randint(4, 90, (len(documents),), generator=draw)
    return make_sample(documents, torch.rand(len(documents), generator=draw) < 0.8, index, tokens)


def losses(model, samples: list, args, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(Σ of the weighted terms, undivided; nll of every scored row) of a batch."""
    rank = shard(dflash.layout(samples, length, args), [c.sample.index for c in samples], 1, 0, False)
    kept = {}

    def loss(score):
        terms = dflash.loss(score, args)
        kept.update(score.nll)
        return sum(term.weight * term.sum for term in terms)

    total = model(rank.tokens_BQ, rank.position_ids_BQ, rank.attributes_BQA, loss=loss, terms=rank.terms)
    return total, kept["dllm"]


@torch.no_grad()
def plain_costs(theirs, row: dflash.Anchored, args) -> dict[tuple[int, int], tuple[float, float]]:
    """{(block, place in it): (nll, KL from what the target predicts there)}: each document alone through transformers,
    each block alone through the draft in plain torch, with what comes before it and nothing else. Only the variants
    need a mask."""
    found, s, K, weights = {}, row.sample, BLOCK, tensors()
    for document in s.document_S.unique():
        start, ids = int((s.document_S == document).nonzero()[0]), s.tokens_S[s.document_S == document]
        states = theirs(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[layer + 1] for layer in LAYERS], -1)
        for block, anchor in enumerate(row.anchors_N[row.kept_N].tolist()):
            a = anchor - start
            if not 0 <= a < len(ids):
                continue
            known = int(row.prefix_N[block])
            inputs = torch.tensor([[*ids[a : a + known].tolist(), *[MASK] * (K - known)]])
            places = torch.arange(a + K)
            seen = places[None] > places[a:, None] - (args.dflash_window or len(ids) + K)
            if args.dflash_causal_block:
                seen &= places[None] <= places[a:, None]
            seen[:, a:] |= not args.dflash_causal_block
            hidden = plain_draft.hidden_states(
                weights, CONFIG, features[:, :a], theirs.get_input_embeddings()(inputs), places[None], seen[None]
            )
            logits, T = theirs.lm_head(hidden)[0], args.dflash_kl_temperature or 1.0
            p_log, q_log = ((x / T).log_softmax(-1) for x in (theirs.lm_head(states[-1])[0], logits))
            costs = -logits.log_softmax(-1)
            for k in range(known, K):
                if s.loss_mask_S[anchor + k]:
                    before = p_log[a + k - 1]
                    divergence = (before.exp() * (before - q_log[k])).sum().item()
                    found[block, k] = costs[k, ids[a + k]].item(), divergence
    return found


@pytest.mark.parametrize(("target", "variant"), [(TARGETS[0], v) for v in VARIANTS] + [(TARGETS[1], "")])
def test_the_loss_is_that_of_blocks_one_by_one(folders, target, variant):
    model, args = build(folders, target, VARIANTS[variant])
    rows = [dflash.corrupt(packed(n, i), Draws(5, i), args) for i, n in enumerate(([13], [4, 3, 12]))]
    with torch.no_grad():
        total, nll = losses(model, rows, args, 20)
    expected, weighted = {}, 0.0
    for b, row in enumerate(rows):
        share, T = args.dflash_kl_weight, args.dflash_kl_temperature or 1.0
        for (block, k), (cost, divergence) in plain_costs(folders[target][1], row, args).items():
            expected[block * BLOCK + k, b] = cost  # rows come by place, then by sample
            cost = (1 - share) * cost + share * T**2 * divergence
            weighted += cost * float(torch.tensor(-(k - int(row.prefix_N[block])) / args.dflash_loss_decay).exp())
    wanted = torch.tensor([cost for _, cost in sorted(expected.items())])
    assert len(nll) == len(wanted) > 8
    assert (nll - wanted).abs().max() < 1e-5 * wanted.max()
    assert total.item() == pytest.approx(weighted, rel=1e-6)


# --- what a block cannot see ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(folders, parallel_state):
    return build(folders, TARGETS[0])[0]


ARGS = flags(dllm_mask_token_id=MASK, dllm_pad_token_id=0, dflash_num_anchors=4)
SAMPLES = {
    "two blocks": ([12], [3, 5]),  # the second anchor lies in the first block
    "one block": ([12], [6]),
    "from the beginning": ([12], [0, 8]),
    "packed": ([7, 9], [2, 3, 7, 12]),
}


class Probe:
    """A model and a batch of one. `moved(...)`: [N, K] bool, rows whose logits are others, by however little, with
    other tokens at some places of its input, or other hidden states of the target at some places of the text."""

    def __init__(self, model, kind: str):
        lengths, anchors = SAMPLES[kind]
        self.model = model
        self.batch = dflash.layout([anchored(packed(lengths), anchors)], sum(lengths), ARGS)
        self.logits = self._through(self.batch.tokens_BQ)

    def _through(self, tokens_BQ):
        return self.model(tokens_BQ, self.batch.position_ids_BQ, self.batch.attributes_BQA)[0]

    def moved(self, token: int | None = None, state: int | None = None) -> torch.Tensor:
        tokens_BQ, original = self.batch.tokens_BQ.clone(), self.model.target.features
        if token is not None:
            tokens_BQ[0, token] = 4 + (tokens_BQ[0, token] + 7) % 80

        def features(*inputs):
            features_SBF = original(*inputs).clone()
            if state is not None:
                features_SBF[state] += 1
            return features_SBF

        self.model.target.features = features
        try:
            return (self._through(tokens_BQ) != self.logits).any(-1).unflatten(0, (-1, BLOCK))
        finally:
            del self.model.target.features


@pytest.mark.parametrize("what", ("token", "state"))
@pytest.mark.parametrize("kind", SAMPLES)
@torch.no_grad()
def test_a_block_sees_what_comes_before_its_anchor(model, kind, what):
    """One place of the text after the other: blocks of the same document with a later anchor move, in all their rows;
    all others stay, bit for bit."""
    lengths, anchors = SAMPLES[kind]
    document = [d for d, n in enumerate(lengths) for _ in range(n)]
    probe = Probe(model, kind)
    for place in range(sum(lengths)):
        rows = probe.moved(**{what: place})
        for block, anchor in enumerate(anchors):
            sees = place < anchor and document[place] == document[anchor]
            assert rows[block].all() if sees else not rows[block].any(), (place, anchor)


@pytest.mark.parametrize("causal", (False, True))
@torch.no_grad()
def test_a_block_sees_all_of_itself_and_no_other(folders, model, causal):
    if causal:
        model, _ = build(folders, TARGETS[0], "--dflash-causal-block")
    probe = Probe(model, "two blocks")
    for block in range(2):
        for slot in range(BLOCK):
            rows = probe.moved(token=12 + block * BLOCK + slot)
            assert not rows[1 - block].any()
            assert rows[block].tolist() == [not causal or k >= slot for k in range(BLOCK)]


@torch.no_grad()
def test_packed_documents_lose_what_they_would_alone(model):
    lengths, anchors = SAMPLES["packed"]
    whole = packed(lengths)
    together, _ = losses(model, [anchored(whole, anchors)], ARGS, len(whole))
    alone, start = 0.0, 0
    for n in lengths:
        own = slice(start, start + n)
        sample = make_sample([0] * n, whole.loss_mask_S[own], 0, whole.tokens_S[own])
        blocks = [a - start for a in anchors if start <= a < start + n]
        alone += losses(model, [anchored(sample, blocks)], ARGS, n)[0]
        start += n
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)


def test_too_little_text_weighs_nothing(model):
    """Fewer supervised tokens than two blocks: the same network runs, and its gradients are zeros."""
    sample = make_sample([0] * 12, [0] * 5 + [1] * 7, tokens=range(4, 16))
    row = dflash.corrupt(sample, Draws(1, 0), ARGS)
    batch = dflash.layout([row], 12, ARGS)
    assert not row.kept_N.any() and batch.terms["dllm"].count == 0 and batch.drafted == BLOCK
    model.zero_grad()
    total, nll = losses(model, [row], ARGS, 12)
    total.backward()
    assert total == 0 and len(nll) == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
    assert [n for n, _ in model.named_parameters() if "embedding" in n or "output_layer" in n] == []
    assert isinstance(model.target.model, DiffusionLM)
    assert not any(p.requires_grad or p.grad is not None for p in model.target.model.parameters())
