"""Mode dflash: anchors, blocks, masks, loss and metrics equal published numbers."""

import pytest
import torch

from megatron_dllm.data.sample import Sample
from megatron_dllm.models.dflash import rule
from megatron_dllm.models.draft import lay_out
from megatron_dllm.modes import dflash
from megatron_dllm.noise import Draws
from tests.unit.block_cases import MASK, golden, make_sample
from tests.unit.dflash_cases import anchored, flags, scored

# --- anchors and blocks -----------------------------------------------------------------------------------------------


def rng(case: dict, skip: int) -> torch.Generator:
    """The published draws are one tensor for a batch: a row's begin after `skip` of them."""
    g = torch.Generator().manual_seed(case["seed"])
    torch.rand(skip, generator=g)
    return g


def check_blocks(case: dict, samples: list[Sample], drawn: list, block_ids: list | None = None):
    """Anchors as drawn, then tokens, targets, masks and positions of the layout, against the published rows."""
    K, found = case["block"], []
    for sample, (anchors_N, kept_N) in zip(samples, drawn, strict=True):
        found.append(anchored(sample, anchors_N.tolist(), kept_N.tolist()))
    length, N = max(map(len, samples)), len(found[0].anchors_N)
    batch = dflash.layout(found, length, flags(dllm_block_size=K, dflash_num_anchors=N, dllm_mask_token_id=99))
    rows = batch.drafted // K  # of N, those that some row keeps
    of = lambda x_BQ: x_BQ[:, length:].unflatten(1, (rows, K))
    published = lambda name, width: torch.tensor(case[name]).view(len(samples), -1, width)[:, :rows]
    targets, masks = ("targets", "mask") if "targets" in case else ("target_ids", "block_mask")
    width = K - 1 if "targets" in case else K
    weights = of(batch.terms["dllm"].weights_BQ)
    assert torch.equal((weights[..., 1:] > 0).float(), published(masks, width)[..., width - K + 1 :])
    assert not weights[..., 0].any()  # the anchor is known
    right = of(batch.terms["dllm"].targets_BQ)[..., 1:] == published(targets, width)[..., width - K + 1 :]
    assert right[weights[..., 1:] > 0].all()
    if "block_ids" in case:
        assert torch.equal(of(batch.tokens_BQ), published("block_ids", K))
    return of(batch.position_ids_BQ)


STRATEGY = golden("19_anchors_strategy.json")


def strategy_samples(case: dict, lengths: list[int]) -> list[Sample]:
    out = []
    for b, n in enumerate(lengths):
        supervised = [1] * n if case["loss_mask"] is None else case["loss_mask"][b][:n]
        out.append(make_sample([0] * n, supervised, b, case["input_ids"][b][:n]))
    return out


@pytest.mark.parametrize("case", [c for c in STRATEGY if c["overlap"]], ids=lambda c: f"seed {c['seed']} N {c['N']}")
def test_published_overlapping_anchors(case):
    K, N, lengths = case["block"], case["N"], [sum(row) for row in case["attention_mask"]]
    samples = strategy_samples(case, lengths)
    drawn = []
    for b, sample in enumerate(samples):
        anchors_N, kept_N = dflash.overlap(sample, N, K, rng(case, b * N))
        # `corrupt` does this for every way
        drawn.append((anchors_N, kept_N & bool(sample.loss_mask_S.sum() >= 2 * K)))
        assert drawn[-1][0].tolist() == case["anchors"][b] and drawn[-1][1].int().tolist() == case["keep"][b]
    positions = check_blocks(case, samples, drawn)
    assert positions.tolist() == [[[a + k for k in range(K)] for a in row] for row in case["anchors"]]


