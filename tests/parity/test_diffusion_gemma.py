"""DiffusionGemma against transformers' class, in float64: logits, loss and every gradient."""

from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter

from megatron_dllm.conversion.source import Source, load_into
from megatron_dllm.models import dlm, gemma_layers, get_family
from megatron_dllm.models import gemma as gemma_module
from megatron_dllm.models.gemma import DiffusionGemma
from megatron_dllm.models.gemma_layers import Shape
from megatron_dllm.models.hf import read_config
from megatron_dllm.modes.base import BLOCK, CLEAN, POSITION, STREAM
from tests import gemma

pytestmark = pytest.mark.usefixtures("parallel_state")
HEADS = {
    "2, 1": dict(),
    "2, 2": dict(num_global_key_value_heads=2),
    "4, 4": dict(num_key_value_heads=4, num_global_key_value_heads=4),
}


def ours(path: str, dtype=torch.float64, rule=gemma.rule, **changes) -> DiffusionGemma:
    family = get_family("diffusion_gemma")
    args = Namespace(**family.read(read_config(path)))
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=args.layernorm_epsilon,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        transformer_impl="local",
        num_moe_experts=args.num_experts,
        moe_router_topk=args.moe_router_topk,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp64" if dtype == torch.float64 else "fp32",
        params_dtype=dtype,
        **changes,
    )
    model = DiffusionGemma(
        config,
        rule=rule,
        shape=Shape.of(args),
        train_router=True,
        vocab_size=96,
        true_vocab_size=args.vocab_size,
        max_sequence_length=256,
        rotary_base=args.rotary_base,
    )
    load_into(model.to(dtype), Source(path, family, args), seed=1)
    return model.eval()


def run(model, data, conditioned: bool):
    """([B, Q, V] logits, loss) as `gemma.expected` defines it."""
    inputs = data.tokens_BQ, data.position_ids_BQ, data.attributes_BQA
    soft = None
    if conditioned:
        with torch.no_grad():
            states = []
            handle = model.decoder.register_forward_hook(lambda module, arguments, out: states.append(out))
            model(*inputs)
            handle.remove()
        rows = data.known_B.nonzero()[:, 0]
        soft = model.canvas_states(states[0], gemma.K)[:, rows], rows
    logits_BQV = model(*inputs, soft=soft)[..., : gemma.VOCABULARY]
    diffusion, causal = [], []
    for b in range(len(data.prompts_B)):
        start, end = data.prompts_B[b] + data.chosen_B[b] * gemma.K, data.clean_B[b]
        canvas = logits_BQV[b, data.length : data.length + data.sizes_B[b]]
        diffusion.append(F.cross_entropy(canvas, data.tokens_BQ[b, start : start + data.sizes_B[b]], reduction="none"))
        causal.append(F.cross_entropy(logits_BQV[b, : end - 1], data.tokens_BQ[b, 1:end], reduction="none"))
    return logits_BQV, torch.cat(diffusion).mean() + torch.cat(causal).mean()


def differences(logits_BQV, canvases, encoders, data) -> tuple[float, float]:
    """(of canvas rows, of encoder rows), the largest over all rows."""
    canvas = [(logits_BQV[b, data.length : data.length + len(c)] - c).abs().max() for b, c in enumerate(canvases)]
    encoder = [(logits_BQV[b, : len(e)] - e).abs().max() for b, e in enumerate(encoders)]
    return float(torch.stack(canvas).max()), float(torch.stack(encoder).max())


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_logits_loss_and_every_gradient_are_those_of_transformers(tmp_path, heads, conditioned):
    path, data = gemma.make_folder(str(tmp_path / "hf"), **HEADS[heads]), gemma.batch()
    their_model = gemma.theirs(path)
    with gemma.float64():
        model = ours(path)
        canvases, encoders, their_loss = gemma.expected(their_model, data, conditioned)
        logits_BQV, loss = run(model, data, conditioned)
        assert max(differences(logits_BQV, canvases, encoders, data)) < 1e-10
        assert abs(float(loss - their_loss)) < 1e-11
        loss.backward()
        their_loss.backward()
        theirs = {name: p.grad for name, p in their_model.named_parameters(remove_duplicate=False)}
        family = get_family("diffusion_gemma")
        mapping = family.mapping(Namespace(**family.read(read_config(path))))
        compared = 0
        for name, parameter in model.named_parameters():
            rows = []
            for piece in mapping.megatron[name][1]:
                gradient = theirs[piece.key] if piece.index is None else theirs[piece.key][piece.index]
                rows.append(gradient[piece.start : piece.stop])
            wanted = torch.cat(rows)
            got = parameter.grad[: len(wanted)]  # without the vocabulary's padding
            silent = "self_conditioning" in name and not conditioned
            assert silent or wanted.abs().max() > 1e-6, name
            assert (got - wanted).abs().max() <= 1e-10 * max(1.0, float(wanted.abs().max())), name
            compared += 1
        assert compared == len(dict(model.named_parameters())) > 150


