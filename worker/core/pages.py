"""The free pages of the weights cache."""

from __future__ import annotations


class PageCache:
    """Allocates pages. A model may have any free pages, so the cache never fragments.

    Source: Clockwork, section 5.2; gathering pages before EXEC is what makes non-adjacent ones usable.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        # The page freed last is taken first: it may still lie in a processor's cache.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        """The number of pages, free or not."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """The number of pages that `acquire` could hand out now."""
        return len(self._free)

    def acquire(self, num_pages: int) -> tuple[int, ...] | None:
        """Take pages, in the order in which a model's weights are to lie on them. Returns None if too few are free."""
        if num_pages > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(num_pages))

    def release(self, pages: tuple[int, ...]) -> None:
        """Give pages back that `acquire` handed out."""
        self._free.extend(pages)
        assert len(self._free) <= self._num_pages, "pages were released twice"
