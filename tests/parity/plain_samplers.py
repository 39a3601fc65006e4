"""The published decoding loops, written plainly over a transformers model: one sequence, no cache, one decision after
the other. `MASK` is never written, but counts in probabilities, as in our loops.
"""

import math

import torch

MASK, EOS = 2, 1


@torch.no_grad()
def logits_of(model, tokens, visible):
    """[n, V] float64; visible(q, k): may place q attend to place k?"""
    n = len(tokens)
    mask = torch.full((1, 1, n, n), torch.finfo(torch.float32).min)
    for q in range(n):
        for k in range(n):
            if visible(q, k):
                mask[0, 0, q, k] = 0
    return model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0].double()


def best(row):
    """(probability, id) of the likeliest token that is not the mask."""
    probabilities = row.softmax(-1)
    allowed = probabilities.clone()
    allowed[MASK] = 0
    return allowed.max().item(), int(allowed.argmax())


def shares(count, steps):
    return [count // steps + (step < count % steps) for step in range(steps)]


def commit(tokens, proposals, quota, threshold):
    """Write the `quota` most probable of {place: (probability, id)}, or all above the threshold if these are more."""
    order = sorted(proposals, key=lambda place: -proposals[place][0])
    above = [place for place in order if threshold is not None and proposals[place][0] >= threshold]
    for place in above if len(above) >= quota else order[:quota]:
        tokens[place] = proposals[place][1]


def masked(tokens, first, last):
    return [place for place in range(first, last) if tokens[place] == MASK]


def llada(model, prompt, new, length, steps, threshold=None):
    tokens, forwards = prompt + [MASK] * new, 0
    for first in range(len(prompt), len(tokens), length):
        last = min(first + length, len(tokens))
        for quota in shares(last - first, min(steps, last - first)):
            if left := masked(tokens, first, last):
                logits, forwards = logits_of(model, tokens, lambda q, k: True), forwards + 1
                commit(tokens, {place: best(logits[place]) for place in left}, quota, threshold)
    return tokens[len(prompt) :], forwards


def dream(model, prompt, new, steps, algorithm):
    """Logits are shifted by one; the last step writes what is left. Steps that write nothing are not counted."""
    tokens, forwards = prompt + [MASK] * new, 0
    times = torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64).tolist()
    for i in range(steps):
        left = masked(tokens, 0, len(tokens))
        logits = logits_of(model, tokens, lambda q, k: True)
        count = int(len(left) * (1 - times[i + 1] / times[i])) if i < steps - 1 else len(left)
        trust = {}
        for place in left:
            row = logits[max(0, place - 1)].clone()
            row[MASK] = -torch.inf
            p = row.softmax(-1)
            two = p.sort(descending=True).values[:2]
            entropy = -sum(x * x.log() for x in p if x > 0)
            trust[place] = dict(
                maskgit_plus=best(logits[max(0, place - 1)])[0], topk_margin=two[0] - two[1], entropy=-entropy
            )[algorithm]
        for place in sorted(left, key=lambda place: -trust[place])[:count]:
            tokens[place] = best(logits[max(0, place - 1)])[1]
        forwards += count > 0
    return tokens[len(prompt) :], forwards


def llada2(model, prompt, new, length, steps, threshold=None, editing=None, causal=False, origin=0):
    """Blocks from `origin`; the finished ones attend block by block (or causally). editing: LLaDA2.1's threshold."""
    tokens, forwards = prompt + [MASK] * new, 0
    block = lambda place: (place - origin) // length
    for number in range(block(len(prompt)), block(len(tokens) - 1) + 1):
        begin = max(0, number * length + origin)
        first, last = max(len(prompt), begin), min(begin + length, len(tokens))

        def visible(q, k, begin=begin):
            return q >= begin or (k <= q if causal else block(k) <= block(q))

        quotas = iter(shares(length, min(steps, length)))
        while True:
            left = masked(tokens, first, last)
            logits, forwards = logits_of(model, tokens[:last], visible), forwards + 1
            edits = {}
            for place in set(range(first, last)) - set(left):
                probability, token = best(logits[place])
                if editing is not None and token != tokens[place] and probability > editing:
                    edits[place] = token
            if left:
                quota = 1 if editing is not None else next(quotas)
                commit(tokens, {place: best(logits[place]) for place in left}, quota, threshold)
            for place, token in edits.items():
                tokens[place] = token
            if not masked(tokens, first, last) and not edits:
                break
    return tokens[len(prompt) :], forwards