def own_window(query, key, rule, window):
    """Counted from the token itself, also on a canvas."""
    return rule(query, key) & ((key[..., STREAM] != CLEAN) | (query[..., POSITION] - key[..., POSITION] < window))


_within_window = gemma_layers.within_window


def wide_window(query, key, rule, window):
    return _within_window(query, key, rule, window + 1)


def sees_itself_clean(query, key):
    """A canvas sees the clean tokens of its own block."""
    later = query.clone()
    later[..., BLOCK] += (query[..., STREAM] != CLEAN).to(query.dtype)
    return gemma.rule(later, key) | gemma.rule(query, key)


class NormedValue(gemma_layers.GemmaAttention):
    def get_query_key_value_tensors(self, *inputs, **options):
        query, key, value = super().get_query_key_value_tensors(*inputs, **options)
        return query, key, key if self._shared else value


class HeadScale(gemma_layers.GemmaAttention):
    def __init__(self, *inputs, **options):
        super().__init__(*inputs, **options)
        self.core_attention.softmax_scale = self.hidden_size_per_attention_head**-0.5


class NormedRouting(gemma_layers.GemmaExperts):
    def forward(self, hidden, routed_by, padding):
        return super().forward(hidden, hidden, padding)


class UnscaledRouting(gemma_layers.GemmaRouter):
    def forward(self, hidden, padding_mask=None):
        normed = gemma_layers.rms(hidden, self.config.layernorm_epsilon) * self.scale
        probabilities, chosen = TopKRouter.forward(self, normed.contiguous(), padding_mask)
        return probabilities * self.per_expert_scale, chosen


class EqualExperts(gemma_layers.GemmaRouter):
    def forward(self, hidden, padding_mask=None):
        probabilities, chosen = super().forward(hidden, padding_mask)
        return probabilities / self.per_expert_scale, chosen


def of_the_rotated_part(self, base, percent, scaling):
    """Rotary exponents as --rotary-percent has them."""
    full, _ = dlm.frequencies(16, 1e6, 0.25)
    return torch.cat([dlm.frequencies(8, base)[0], F.pad(full, (0, 8 - len(full)))]), 1.0


def unnormed_values(x, eps):
    return x if x.dim() == 4 else F.rms_norm(x, x.shape[-1:], eps=eps)


MUTATIONS = {
    "window from the token itself": (gemma_layers, "within_window", own_window, "canvas"),
    "window one too wide": (gemma_layers, "within_window", wide_window, "both"),
    "a canvas sees its clean tokens": (None, None, sees_itself_clean, "canvas"),
    "values of normed keys": (gemma_layers, "GemmaAttention", NormedValue, "both"),
    "softmax scale of the head": (gemma_layers, "GemmaAttention", HeadScale, "both"),
    "experts chosen by what they compute on": (gemma_layers, "GemmaExperts", NormedRouting, "both"),
    "no 1/sqrt(D) in the router": (gemma_layers, "GemmaRouter", UnscaledRouting, "both"),
    "no factor of an expert": (gemma_layers, "GemmaRouter", EqualExperts, "both"),
    "exponents of the rotated part": (DiffusionGemma, "rotary_frequencies", of_the_rotated_part, "both"),
    "the exact gelu": (gemma_layers, "gelu_tanh", F.gelu, "both"),
    "no norm of values": (gemma_layers, "rms", unnormed_values, "both"),
    "no norm of an unconditioned canvas": (gemma_module, "rms", lambda x, eps: x, "canvas"),
}


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """(folder, batch, transformers' logits of canvases and encoders)."""
    path, data = gemma.make_folder(str(tmp_path_factory.mktemp("gemma") / "hf")), gemma.batch()
    model = gemma.theirs(path)
    with gemma.float64(), torch.no_grad():
        canvases, encoders, _ = gemma.expected(model, data, conditioned=True)
    return path, data, canvases, encoders


@torch.no_grad()
def moved(example, rule=gemma.rule, change=lambda model: None) -> tuple[float, float]:
    path, data, canvases, encoders = example
    with gemma.float64():
        model = ours(path, rule=rule)
        change(model)
        logits_BQV, _ = run(model, data, conditioned=True)
    return differences(logits_BQV, canvases, encoders, data)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_sees_what_is_easily_done_wrong(example, monkeypatch, name):
    owner, attribute, wrong, where = MUTATIONS[name]
    if owner is None:
        canvas, encoder = moved(example, rule=wrong)
    else:
        monkeypatch.setattr(owner, attribute, wrong)
        canvas, encoder = moved(example)
    assert canvas > 1e-2
    assert encoder < 1e-10 if where == "canvas" else encoder > 1e-3


def test_the_comparison_sees_whose_layer_scale_is_used(example):
    def swap(model):
        for layer in model.decoder.layers:
            layer.encoder_layer_scalar.copy_(layer.layer_scalar)

    assert min(moved(example, change=swap)) > 1e-2
