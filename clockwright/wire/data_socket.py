"""Sockets between controllers, workers and fronts that carry frames: connecting, TLS, and settings.

On one host a Unix socket needs no TLS: the kernel identifies the peer's user. Over TCP a process that uses TLS with the
controller uses it here, too. A worker has no certificate of an authority that fronts know; it makes one, and the
controller passes on its fingerprint over links that are secure themselves.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import logging
import os
import socket
import ssl
import struct
from collections import deque
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

# Unix sockets hold this much on the sender's side, where the machine allows it: some images. For TCP the
# kernel finds its own measure.
_UNIX_BUFFER_BYTES = 2 << 20
# A connection without traffic is tried this often, so that one that is half open is noticed.
_PROBE_S = 1
# Process, user and group of a peer.
_CREDENTIALS = struct.Struct("iII")


def dial(
    host: str,
    port: int,
    path: str = "",
    *,
    limit_s: float,
    tls: ssl.SSLContext | None = None,
    certificate_sha256: bytes = b"",
) -> socket.socket:
    """Connect to a listener by the Unix socket on its own host, if there is a path, or by TCP.

    Without a context TCP has no TLS. An attempt may take `limit_s`, which the socket has as its limit, too. The
    fingerprint is that of the listener's certificate, if no authority signed it. Raises OSError if it cannot be
    reached, or has another certificate.
    """
    # On another host there is no such file, and in a container it may be hidden.
    if path and Path(path).exists():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(limit_s)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            logger.info("cannot connect to %s (%s): using TCP", path, error.strerror)
        else:
            if is_our_users(sock):
                return sock
            sock.close()
            logger.warning("%s belongs to another user: using TCP", path)
    plain = socket.create_connection((host, port), limit_s)
    if tls is None:
        return plain
    try:
        sealed = tls.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
    if certificate_sha256:
        found = hashlib.sha256(sealed.getpeercert(binary_form=True) or b"").digest()
        if not hmac.compare_digest(found, certificate_sha256):
            sealed.close()
            raise ConnectionError(f"{host}:{port} has another certificate than expected")
    return sealed


def pinned_context() -> ssl.SSLContext:
    """Make the TLS context for a peer that is verified by its certificate's fingerprint (`dial`)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def is_our_users(sock: socket.socket) -> bool:
    """Whether the peer of a Unix socket is a process of this user, or of root."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (0, os.getuid())


def receive_with_files(
    sock: socket.socket, room: memoryview, files: deque[int], *, most: int
) -> int:
    """Receive into `room`; open files that come along, at most so many at once, are put behind those that are there."""
    found = array.array("i")
    num_bytes, ancillary, _, _ = sock.recvmsg_into([room], socket.CMSG_SPACE(most * found.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    files.extend(found)
    return num_bytes


def prepare(sock: socket.socket, *, silence_limit_ms: int) -> None:
    """Have small frames leave at once, and a peer that gives no sign of life to TCP for so long given up."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # These are Linux's.
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        sock.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(2, silence_limit_ms // (1000 * _PROBE_S))
        )
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_limit_ms)