@pytest.mark.parametrize(
    "case", [c for c in STRATEGY if not c["overlap"]], ids=lambda c: f"seed {c['seed']} N {c['N']}"
)
def test_published_anchors_without_overlap(case):
    """One draw serves a whole batch there, and its shortest row says how many blocks fit and how wide gaps are. Here a
    sample's anchors are its own, so only rows of that length can be equal: the longer one is cut to it, and each draws
    from the beginning."""
    K, N, shortest = case["block"], case["N"], min(sum(row) for row in case["attention_mask"])
    samples = strategy_samples(case, [shortest] * 2)
    drawn = [dflash.nonoverlap(sample, N, K, rng(case, 0)) for sample in samples]
    assert [anchors_N.tolist() for anchors_N, _ in drawn] == case["anchors"]
    assert [kept_N.int().tolist() for _, kept_N in drawn] == case["keep"]
    check_blocks(case, samples, drawn)


TRAINER = [case for case in golden("20_anchors_trainer.json") if "error" not in case]


@pytest.mark.parametrize("case", TRAINER, ids=lambda c: f"seed {c['seed']} N {c['num_anchors']} {c['doc_remaining']}")
def test_published_supervised_anchors(case):
    """Published, there are as many columns as the row with most anchors needs; here always N, the rest not kept."""
    K, N = case["block"], case["num_anchors"]
    columns = len(case["anchors"][0])
    documents = [0] * 4 + [1] * 6 + [2] * 2 if case["doc_remaining"] else [0] * 12
    samples, drawn = [], []
    for b, supervised in enumerate(case["loss_mask"]):
        samples.append(make_sample(documents, supervised, b, range(200 + 12 * b, 212 + 12 * b)))
        anchors_N, kept_N = dflash.supervised(samples[b], N, K, rng(case, b * (12 - K + 1)))
        assert anchors_N[:columns].tolist() == case["anchors"][b]
        assert kept_N.int().tolist() == case["keep"][b] + [0] * (N - columns)
        drawn.append((anchors_N, kept_N))
    positions = check_blocks(case, samples, drawn)
    # published without documents: here positions begin anew with each
    places = torch.tensor(case["position_ids"]).view(2, columns, K)[:, : positions.shape[1]]
    start = torch.tensor([documents.index(d) for d in documents])
    kept = torch.tensor(case["keep"]).bool()
    anchors = torch.tensor(case["anchors"])
    assert torch.equal(positions[kept], (places - start[anchors][..., None])[kept])


def test_no_valid_anchor_is_no_error():
    """NoValidAnchorsError ends the published step: here the sample weighs nothing (and other ranks go on)."""
    assert golden("20_anchors_trainer.json")[-1] == dict(error="NoValidAnchorsError")
    for documents in ([0] * 12, [0] * 3, []):
        sample = make_sample(documents, [0] * len(documents))
        anchors_N, kept_N = dflash.supervised(sample, 3, 4, Draws(1, 0).generator("x"))
        assert anchors_N.tolist() == [0] * 3 and not kept_N.any()


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("window", (None, 2))
def test_published_masks_of_the_variants(causal, window):
    """Rows are queries of three blocks of three, columns seven of context and the blocks. (Packed documents are in
    tests/parity/test_draft.py; both variants at once were not published.)"""
    cases = [
        c for c in golden("15_mask_dflash.json") if (c["causal"], c["sliding"], c["docs"]) == (causal, window, False)
    ]
    assert len(cases) == (not (causal and window))
    for case in cases:
        context = torch.arange(7)[None], torch.zeros(1, 7).long()
        _, attributes = lay_out(
            torch.tensor(case["anchors"]), case["block"], *context, torch.tensor(case["keep"]).bool()
        )
        allowed = rule(causal, window)(attributes[0, 7:, None], attributes[0, None])
        assert ["".join(map(str, row)) for row in allowed.int().tolist()] == case["rows"]


# --- losses and metrics -----------------------------------------------------------------------------------------------

GIVEN, *RESULTS = golden("11_loss_dflash.json")
# rows that are no whole number of blocks cannot come up here
RESULTS = [case for case in RESULTS if "error" not in case]


