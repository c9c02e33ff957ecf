"""Attention as one operator (operator set 23 and later), and the rotation of its positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import inf, sqrt

import torch
import torch.nn.functional as F

from worker.engines.torch_operators.node import Node, Outputs, Tensor


def _heads(x: Tensor, count: int | None) -> Tensor:
    """Bring (batch, sequence, hidden) to (batch, head, sequence, hidden of a head)."""
    return x if x.dim() == 4 else x.unflatten(2, (count, -1)).transpose(1, 2)


def _attention(
    node: Node,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Sequence[Tensor]:
    is_flat = q.dim() == 3
    q = _heads(q, node.get("q_num_heads"))
    k, v = (_heads(each, node.get("kv_num_heads")) for each in (k, v))
    before = 0
    if past_k is not None and past_v is not None:
        before = past_k.shape[2]
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    present = [k, v]
    allowed = _allowed(node, q, k, mask, lengths, before)
    if q.shape[1] != k.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scale = node.get("scale") or 1 / sqrt(q.shape[3])
    scores: list[Tensor] = []
    if len(node.outputs) < 4 and not node.get("softcap", 0.0):
        y = F.scaled_dot_product_attention(q, k, v, allowed, scale=scale)
    else:
        y, scores = _attended(node, q, k, v, allowed, scale)
    if is_flat:
        y = y.transpose(1, 2).flatten(2)
    return [y, *present, *scores]


def _allowed(
    node: Node, q: Tensor, k: Tensor, mask: Tensor | None, lengths: Tensor | None, before: int
) -> Tensor | None:
    """What is added to the scores: a mask's numbers, and minus infinity where nothing may be seen."""
    added: list[Tensor] = []
    if mask is not None:
        numbers = mask if mask.is_floating_point() else _hidden(q, ~mask)
        missing = k.shape[2] - mask.shape[-1]
        added.append(F.pad(numbers, (0, missing), value=-inf) if missing else numbers)
    places = torch.arange(k.shape[2], device=q.device)
    rows = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + before
    if lengths is not None:
        added.append(_hidden(q, places >= lengths.view(-1, 1, 1, 1)))
        # The new rows are the last of those that count.
        rows = rows + (lengths - q.shape[2]).view(-1, 1, 1, 1)
    left, right = node.get("left_window_size", -1), node.get("right_window_size", -1)
    if left >= 0:
        added.append(_hidden(q, places < rows - left))
    if right >= 0:
        added.append(_hidden(q, places > rows + right))
    if node.get("is_causal", 0):
        added.append(_hidden(q, places > rows))
    return reduce(torch.add, added) if added else None


def _hidden(q: Tensor, where: Tensor) -> Tensor:
    return q.new_zeros(where.shape).masked_fill(where, -inf)


def _attended(
    node: Node, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Attend step by step; returns the outputs, and the scores after the step that the node wants."""
    raw = torch.matmul(q * sqrt(scale), k.transpose(2, 3) * sqrt(scale))
    cap = node.get("softcap", 0.0)
    capped = cap * torch.tanh(raw / cap) if cap else raw
    masked = capped if allowed is None else capped + allowed
    # Who may see nothing gets zeros.
    blind = masked.amax(3, keepdim=True) == -inf
    weights = torch.softmax(masked, 3).masked_fill(blind, 0.0)
    wanted = (raw, capped, masked, weights)[node.get("qk_matmul_output_mode", 0)]
    return torch.matmul(weights, v), [wanted]


def _rotary(
    node: Node, x: Tensor, cosines: Tensor, sines: Tensor, places: Tensor | None = None
) -> Tensor:
    is_flat = x.dim() == 3
    heads = x.unflatten(2, (node.get("num_heads"), -1)) if is_flat else x.transpose(1, 2)
    if places is not None:
        last = cosines.shape[0] - 1
        cosines, sines = (
            table[places.to(torch.int64).clamp(0, last)] for table in (cosines, sines)
        )
    cosines, sines = cosines.unsqueeze(2), sines.unsqueeze(2)
    width = node.get("rotary_embedding_dim", 0) or heads.shape[3]
    rotated, rest = heads[..., :width], heads[..., width:]
    if node.get("interleaved", 0):
        a, b = rotated[..., ::2], rotated[..., 1::2]
    else:
        a, b = rotated.chunk(2, 3)
    parts = (a * cosines - b * sines, b * cosines + a * sines)
    turned = torch.stack(parts, 4).flatten(3) if node.get("interleaved", 0) else torch.cat(parts, 3)
    y = torch.cat([turned, rest], 3)
    return y.flatten(2) if is_flat else y.transpose(1, 2)


OPERATORS: dict[str, Callable[..., Outputs]] = {"Attention": _attention, "RotaryEmbedding": _rotary}
