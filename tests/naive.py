"""Slow twins: what the clever paths must equal, written as plainly as possible."""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

Tokens = Sequence[int] | NDArray[Any]


def naive_half(
    model: Any,
    separator: tuple[int, ...],
    first: list[int],
    target: list[int],
    end: tuple[int, ...] = (),
    scored: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One half of the forgetting curve as the authors' script does it: one forward over everything, all logits.

    Returns for the last `scored` tokens of the target, by default ceil(L/2): hits by argmax, nats, and how far the
    two largest logits are apart (a hit within rounding of a tie says nothing).
    """
    ids = [*separator, *first, *separator, *target, *end]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    begin = 2 * len(separator) + len(first)
    scored = scored or math.ceil(len(target) / 2)
    positions = torch.arange(begin + len(target) - scored, begin + len(target))
    expected, asked = logits[positions - 1], torch.tensor(ids)[positions]
    best = expected.topk(2).values
    nats = -expected.log_softmax(-1).gather(-1, asked[:, None])[:, 0]
    return expected.argmax(-1) == asked, nats, best[:, 0] - best[:, 1]


def log_p_after(model: Any, before: Tokens, tokens: Tokens) -> Tensor:
    """log-probabilities [tokens, vocabulary] at the tokens that follow `before`, from one forward over everything."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*before, *tokens]]), use_cache=False).logits[0]
    return logits[-len(tokens) - 1 : -1].double().log_softmax(-1)


def nats_after(model: Any, before: Tokens, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Nats of each of the tokens, which follow `before`, and whether it is the likeliest."""
    log_p, target = log_p_after(model, before, tokens), torch.tensor([*tokens])
    return -log_p.gather(-1, target[:, None])[:, 0], log_p.argmax(-1) == target


def naive_greedy(model: Any, ids: Tensor, max_new_tokens: int) -> Tensor:
    """The likeliest tokens after ids, each from one forward over everything so far."""
    text = ids
    with torch.no_grad():
        for _ in range(max_new_tokens):
            best = model(input_ids=text, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            text = torch.cat([text, best], 1)
    return text[:, ids.shape[1] :]


def greedy_until(model: Any, ids: Tokens, max_new_tokens: int, stop: Collection[int]) -> list[int]:
    """The likeliest tokens after ids, before the first that ends an answer."""
    new = naive_greedy(model, torch.tensor([[*ids]]), max_new_tokens)[0].tolist()
    return list(takewhile(lambda token: token not in stop, new))


def naive_llama(
    model: Any,
    ids: list[int],
    visible: Callable[[int, int], bool],
    distance: Callable[[int, int], int],
    *,
    inv_freq: Callable[[int], Tensor] | None = None,
    largest: int | None = None,
) -> Tensor:
    """Logits [time, vocabulary] of a Llama whose query i sees token j, at this distance, if `visible(i, j)`.

    Token by token, with keys before RoPE. `inv_freq(i)`: the frequencies of query i; `largest`: how
    many of the scores count.
    """
    config = model.config
    heads, group = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    dim = config.hidden_size // heads
    own = model.model.rotary_emb.inv_freq
    with torch.no_grad():
        hidden = model.model.embed_tokens(torch.tensor(ids))
        for layer in model.model.layers:
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (
                project(normed).view(len(ids), -1, dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            rows = []
            for i in range(len(ids)):
                seen = [j for j in range(i + 1) if visible(i, j)]
                far = torch.tensor([distance(i, j) for j in seen])
                angle = far[:, None] * (own if inv_freq is None else inv_freq(i))
                a, b = q[i, :, None, : dim // 2], q[i, :, None, dim // 2 :]
                turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
                keys, values = (x[seen].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))  # of each head
                scores = (turned * keys).sum(-1) / math.sqrt(dim)
                if largest is not None:
                    scores.scatter_(1, scores.argsort(1, descending=True)[:, largest:], -torch.inf)
                rows.append((scores.softmax(-1)[..., None] * values).sum(1).flatten())
            hidden = hidden + attention.o_proj(torch.stack(rows))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return model.lm_head(model.model.norm(hidden))


def by_pairs(
    model: Any,
    ids: Tensor,
    *,
    parts: Callable[[int, int], tuple[int, int]] = lambda i, j: (i, j),
    factor: Callable[[int], float] = lambda i: 1.0,
    inv_freq: Tensor | None = None,
    rotary_scale: float = 1.0,
    visible: Callable[[int, int], bool] = lambda i, j: True,
    weights: Callable[[int, list[int], Tensor], Tensor] = lambda i, seen, scores: scores.softmax(-1),
) -> Tensor:
    """Logits [time, vocabulary] of ids [1, time] for any family: query i and key j as if at positions `parts(i, j)`.

    All tokens are fed at position 0, where RoPE does nothing; every pair is then rotated on its own. A layer's own
    window hides what it always hides. `factor(i)` multiplies query i. `inv_freq` replaces the model's frequencies, and
    `rotary_scale` multiplies what is rotated, but not in layers with a window that have a RoPE of their own. Query i
    sees those of its keys that are `visible`, with `weights` of their scores [heads, seen].
    """
    time = ids.shape[1]
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]
    kinds = getattr(model.config, "layer_types", None)
    buffers = {name.rpartition(".")[2]: value for name, value in model.named_buffers() if "inv_freq" in name}

    positions = torch.tensor([[parts(i, j) if j <= i else (0, 0) for j in range(time)] for i in range(time)])
    factors = torch.tensor([factor(i) for i in range(time)])[:, None]

    def rotated(x: Tensor, position: Tensor, own: Tensor, scale: float) -> Tensor:
        """Each pair's own copy [heads, query, key, dim] at its position [query, key]."""
        pairs, angle = len(own), position[..., None] * own
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        turned = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return torch.cat([*(scale * part for part in turned), x[..., 2 * pairs :]], -1)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: Any = None, **options: Any) -> Any:
        group, window, cap = q.shape[1] // k.shape[1], windows[module.layer_idx], options.get("softcap")
        kind = (kinds or [""])[module.layer_idx % len(kinds or [""])]
        own, scale = buffers.get("inv_freq", buffers.get(f"{kind}_inv_freq")), 1.0
        if "inv_freq" in buffers or kind == "full_attention":
            own, scale = own if inv_freq is None else inv_freq, rotary_scale
        query = rotated(q[0, :, :, None].expand(-1, -1, time, -1), positions[..., 0], own, scale)
        key = rotated(k[0, :, None].expand(-1, time, -1, -1), positions[..., 1], own, scale).repeat_interleave(group, 0)
        products = factors * (query * key).sum(-1) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        products = products if cap is None else cap * torch.tanh(products / cap)
        out = torch.zeros(*q.shape[:3], v.shape[-1])
        for i in range(time):
            seen = [j for j in range(i + 1) if (window is None or i - j < window) and visible(i, j)]
            values = v[0, :, seen].repeat_interleave(group, 0)
            out[0, :, i] = (weights(i, seen, products[:, i, seen])[..., None] * values).sum(1)
        return out.transpose(1, 2), None

    before = model.config._attn_implementation
    AttentionInterface.register("by_pairs", attend)
    AttentionMaskInterface.register("by_pairs", lambda *args, **options: None)
    try:
        model.set_attn_implementation("by_pairs")
        with torch.no_grad():
            return model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)
        del AttentionInterface._global_mapping["by_pairs"], AttentionMaskInterface._global_mapping["by_pairs"]


