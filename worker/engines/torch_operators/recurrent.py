"""LSTM, GRU and RNN: by torch's own function where it means the same, and otherwise step by step.

The steps are laid out one after the other, as many as the input has: a captured run has no loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from worker.engines.torch_operators.node import Node, Outputs, Tensor

_Function: TypeAlias = Callable[[Tensor], Tensor]
_Tensors: TypeAlias = Sequence[Tensor]

_ACTIVATIONS: dict[str, _Function] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
}
# The order of ONNX's gates in torch's: iofc as ifco, zrh as rzh.
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_DEFAULTS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _recurrent(
    node: Node,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    peepholes: Tensor | None = None,
) -> Sequence[Tensor]:
    if node.get("layout", 0):
        x = x.transpose(0, 1)
    backwards = _DIRECTIONS[node.get("direction", b"forward").decode().lower()]
    shape = (len(backwards), x.shape[1], r.shape[2])
    states = [
        x.new_zeros(shape)
        if given is None
        else (given.transpose(0, 1) if node.get("layout", 0) else given)
        for given in ((h, c) if node.op_type == "LSTM" else (h,))
    ]
    if b is None:
        b = w.new_zeros(len(backwards), 2 * w.shape[1])
    plain = lengths is None and peepholes is None and backwards != (True,)
    if plain and _is_torchs(node, len(backwards)):
        y, *last = _by_torch(node, x, (w, r, b), states)
    else:
        if peepholes is None:
            peepholes = w.new_zeros(len(backwards), 3 * shape[2])
        y, *last = _by_steps(node, x, (w, r, b, peepholes), states, backwards, lengths)
    if node.get("layout", 0):
        return [y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in last)]
    return [y, *last]


def _activations(node: Node, directions: int) -> list[str]:
    given = node.get("activations") or []
    return [name.decode().lower() for name in given] or _DEFAULTS[node.op_type] * directions


def _is_torchs(node: Node, directions: int) -> bool:
    usual = _activations(node, directions) == _DEFAULTS[node.op_type] * directions
    settings = ("clip", "input_forget", "activation_alpha", "activation_beta")
    same_reset = node.op_type != "GRU" or node.get("linear_before_reset", 0)
    return bool(usual and same_reset and not any(node.get(name) for name in settings))


def _by_torch(node: Node, x: Tensor, given: _Tensors, states: _Tensors) -> list[Tensor]:
    """Run all steps in one call.

    Returns the states after each step, shape (step, direction, batch, hidden), and the last ones.
    """
    parameters: list[Tensor] = []
    order = _GATES[node.op_type]
    for w, r, b in zip(*given, strict=True):
        w_bias, r_bias = b.chunk(2)
        for each in (w, r, w_bias, r_bias):
            gates = each.chunk(len(order))
            parameters.append(torch.cat([gates[index] for index in order]))
    settings = (parameters, True, 1, 0.0, False, len(given[0]) == 2, False)
    if node.op_type == "LSTM":
        y, *last = torch.lstm(x, tuple(each.contiguous() for each in states), *settings)
    else:
        function = torch.gru if node.op_type == "GRU" else torch.rnn_tanh
        y, *last = function(x, states[0].contiguous(), *settings)
    return [y.unflatten(2, (len(given[0]), -1)).transpose(1, 2), *last]


def _by_steps(
    node: Node,
    x: Tensor,
    given: _Tensors,
    states: _Tensors,
    backwards: Sequence[bool],
    lengths: Tensor | None,
) -> list[Tensor]:
    """As `_by_torch`."""
    count = len(_DEFAULTS[node.op_type])
    names = _activations(node, len(backwards))
    settings = node.get("activation_alpha") or node.get("activation_beta")
    if settings or not _ACTIVATIONS.keys() >= {*names}:
        raise node.refuse(f"activations {', '.join(names)} with their settings")
    outputs, finals = [], []
    for index, is_backward in enumerate(backwards):
        w, r, b, peepholes = (each[index] for each in given)
        functions = [_ACTIVATIONS[name] for name in names[index * count : (index + 1) * count]]
        w_bias, r_bias = b.chunk(2)
        inputs = torch.matmul(x, w.t()) + w_bias
        state = [each[index] for each in states]
        found: list[Tensor] = []
        steps = range(x.shape[0])
        for step in reversed(steps) if is_backward else steps:
            new = _CELLS[node.op_type](node, functions, inputs[step], state, (r, r_bias, peepholes))
            y = new[0]
            if lengths is not None:
                # A row that has ended keeps its state; one that is read backwards has not begun.
                runs = (lengths > step).unsqueeze(1)
                y = torch.where(runs, y, torch.zeros_like(y))
                new = [torch.where(runs, *pair) for pair in zip(new, state, strict=True)]
            state = new
            found.append(y)
        outputs.append(torch.stack(found[::-1] if is_backward else found))
        finals.append(state)
    return [torch.stack(outputs, 1), *(torch.stack(each) for each in zip(*finals, strict=True))]


def _clipped(node: Node, x: Tensor) -> Tensor:
    limit = node.get("clip", 0.0)
    return x.clamp(-limit, limit) if limit else x


def _lstm(
    node: Node, functions: Sequence[_Function], inputs: Tensor, state: _Tensors, given: _Tensors
) -> list[Tensor]:
    h, c = state
    r, bias, peepholes = given
    f, g, last = functions
    to_in, to_out, to_forget, to_cell = (inputs + torch.matmul(h, r.t()) + bias).chunk(4, 1)
    p_in, p_out, p_forget = peepholes.chunk(3)
    taken = f(_clipped(node, to_in + p_in * c))
    kept = 1 - taken if node.get("input_forget", 0) else f(_clipped(node, to_forget + p_forget * c))
    c = kept * c + taken * g(_clipped(node, to_cell))
    return [f(_clipped(node, to_out + p_out * c)) * last(c), c]


def _gru(
    node: Node, functions: Sequence[_Function], inputs: Tensor, state: _Tensors, given: _Tensors
) -> list[Tensor]:
    (h,) = state
    f, g = functions
    hidden = h.shape[1]
    r, bias, _ = given
    gates = inputs[:, : 2 * hidden] + torch.matmul(h, r[: 2 * hidden].t()) + bias[: 2 * hidden]
    update, reset = f(_clipped(node, gates)).chunk(2, 1)
    recurrent, shift = r[2 * hidden :].t(), bias[2 * hidden :]
    if node.get("linear_before_reset", 0):
        inner = reset * (torch.matmul(h, recurrent) + shift)
    else:
        inner = torch.matmul(reset * h, recurrent) + shift
    new = g(_clipped(node, inputs[:, 2 * hidden :] + inner))
    return [(1 - update) * new + update * h]


def _rnn(
    node: Node, functions: Sequence[_Function], inputs: Tensor, state: _Tensors, given: _Tensors
) -> list[Tensor]:
    r, bias, _ = given
    return [functions[0](_clipped(node, inputs + torch.matmul(state[0], r.t()) + bias))]


_CELLS = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}

OPERATORS: dict[str, Callable[..., Outputs]] = dict.fromkeys(_CELLS, _recurrent)
