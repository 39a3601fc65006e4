"""The loss of every mode, token by token, from full logits: what all the clever paths must equal."""

import torch

F = torch.nn.functional


def naive_loss(logits_BQV, rows, args) -> torch.Tensor:
    """Loss of a global batch. rows: its corrupted samples, in order; logits of their layout, padding at the end."""
    return {"mdlm": mdlm, "bd3lm": bd3lm, "hybrid": hybrid, "idlm": idlm}[args.dllm_mode](logits_BQV, rows, args)


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


def next_token(logits_BSV, rows) -> tuple[torch.Tensor, int]:
    """(Σ nll of supervised tokens from the place before, how many)."""
    total, count = 0.0, 0
    for logits_SV, row in zip(logits_BSV, rows, strict=True):
        s = row.sample
        for i in range(len(s) - 1):
            if s.loss_mask_S[i + 1] and s.document_S[i] == s.document_S[i + 1]:
                total, count = total + F.cross_entropy(logits_SV[i], s.tokens_S[i + 1]), count + 1
    return total, count


def diffusion_count(rows, args) -> int:
    counted = "loss_mask_S" if args.dllm_loss_normalization == "supervised" else None
    return sum(int((row.sample.loss_mask_S if counted else row.noised_S).sum()) for row in rows)


def mdlm(logits_BQV, rows, args):
    return divide(same_place(logits_BQV, rows, [row.weight_S for row in rows]), diffusion_count(rows, args))


def bd3lm(logits_BQV, rows, args):
    if not args.bd3lm_complementary_masks:
        return mdlm(streams(logits_BQV, 2)[0], rows, args)
    noisy, complement, _ = streams(logits_BQV, 3)
    rest = [(row.sample.loss_mask_S & ~row.noised_S) / (1 - row.level_S) for row in rows]
    total = same_place(noisy, rows, [row.weight_S for row in rows]) + same_place(complement, rows, rest)
    return divide(total, 2 * sum(int(row.sample.loss_mask_S.sum()) for row in rows))


def hybrid(logits_BQV, rows, args):
    noisy, clean = streams(logits_BQV, 2)
    return args.diffusion_loss_weight * mdlm(noisy, rows, args) + args.ar_loss_weight * divide(*next_token(clean, rows))


def idlm(logits_BQV, rows, args):
    noisy, clean = streams(logits_BQV, 2)
    return divide(*next_token(noisy, rows)) + args.idlm_clean_loss_weight * divide(*next_token(clean, rows))
