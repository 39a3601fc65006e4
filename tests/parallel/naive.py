"""The loss of every mode, token by token, from full logits: what all the clever paths must equal."""

import math

import torch

from tests.unit.canvas_cases import FILL, canvases

F = torch.nn.functional


def naive_loss(logits_BQV, rows, args, teacher_BSV=None) -> torch.Tensor:
    """Loss of a global batch. rows: its corrupted samples, in order; logits of their layout, padding at the end;
    teacher: logits of a draft's target, of the text."""
    modes = dict(mdlm=mdlm, bd3lm=bd3lm, hybrid=hybrid, idlm=idlm, scdd=scdd, dflash=dflash)
    modes |= dict(block_diffusion=block_diffusion)
    more = (teacher_BSV,) if args.dllm_mode == "dflash" else ()
    return modes[args.dllm_mode](logits_BQV, rows, args, *more)


def naive_logits(model, batch, args) -> torch.Tensor:
    """[B, Q, V] of the true vocabulary. With self-conditioning the first pass's logits, whole, make soft embeddings by
    a plain product, in place of the model's own."""
    inputs = batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA
    soft = {}
    if batch.self_conditioned_B is not None:
        with torch.no_grad():
            first_BQV = model(*inputs)[..., : args.vocab_size]
        canvas_Q = torch.arange(first_BQV.shape[1]) >= first_BQV.shape[1] - batch.canvas_rows
        known_BQ1 = (batch.self_conditioned_B[:, None] & canvas_Q)[..., None]
        table_VD = model.embedding.word_embeddings.weight[: args.vocab_size]
        soft_BQD = first_BQV.softmax(-1) @ table_VD * args.hidden_size**0.5 * known_BQ1
        model._soft_embeddings = lambda *unused: soft_BQD.transpose(0, 1)
        soft = dict(soft=(None, None))  # no one looks at it
    try:
        return model(*inputs, **soft)[..., : args.vocab_size]
    finally:
        vars(model).pop("_soft_embeddings", None)


def streams(logits_BQV, count: int):
    return logits_BQV.chunk(count, dim=1)


def divide(total, count):
    return total / max(1, int(count))


def same_place(logits_BSV, rows, weights) -> torch.Tensor:
    """Σ weight · nll of each token at its own place."""
    total = 0.0
    for logits_SV, row, weight_S in zip(logits_BSV, rows, weights, strict=True):
        n = len(row.sample)
        assert n <= len(logits_SV)
        total = total + (F.cross_entropy(logits_SV[:n], row.sample.tokens_S, reduction="none") * weight_S).sum()
    return total


def next_token(logits_BSV, rows, args) -> tuple[torch.Tensor, int]:
    """(Σ nll of supervised tokens from the place before, how many; all supervised ones as AutoModel counts)."""
    total, count = 0.0, 0
    for logits_SV, row in zip(logits_BSV, rows, strict=True):
        s = row.sample
        for i in range(len(s) - 1):
            if s.loss_mask_S[i + 1] and s.document_S[i] == s.document_S[i + 1]:
                total, count = total + F.cross_entropy(logits_SV[i], s.tokens_S[i + 1]), count + 1
    if args.dllm_compat == "automodel":
        count = sum(int(row.sample.loss_mask_S.sum()) for row in rows)
    return total, count


def diffusion_count(rows, args) -> int:
    counted = "loss_mask_S" if args.dllm_loss_normalization == "supervised" else None
    return sum(int((row.sample.loss_mask_S if counted else row.noised_S).sum()) for row in rows)


def mdlm(logits_BQV, rows, args):
    if getattr(args, "mdlm_shift_logits", False):
        return shifted(logits_BQV, rows, args)
    return divide(same_place(logits_BQV, rows, [row.weight_S for row in rows]), diffusion_count(rows, args))


def shifted(logits_BSV, rows, args):
    """mdlm whose logits predict the next token: those with a token before them in their document."""
    total, count = 0.0, 0
    for logits_SV, row in zip(logits_BSV, rows, strict=True):
        s = row.sample
        for i in range(1, len(s)):
            if s.document_S[i] == s.document_S[i - 1]:
                cost = F.cross_entropy(logits_SV[i - 1], s.tokens_S[i])
                total = total + row.weight_S[i] * cost
                count += int(s.loss_mask_S[i] if args.dllm_loss_normalization == "supervised" else row.noised_S[i])
    return divide(total, count)


def bd3lm(logits_BQV, rows, args):
    if not args.bd3lm_complementary_masks:
        return mdlm(streams(logits_BQV, 2)[0], rows, args)
    noisy, complement, _ = streams(logits_BQV, 3)
    rest = [(row.sample.loss_mask_S & ~row.noised_S) / (1 - row.level_S) for row in rows]
    total = same_place(noisy, rows, [row.weight_S for row in rows]) + same_place(complement, rows, rest)
    return divide(total, 2 * sum(int(row.sample.loss_mask_S.sum()) for row in rows))


def hybrid(logits_BQV, rows, args):
    noisy, clean = streams(logits_BQV, 2)
    return args.diffusion_loss_weight * mdlm(noisy, rows, args) + args.ar_loss_weight * divide(
        *next_token(clean, rows, args)
    )


def idlm(logits_BQV, rows, args):
    noisy, clean = streams(logits_BQV, 2)
    return divide(*next_token(noisy, rows, args)) + args.idlm_clean_loss_weight * divide(*next_token(clean, rows, args))


