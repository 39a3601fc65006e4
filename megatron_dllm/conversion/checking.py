"""Do a Hugging Face folder and a Megatron checkpoint compute the same? The proof is in the logits, not the tensors (of
a draft, which has no head, in the hidden states)."""

import os
from argparse import Namespace
from dataclasses import dataclass

import torch

from megatron_dllm.checkpoint import iteration_folder
from megatron_dllm.conversion import plain_draft
from megatron_dllm.conversion.source import Source, family_of
from megatron_dllm.data.tokenizer import HUGGING_FACE
from megatron_dllm.generation.load import Plan, build, plan, saved_run
from megatron_dllm.models import get_family
from megatron_dllm.models.dflash_draft import rule_flags
from megatron_dllm.models.draft import lay_out, visible
from megatron_dllm.models.entries import flag
from megatron_dllm.models.family import PLAIN
from megatron_dllm.models.hf import read_config
from megatron_dllm.models.weights import target_layers
from megatron_dllm.modes import MODES
from megatron_dllm.modes.base import ANCHOR, CLEAN, NOISY, NUM_ATTRIBUTES, POSITION, STREAM, Rule
from megatron_dllm.modes.base import BLOCK as BLOCK_NUMBER

BLOCK = 8
RULES: dict[str, Rule] = {
    "full": lambda q, k: (q[..., POSITION] >= 0) & (k[..., POSITION] >= 0),
    "block-causal": lambda q, k: q[..., POSITION] // BLOCK >= k[..., POSITION] // BLOCK,
    "causal": lambda q, k: q[..., POSITION] >= k[..., POSITION],
}


@dataclass
class Comparison:
    """differences: largest |difference| of a logit by attention rule; largest: largest |logit|; tokens: compared;
    what: in place of logits."""

    differences: dict[str, float]
    largest: float
    tokens: int
    what: str = "logits"


def compare(
    path: str, load: str, step: int | None = None, text: str = "", trust_remote_code: bool = False
) -> Comparison:
    """Logits of both on `text`, in fp32, under three attention rules. Holds both models in memory.

    The folder's side is the transformers class that the family equals. For families of transformers it is filled with
    the folder's tensors by name; for those with code of their own, whose names transformers does not know, by our
    table: then this proves Megatron's network and the checkpoint, and the table has its proof in tests/parity. A draft
    is compared by name, with its network in plain torch, on random hidden states in place of `text`; a DiffusionGemma
    by the encoder's logits of the text and those of a random canvas behind it.
    Raises ValueError (one sentence) for a folder or checkpoint that cannot be read.
    """
    tokenizer = _moved_tokenizer(path, load, step)
    options = dict(tokenizer_model=tokenizer, trust_remote_code=trust_remote_code)
    planned = plan(load, step=step, with_target=False, **options)
    planned.args.bf16, planned.args.fp16, planned.args.params_dtype = False, False, torch.float32
    config = read_config(path)
    family = family_of(config)
    if family.draft != (target_layers(planned.args) is not None):
        kinds = ("a draft", "a whole model") if family.draft else ("a whole model", "a draft")
        raise ValueError(f"{path} is {kinds[0]} and {load} {kinds[1]}: they are not of one model.")
    if family.draft:
        return _compare_drafts(path, config, planned)
    ids = planned.tokenizer.encode(text)
    if not ids:
        raise ValueError("--text has no tokens: give a longer one.")
    tokens_BQ = torch.tensor([ids])
    if family.text_config is not None:
        return _compare_canvases(path, planned, tokens_BQ)
    theirs = reference_model(path)
    known = theirs.config.vocab_size
    if planned.args.vocab_size < known or max(ids) >= known:
        raise ValueError(
            f"{path} knows {known} tokens, {load} {planned.args.vocab_size} and its tokenizer needs {max(ids) + 1}: "
            "they are not of one model."
        )
    attributes_BQA = torch.zeros(1, len(ids), NUM_ATTRIBUTES, dtype=torch.int32)
    attributes_BQA[..., POSITION] = torch.arange(len(ids))
    mode = MODES[planned.args.dllm_mode]
    own_rule = mode.visible
    current = {"rule": own_rule}
    mode.visible = lambda q, k: current["rule"](q, k)
    try:
        ours = build(planned).model
    finally:
        mode.visible = own_rule
    differences, largest = {}, 0.0
    for name, rule in RULES.items():
        current["rule"] = rule
        allowed = rule(attributes_BQA[:, :, None], attributes_BQA[:, None])
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]
        with torch.no_grad():
            try:
                expected = theirs(input_ids=tokens_BQ, attention_mask=mask, use_cache=False).logits
            except Exception as error:  # whatever its code makes of a configuration
                raise ValueError(f"transformers cannot run {path} ({type(error).__name__}: {error}).") from error
            # attributes of their own, because masks are remembered by attributes
            logits = ours(tokens_BQ, torch.arange(len(ids))[None], attributes_BQA.clone())
        differences[name] = (logits[..., : expected.shape[-1]] - expected).abs().max().item()
        largest = max(largest, expected.abs().max().item())
    return Comparison(differences, largest, len(ids))