def ar(model, prompt, new):
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(best(logits_of(model, tokens, lambda q, k: k <= q)[-1])[1])
    return tokens[len(prompt) :], new


def nemotron(model, prompt, new, length, threshold=None):
    """The causal head writes a block's first token, the block is filled in both directions."""
    tokens, forwards = list(prompt), 0
    while len(tokens) < len(prompt) + new:
        begin = len(tokens)
        forwards += 1
        tokens.append(best(logits_of(model, tokens, lambda q, k: k <= q)[-1])[1])
        tokens += [MASK] * min(length - 1, len(prompt) + new - len(tokens))
        while left := masked(tokens, begin, len(tokens)):
            logits = logits_of(model, tokens, lambda q, k, begin=begin: q >= begin or k <= q)
            forwards += 1
            proposals = {place: best(logits[place]) for place in left}
            commit(tokens, proposals, 1, threshold)
    return tokens[len(prompt) :], forwards


def canvases(model, prompt, new, length, steps, t_min, t_max, bound, stable, confident, draws):
    """Canvases of random ids behind causal text (DiffusionGemma, without self-conditioning). draws: random numbers."""
    text, forwards, known = list(prompt), 0, model.config.vocab_size
    noise = lambda: [int(u * known) for u in draws.uniform("noise", length).tolist()]
    while len(text) < len(prompt) + new:
        n, canvas, history = len(text), noise(), []
        for left in range(steps, 0, -1):
            rows = logits_of(model, text + canvas, lambda q, k, n=n: k <= q if q < n else True)[n:]
            forwards += 1
            p = (rows / (t_min + (t_max - t_min) * left / steps)).softmax(-1).tolist()
            entropies = [-sum(x * math.log(x) for x in row if x > 0) for row in p]
            drawn = []
            for row, u in zip(p, draws.uniform("tokens", length).tolist(), strict=True):
                id, below = 0, row[0]
                while below <= u and id < known - 1:
                    id += 1
                    below += row[id]
                drawn.append(id)
            fresh, total = noise(), 0.0
            for place in sorted(range(length), key=lambda place: entropies[place]):
                if total <= bound:
                    fresh[place] = drawn[place]
                total += entropies[place]
            canvas = fresh
            history.append([max(range(known), key=lambda id: row[id]) for row in p])
            same = history[-stable - 1 :] if len(history) > stable else []
            if same and all(one == history[-1] for one in same) and sum(entropies) / length < confident:
                break
        text += history[-1]
    return text[len(prompt) : len(prompt) + new], forwards


@torch.no_grad()
def fast_dllm(model, prompt, new, length, threshold, dual):
    """Keys and values of everything before the block, or around it, are those of the block's first step."""
    from transformers import DynamicCache

    tokens, forwards = prompt + [MASK] * new, 0
    n = len(tokens)

    def run(places, cache):
        mask = torch.zeros(1, 1, len(places), n)
        ids = torch.tensor([[tokens[place] for place in places]])
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=torch.tensor([places]),
            past_key_values=cache,
            use_cache=True,
        )
        return dict(zip(places, out.logits[0].double(), strict=True)), out.past_key_values

    for first in range(len(prompt), n, length):
        last = min(first + length, n)
        logits, cache = run(list(range(n)), DynamicCache())
        inside = list(range(first, last if dual else n))
        outside = torch.tensor([place for place in range(n) if place not in inside])
        held = [(layer.keys[:, :, outside], layer.values[:, :, outside]) for layer in cache.layers]
        forwards += 1
        while True:
            proposals = {place: best(logits[place]) for place in masked(tokens, first, last)}
            commit(tokens, proposals, 1, threshold)
            if not masked(tokens, first, last):
                break
            cache = DynamicCache()
            for i, (keys, values) in enumerate(held):
                cache.update(keys, values, i)
            logits, _ = run(inside, cache)
            forwards += 1
    return tokens[len(prompt) :], forwards
