"""How many examples a property test draws."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """Draw `count` examples where the default is a hundred, and as many times more where it is more.

    A plain `@settings(max_examples=count)` would draw no more in a long run than in any other.
    """
    return settings(max_examples=count * settings().max_examples // 100)