def blocks_of(K: int) -> list:
    """Samples whose blocks have the published targets: one unscored token, the anchor, before each K - 1 of them."""
    out = []
    for b, (targets, mask) in enumerate(zip(GIVEN["target"], GIVEN["block_mask"], strict=True)):
        tokens, supervised = [], []
        for start in range(0, len(targets), K - 1):
            tokens += [0, *targets[start : start + K - 1]]
            supervised += [0, *mask[start : start + K - 1]]
        out.append(anchored(make_sample([0] * len(tokens), supervised, b, tokens), [*range(0, len(tokens), K)]))
    return out


@pytest.mark.parametrize("published", RESULTS, ids=lambda c: f"{c.get('gamma')} {c.get('normalize')}")
def test_published_loss_and_accuracy(published):
    gamma = published.get("gamma", 7.0)
    # without a block size they mean one block of all rows, and do not measure accuracy (there is one here)
    K = published.get("block_size", 4) or 7
    logits = torch.tensor(GIVEN["logits"])
    if published.get("fused"):
        logits = torch.tensor(published["hidden"]) @ torch.tensor(published["W"]).T + torch.tensor(published["bias"])
    args = flags(
        dllm_block_size=K,
        dflash_num_anchors=6 // (K - 1),
        dflash_loss_decay=gamma or float("inf"),
        dllm_compat="automodel" if published.get("normalize") == "tokens" else None,
    )
    samples = blocks_of(K)
    batch = dflash.layout(samples, len(samples[0].sample), args)
    rows = torch.nn.functional.pad(logits.unflatten(1, (-1, K - 1)), (0, 0, 1, 0)).flatten(1, 2)
    total, count, measures = scored(batch, rows, args)
    divisor = count
    if published.get("normalize") == "tokens":
        assert count == 9
        divisor = published["num_tokens"] or 1
    elif published.get("fused"):
        divisor = 9
    assert (total / divisor).item() == pytest.approx(published["loss"], rel=2e-6)
    if published.get("correct") is not None:
        assert [measures[f"draft accuracy at {k}"] for k in range(1, K)] == [
            list(pair) for pair in zip(published["correct"], published["count"], strict=True)
        ]


def test_published_acceptance_length():
    case, _ = golden("25_acceptance_and_variable_prefix.json")
    tokens, supervised, logits = [], [], torch.zeros(1, 12, 10)
    for block, (targets, valid) in enumerate(zip(case["target"][0], case["valid"][0], strict=True)):
        tokens, supervised = tokens + [0, *targets], supervised + [0, *valid]
        for k, guess in enumerate(case["pred"][0][block], 1):
            logits[0, 4 * block + k, guess] = 9.0
    sample = anchored(make_sample([0] * 12, supervised, tokens=tokens), [0, 4, 8])
    *_, measures = scored(dflash.layout([sample], 12, flags()), logits, flags())
    # the published sum is that of runs with one more each
    assert measures["accepted tokens a block"] == [case["sum"], case["blocks"]]
    assert case["sum"] / case["blocks"] == case["mean"]
    assert case["sum"] == sum(case["per_block"][0]) + case["blocks"]


def test_published_variable_prefix():
    _, case = golden("25_acceptance_and_variable_prefix.json")
    tokens, supervised = (torch.tensor(case[name][0]).flatten().tolist() for name in ("target", "block_mask"))
    sample = anchored(make_sample([0] * 8, supervised, tokens=tokens), [0, 4], prefix_N=torch.tensor(case["prefix"][0]))
    args = flags(dflash_loss_decay=case["gamma"], dflash_loss="variable-prefix")
    batch = dflash.layout([sample], 8, args)
    assert batch.tokens_BQ[0, 8:].tolist() == [1, 2, MASK, MASK, 5, 6, 0, MASK]
    total, count, measures = scored(batch, torch.tensor(case["logits"]).flatten(1, 2), args)
    assert count == pytest.approx(case["weight"], rel=1e-6)
    assert (total / count).item() == pytest.approx(case["loss"], rel=2e-6)
    assert measures["draft accuracy"] == [case["correct"], case["valid"]]
    sum_, blocks = measures["accepted tokens a block"]
    assert sum_ / blocks == case["accept_len"]
