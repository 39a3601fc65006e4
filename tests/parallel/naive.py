"""The loss of every mode, token by token, from full logits: what all the clever paths must equal."""

import math

import torch

F = torch.nn.functional


def naive_loss(logits_BQV, rows, args, teacher_BSV=None) -> torch.Tensor:
    """Loss of a global batch. rows: its corrupted samples, in order; logits of their layout, padding at the end;
    teacher: logits of a draft's target, of the text."""
    modes = {"mdlm": mdlm, "bd3lm": bd3lm, "hybrid": hybrid, "idlm": idlm, "scdd": scdd, "dflash": dflash}
    more = (teacher_BSV,) if args.dllm_mode == "dflash" else ()
    return modes[args.dllm_mode](logits_BQV, rows, args, *more)


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
