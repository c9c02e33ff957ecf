"""Tokens of a model that generates: those of the prompt, and then one for each step, chosen by its logits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES, TensorSpec


class Tokens:
    """The tokens of one stream."""

    def __init__(
        self,
        prompt: Buffer,
        given: TensorSpec,
        told: TensorSpec,
        logits: TensorSpec,
        *,
        temperature: float,
        seed: int | None,
    ) -> None:
        """Begin with the first token of the prompt, which comes with its size.

        At temperature 0 the most likely token is chosen. Without a seed each choice is another.
        """
        _, content = given.unpack(prompt)
        self._dtype = np.dtype(DATATYPES[given.datatype].dtype)
        tokens = np.frombuffer(content, self._dtype)
        #: Bytes of each token of the prompt but the first, which is `first`, the last in front.
        self.left = [token.tobytes() for token in tokens[:0:-1]]
        self.first = tokens[0].tobytes()
        self._told = told
        self._logits_dtype = np.dtype(DATATYPES[logits.datatype].dtype)
        self._temperature = temperature
        self._rng = np.random.default_rng(seed) if temperature else None

    @property
    def num_prompt_left(self) -> int:
        """Tokens of the prompt that were not run."""
        return len(self.left)

    def choose(self, logits: Buffer) -> int:
        """Choose the token that follows."""
        numbers = np.frombuffer(logits, self._logits_dtype)
        if self._rng is None:
            return int(numbers.argmax())
        # The largest of the logits with such noise (Gumbel's) is distributed as their softmax.
        noise = np.log(self._rng.standard_exponential(numbers.size, np.float32))
        return int((numbers / np.float32(self._temperature) - noise).argmax())

    def encode(self, token: int) -> bytes:
        """A token as the model takes it."""
        return np.array(token, self._dtype).tobytes()

    def answer(self, token: int) -> Sequence[bytes]:
        """The outputs of a step as its client gets them."""
        content = self.encode(token)
        return [self._told.header((1,), len(content)) + content]