def _compare_canvases(path: str, planned: Plan, clean_1S: torch.Tensor) -> Comparison:
    """Encoder and canvas of both, by the released code's own masks and caches."""
    import transformers

    S, K = clean_1S.shape[1], min(32, planned.args.dllm_block_size)
    try:
        load = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained
        theirs = load(path, dtype=torch.float32, local_files_only=True).eval()
    except Exception as error:
        raise ValueError(f"transformers cannot load {path} ({type(error).__name__}: {error}).") from error
    known = theirs.config.get_text_config().vocab_size
    if planned.args.vocab_size < known or int(clean_1S.max()) >= known:
        raise ValueError(
            f"{path} knows {known} tokens, {planned.folder} {planned.args.vocab_size}: they are not of one model."
        )
    canvas_1K = torch.randint(0, known, (1, K), generator=torch.Generator().manual_seed(0))
    positions_1Q = torch.arange(S + K)[None]
    attributes_1QA = torch.zeros(1, S + K, ANCHOR + 1, dtype=torch.int32)
    attributes_1QA[..., POSITION] = attributes_1QA[..., ANCHOR] = positions_1Q
    attributes_1QA[:, :S, STREAM], attributes_1QA[:, S:, STREAM] = CLEAN, NOISY
    attributes_1QA[:, S:, BLOCK_NUMBER], attributes_1QA[:, S:, ANCHOR] = 1, S
    with torch.no_grad():
        out = theirs(input_ids=clean_1S, decoder_input_ids=canvas_1K)
        cap = theirs.final_logit_softcapping
        encoder = cap * torch.tanh(theirs.lm_head(out.encoder_last_hidden_state) / cap)
        logits = build(planned).model(torch.cat([clean_1S, canvas_1K], 1), positions_1Q, attributes_1QA)[..., :known]
    expected = dict(encoder=(logits[:, :S], encoder), canvas=(logits[:, S:], out.logits))
    differences = {name: (a - b).abs().max().item() for name, (a, b) in expected.items()}
    return Comparison(differences, max(b.abs().max().item() for _, b in expected.values()), S + K)


def _compare_drafts(path: str, config: dict, planned: Plan) -> Comparison:
    """Hidden states of both on random features and embeddings, of four blocks in two documents and padding."""
    family, args = family_of(config), planned.args
    theirs = family.read(config)
    if flags := rule_flags(args):
        raise ValueError(
            f"{planned.folder} was trained with {flags}, which the folder of a draft cannot say: {path} is another "
            "network, whatever its weights are."
        )
    for name in (*PLAIN, "dllm_block_size", "dllm_mask_token_id"):
        if theirs[name] != getattr(args, name, None):
            raise ValueError(
                f"{path} has {flag(name)} {theirs[name]}, {planned.folder} {getattr(args, name, None)}: they are not "
                "of one model."
            )
    folder = Source(path, family, args).folder
    weights = {key: folder.read(key, 0, shape[0]).float() for key, shape in folder.shapes.items()}
    documents_BS = torch.tensor([0] * 20 + [1] * 16 + [-1] * 4)[None]
    positions_BS = torch.tensor([*range(20), *range(16), *range(4)])[None]
    anchors_BN, block = torch.tensor([[3, 17, 20, 30]]), args.dllm_block_size
    positions_BT, attributes_BTA = lay_out(anchors_BN, block, positions_BS, documents_BS)
    draw = torch.Generator().manual_seed(0)
    S, Q = documents_BS.numel(), anchors_BN.numel() * block
    features_BSF = torch.randn(1, S, len(target_layers(args)) * args.hidden_size, generator=draw)
    embeddings_BQD = torch.randn(1, Q, args.hidden_size, generator=draw)
    allowed = visible(attributes_BTA[:, S:, None], attributes_BTA[:, None])
    with torch.no_grad():
        expected = plain_draft.hidden_states(weights, config, features_BSF, embeddings_BQD, positions_BT, allowed)
        inputs = (x.transpose(0, 1) for x in (features_BSF, embeddings_BQD))
        ours = build(planned).model(*inputs, positions_BT, attributes_BTA).transpose(0, 1)
    difference = (ours - expected).abs().max().item()
    return Comparison({"draft": difference}, expected.abs().max().item(), Q, "hidden states")


def _moved_tokenizer(path: str, load: str, step: int | None) -> str | None:
    """The folder, if the run's tokenizer came from one that is no longer where it was."""
    folder = iteration_folder(load, step)
    if folder is None or not os.path.isdir(folder):
        return None  # `plan` says so
    args = saved_run(folder)
    is_there = args.tokenizer_type != HUGGING_FACE or os.path.isdir(args.tokenizer_model)
    return None if is_there else path


def reference_model(path: str) -> torch.nn.Module:
    """The transformers model that a folder of any family equals, in fp32.

    Its attention is computed as ours is on a CPU (sdpa): hidden values of real models reach 10^4, and attending in
    directions that they were not trained for, they turn rounding into differences of 4e-3 in a logit.
    """
    import transformers

    config = read_config(path)
    family = family_of(config)
    stock = get_family(family.stock or family.name)
    args = Namespace(**family.read(config))
    stock_config = dict(config) if stock is family else stock.write(args)
    stock_config.pop("auto_map", None)
    settings = getattr(transformers, stock.transformers_config)(**stock_config, attn_implementation="sdpa")
    with torch.device("meta"):
        model = getattr(transformers, stock.architecture)(settings)
    source, mapping = Source(path, family, args), stock.mapping(args)
    state = {}
    for key, places in mapping.places.items():
        pieces = []
        for name, start, rows in sorted(places, key=lambda place: (place[2].index or 0, place[2].start)):
            pieces.append(source.read(name, start, start + rows.stop - rows.start).float())
        state[key] = torch.cat(pieces).view(mapping.hf[key])
    return _filled(model, state, settings)


def _filled(model, state: dict, settings) -> torch.nn.Module:
    """from_pretrained with tensors instead of a folder: transformers itself fuses experts and ties heads."""
    return type(model).from_pretrained(None, config=settings, state_dict=state, dtype=torch.float32).eval()