def dflash(logits_BQV, rows, args, teacher_BSV):
    K, total, count = args.dllm_block_size, 0.0, 0.0
    for b, (logits_QV, row) in enumerate(zip(logits_BQV, rows, strict=True)):
        s = row.sample
        blocks = zip(row.anchors_N.tolist(), row.kept_N.tolist(), row.prefix_N.tolist(), strict=True)
        for block, (anchor, kept, known) in enumerate(blocks):
            scored = [k for k in range(known, K) if kept and anchor + k < len(s) and s.loss_mask_S[anchor + k]]
            scored = [k for k in scored if s.document_S[anchor + k] == s.document_S[anchor]]
            nll = {k: F.cross_entropy(logits_QV[block * K + k], s.tokens_S[anchor + k]) for k in scored}
            if args.dflash_loss == "dpace":
                weights, count = dpace(nll, args.dflash_dpace_alpha), count + bool(scored)
            else:
                weights = {k: math.exp(-(k - known) / args.dflash_loss_decay) for k in scored}
                count += len(scored) if args.dllm_compat else sum(weights.values())
            for k in scored:
                cost = nll[k]
                if args.dflash_kl_weight:
                    both = teacher_BSV[b, anchor + k - 1], logits_QV[block * K + k]
                    cost = (1 - args.dflash_kl_weight) * cost + args.dflash_kl_weight * distilled(*both, args)
                total = total + weights[k] * cost
    return total / max(1, count)


def block_diffusion(logits_BQV, rows, args):
    """Of the chosen canvases only where they begin is taken from the mode."""
    K, begins = args.dllm_block_size, [[places[0] for places in row.places_NK.tolist()] for row in rows]
    C = max(1, *map(len, begins)) if args.dllm_variable_lengths else args.block_diffusion_canvases
    S = logits_BQV.shape[1] - C * K
    total, count, ar, pairs = 0.0, 0, 0.0, 0
    for logits_QV, row, chosen in zip(logits_BQV, rows, begins, strict=True):
        s = row.sample
        assert len(s) <= S
        for c, canvas in enumerate(canvas for canvas in canvases(s, args) if canvas[0] in chosen):
            for k, entry in enumerate(canvas):
                if entry is not None:
                    target = torch.tensor(args.dllm_eos_token_id) if entry is FILL else s.tokens_S[entry]
                    total, count = total + F.cross_entropy(logits_QV[S + c * K + k], target), count + 1
        for i in range(len(s) - 1):
            if s.document_S[i] == s.document_S[i + 1] >= 0:
                ar, pairs = ar + F.cross_entropy(logits_QV[i], s.tokens_S[i + 1]), pairs + 1
    return divide(total, count) + args.encoder_ar_loss_weight * divide(ar, pairs)


def dpace(nll: dict, alpha: float) -> dict[int, float]:
    """The weight of each scored place of a block, from its cost."""
    run, credit = 1.0, {}
    for k in sorted(nll):
        run *= (1 - alpha) * math.exp(-nll[k].item()) + alpha
        credit[k] = run
    return {j: sum(credit[m] for m in credit if m >= j) for j in credit}


def distilled(teacher_V, logits_V, args):
    """T² KL(p ‖ q)"""
    T = args.dflash_kl_temperature
    return T**2 * F.kl_div((logits_V / T).log_softmax(-1), (teacher_V / T).softmax(-1), reduction="sum")


def scdd(logits_BQV, rows, args):
    total, count = 0.0, 0
    for logits_SV, row in zip(logits_BQV, rows, strict=True):
        mask = torch.arange(logits_SV.shape[1]) == args.dllm_mask_token_id
        for i in row.sample.loss_mask_S.nonzero()[:, 0].tolist():
            q_V = logits_SV[i].double().masked_fill(mask, float("-inf")).softmax(-1)
            x, z, t = row.sample.tokens_S[i].item(), row.x_t_S[i].item(), row.level_S[i].item()
            total, count = total + args.scdd_timesteps * scdd_step(q_V, x, z, t, args), count + 1
    return divide(total, count)


def scdd_step(q_V, x: int, z: int, t: float, args) -> torch.Tensor:
    """KL(q(z_s | z_t = z, x) || p(z_s | z_t = z)), over all V values of z_s: Bayes' rule, and x or q for the clean
    token. q_V: float64, 0 at the mask."""
    M, V = args.dllm_mask_token_id, len(q_V)
    s = max(0.0, t - 1 / args.scdd_timesteps)
    s = 0.0 if s < 1e-3 / args.scdd_timesteps else s  # levels are float32
    clean_s, uniform_s = scdd_shares(s, args)
    clean_t, uniform_t = scdd_shares(t, args)
    survives = (clean_t + uniform_t) / (clean_s + uniform_s)  # the visible of a step that are not absorbed
    stays = clean_t / (clean_t + uniform_t) / (clean_s / (clean_s + uniform_s))  # those of them that do not jump
    likelihood = torch.full((V,), 1 - survives if z == M else survives * (1 - stays) / (V - 1), dtype=torch.float64)
    if z != M:
        likelihood[z] += survives * stays
    likelihood[M] = float(z == M)

    def posterior(clean_V):
        prior = clean_s * clean_V + uniform_s / (V - 1)
        prior = prior.where(torch.arange(V) != M, 1 - clean_s - uniform_s)
        return prior * likelihood / (prior * likelihood).sum()

    true, model = posterior(F.one_hot(torch.tensor(x), V).double()), posterior(q_V)
    possible = true > 0
    return (true[possible] * (true[possible] / model[possible]).log()).sum()


def scdd_shares(t: float, args) -> tuple[float, float]:
    """(clean, uniform) at level t."""
    R, peak = args.scdd_max_ratio, args.scdd_peak_time
    a, b = args.scdd_gamma_shape * peak, args.scdd_gamma_shape * (1 - peak)
    c = R / (1 - R) * t**a * (1 - t) ** b / (peak**a * (1 - peak) ** b)
    return (1 - t) / (1 + c), c / (1 + c)
