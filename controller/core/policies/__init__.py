"""Policies: which batch a lane runs next, which weights are loaded or evicted."""
