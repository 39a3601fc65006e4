"""DiffusionGemma against transformers' class, in float64: logits, loss and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megatron_dllm.conversion.source import Source, load_into
from megatron_dllm.models import get_family
from megatron_dllm.models.gemma import DiffusionGemma
from megatron_dllm.models.gemma_layers import Shape
from megatron_dllm.models.hf import read_config
from tests import gemma

pytestmark = pytest.mark.usefixtures("parallel_state")
HEADS = {"2, 1": dict(), "2, 2": dict(num_global_key_value_heads=2), "4, 4": dict(num_key_value_heads=4, num_global_key_value_heads=4)}


def ours(path: str, dtype=torch.float64, rule=gemma.rule, **changes) -> DiffusionGemma:
    from argparse import Namespace

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
        soft = model.canvas_states(states[0], gemma.K), data.known_B
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
        from argparse import Namespace

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
