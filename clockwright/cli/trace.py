"""`clockwright trace`: what a run recorded, for other programs."""

from __future__ import annotations

from pathlib import Path

from clockwright.errors import ConfigError
from experiments.chrome_trace import export_chrome_trace


def export(directory: Path, target: Path, *, windows: bool) -> None:
    """Write a run as a Chrome trace, and say what is in it.

    Raises:
        TraceFormatError: a table is missing or garbled.
        ConfigError: the target cannot be written.
    """
    try:
        exported = export_chrome_trace(directory, target, windows=windows)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from None
    print(
        f"{target}: {exported.num_actions} actions, {exported.num_requests} requests, "
        f"{exported.num_arrows} arrows; open it at https://ui.perfetto.dev"
    )
