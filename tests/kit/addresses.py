"""Addresses of this machine."""

from __future__ import annotations

import socket


def own_address() -> str | None:
    """An address of this machine that is not the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = sock.getsockname()[0]
        return None if address.startswith("127.") else address