def streaming(model: Any, ids: Tensor, window: int, sinks: int, stride: int = 1, ceiling: bool = False) -> Tensor:
    """Logits [time, vocabulary] of ids [1, time] by the original algorithms, for any family, on the model as it is.

    The cache is trimmed to the first `sinks` and the last `window` - 1 tokens before every step of `stride` tokens.
    The sinks' keys then stand where StreamingLLM has them, in front of the others without a gap, or, with
    `ceiling`, each `window` tokens away as in LM-Infinite: they are computed anew at that position by the model.
    """
    states: list[tuple[Tensor, Tensor]] = []  # keys, values of each layer, of all tokens so far
    logits = []
    for start in range(0, ids.shape[1], stride):
        positions = torch.arange(start, min(start + stride, ids.shape[1]))
        first = start - window + 1
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(states):
            if first <= (0 if ceiling else sinks):
                cache.update(keys, values, layer)
                continue
            far = min(sinks, first)
            anew = _sink_keys(model, ids, sinks, start, window, ceiling)[layer][:, :, :far]
            kept = torch.cat([anew, keys[:, :, first:]], 2), torch.cat([values[:, :, :far], values[:, :, first:]], 2)
            cache.update(*kept, layer)
        with torch.no_grad():
            out = model(input_ids=ids[:, positions], position_ids=positions[None], past_key_values=cache)
        logits.append(out.logits[0])
        new = [(layer.keys[:, :, -len(positions) :], layer.values[:, :, -len(positions) :]) for layer in cache.layers]
        old = states or [(k[:, :, :0], v[:, :, :0]) for k, v in new]
        states = [tuple(torch.cat(pair, 2) for pair in zip(*both, strict=True)) for both in zip(old, new, strict=True)]
    return torch.cat(logits)


def _sink_keys(model: Any, ids: Tensor, sinks: int, start: int, window: int, ceiling: bool) -> list[Tensor]:
    """Each layer's keys [1, heads, sinks, dim] of the first tokens, where the query at `start` meets them."""
    whose = torch.arange(sinks)
    shift = start - window - whose if ceiling else torch.full((sinks,), start - (sinks + window - 1))
    cache = DynamicCache()
    with torch.no_grad():  # row r gives the key of token r
        positions = shift[:, None] + whose
        ones = torch.ones(sinks, sinks, dtype=torch.long)
        ids = ids[:, :sinks].expand(sinks, -1)
        model(input_ids=ids, position_ids=positions, attention_mask=ones, past_key_values=cache)
    return [layer.keys[whose, :, whose].transpose(0, 1)[None] for layer in cache.layers]


def snapkv(
    model: Any, ids: Tensor, read: int, capacity: int, window: int, kernel: int, pool: str
) -> tuple[Tensor, list[list[list[int]]]]:
    """Logits [time - read, vocabulary] of ids [1, time] from `read` on, each after keys that SnapKV has chosen, and the
    positions of these keys by layer and head: whole attention matrices and plain loops, on the model as it is.

    The tokens from `read` on are fed one by one, with a mask for each head that leaves out the keys not chosen.
    """
    count = len(model.get_decoder().layers)
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]
    with torch.no_grad():
        whole = model(input_ids=ids[:, :read], output_attentions=True, use_cache=False).attentions
    chosen: list[list[list[int]]] = []
    for layer in range(count):
        weights, heads = whole[layer][0], model.config.num_attention_heads
        group = heads // (getattr(model.config, "num_key_value_heads", None) or heads)
        first = 0 if windows[layer] is None else max(0, read - windows[layer] + 1)  # the earliest key that is held
        held = range(first, read)
        chosen.append([])
        for key_head in range(heads // group):
            if len(held) <= capacity:
                chosen[layer].append(list(held))
                continue
            shares = weights[key_head * group : (key_head + 1) * group, read - window : read, first:].double()
            shares = shares / shares.sum(-1, keepdim=True)
            votes = (shares.sum((0, 1)) / group)[:-window].tolist()
            pooled = []
            for place in range(len(votes)):
                near = range(place - kernel // 2, place + kernel // 2 + 1)
                real = [votes[n] for n in near if 0 <= n < len(votes)]
                pooled.append(max(real) if pool == "max" else sum(real) / kernel)
            ranked = sorted(range(len(votes)), key=lambda place: (-pooled[place], place))[: capacity - window]
            chosen[layer].append(sorted(first + place for place in ranked) + list(held[-window:]))
    hidden = _heads_that_see(model, ids, read, chosen, windows)
    return hidden, chosen


def tova(model: Any, ids: Tensor, read: int, capacity: int) -> tuple[Tensor, list[list[list[int]]]]:
    """As `snapkv`: after the keys to which the last token read attends most, by the mean over the heads of a layer."""
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]
    with torch.no_grad():
        whole = model(input_ids=ids[:, :read], output_attentions=True, use_cache=False).attentions
    chosen = []
    for weights, window in zip(whole, windows, strict=True):
        held = range(0 if window is None else max(0, read - window + 1), read)
        votes = {j: sum(float(head[-1, j] / head[-1, held[0] :].sum()) for head in weights[0]) for j in held[:-1]}
        best = sorted(votes, key=lambda j: (-votes[j], j))[: capacity - 1]
        chosen.append([sorted([*best, read - 1]) if len(held) > capacity else list(held)])
    return _heads_that_see(model, ids, read, chosen, windows), chosen


def knorm(model: Any, ids: Tensor, read: int, capacity: int) -> tuple[Tensor, list[list[list[int]]]]:
    """As `snapkv`: after the keys of the smallest norm of each head, in steps of a 1024th of a doubling."""
    cache = DynamicCache(config=model.config)
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    with torch.no_grad():
        model(input_ids=ids[:, :read], past_key_values=cache)
    chosen: list[list[list[int]]] = []
    for layer in cache.layers:
        held = range(read - layer.keys.shape[2], read)
        chosen.append([])
        for keys in layer.keys[0]:
            squares = dict(zip(held, (keys**2).sum(-1).tolist(), strict=True))
            norms = {j: round(512 * math.log2(square)) for j, square in squares.items()}
            chosen[-1].append(sorted(sorted(norms, key=lambda j: (norms[j], j))[:capacity]))
    return _heads_that_see(model, ids, read, chosen, windows), chosen


def _heads_that_see(model: Any, ids: Tensor, read: int, chosen: list[list[list[int]]], windows: list[Any]) -> Tensor:
    """Logits of one forward in which the queries from `read` on see the chosen keys of their head and each other."""
    time, masks = ids.shape[1], []
    heads = model.config.num_attention_heads
    for kept, window in zip(chosen, windows, strict=True):
        visible = torch.ones(heads, time, time, dtype=torch.bool).tril()
        for head in range(heads):
            gone = set(range(read)) - set(kept[head * len(kept) // heads])
            visible[head, read:, sorted(gone)] = False
        if window is not None:
            visible &= torch.arange(time)[:, None] - torch.arange(time) < window
        masks.append(torch.zeros(1, heads, time, time).masked_fill_(~visible, torch.finfo(torch.float32).min))
    hooks = []
    for layer, mask in zip(model.get_decoder().layers, masks, strict=True):
        attention = next(m for name, m in layer.named_children() if "attn" in name or name == "attention")
        hooks.append(
            attention.register_forward_pre_hook(
                lambda module, args, kwargs, mask=mask: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
            )
        )
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, read - 1 :]
    for hook in hooks:
        hook.remove()
    return logits
