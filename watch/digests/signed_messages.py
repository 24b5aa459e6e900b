"""Signed messages between the nodes' watches: a receiver accepts each message once, if its sender has the job's secret.

    signer = Signer(secret, node=1)                                    # one per process
    data = signer.seal("digest", body, to=0, echo=leaders_session)
    inbox = Inbox(Signer(secret, node=0), "digest", sender=1)          # at the receiver
    message = inbox.open(data)                                         # None: already received; raises MessageRefused

A message carries its sender's session (random, one per process), a counter, and `echo`, the receiver's session as known
to the sender. The HMAC covers these, the body, the purpose and both nodes. So a replayed message is refused: it echoes
another session, or its counter is not newer. Without a secret the key is a constant: the order is still checked, but
the sender is not authenticated.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import struct
from dataclasses import dataclass

__all__ = ["NO_SESSION", "SESSION_BYTES", "Inbox", "Message", "MessageRefused", "Signer"]

SESSION_BYTES = 16
NO_SESSION = bytes(SESSION_BYTES)
"""`echo` while the sender does not know the receiver's session yet."""
_HEAD = struct.Struct(f">4s{SESSION_BYTES}s{SESSION_BYTES}sQ")
_MAGIC = b"RSM1"
_MAC_BYTES = 32
_UNSIGNED = b"rankscope: no secret"


class MessageRefused(ValueError):
    """A message is not signed with the secret, or is not new; the text is a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`session`: the sender's; `echo`: the receiver's session as known to the sender."""

    session: bytes
    echo: bytes
    counter: int
    body: bytes


class Signer:
    """Seals and opens the messages of one process."""

    def __init__(self, secret: bytes, *, node: int) -> None:
        self.is_signed = bool(secret)
        self.node = node
        self.session = os.urandom(SESSION_BYTES)
        self._key = hmac.new(secret or _UNSIGNED, digestmod=hashlib.sha256)
        self._counters = itertools.count(1)  # shared by threads

    def seal(self, purpose: str, body: bytes, *, to: int, echo: bytes) -> bytes:
        """Serialise and sign a message to node `to` (-1: all nodes)."""
        data = _HEAD.pack(_MAGIC, self.session, echo, next(self._counters)) + body
        return data + self._mac(purpose, self.node, to, data)

    def open(self, purpose: str, data: bytes, *, sender: int, to: int) -> Message:
        """Parse a message and check its signature only. Raises MessageRefused."""
        if len(data) < _HEAD.size + _MAC_BYTES or data[: len(_MAGIC)] != _MAGIC:
            raise MessageRefused("not a message of this version of rankscope")
        signed, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(purpose, sender, to, signed)):
            raise MessageRefused("its signature is not made with this job's secret")
        _, session, echo, counter = _HEAD.unpack_from(signed)
        return Message(session=session, echo=echo, counter=counter, body=signed[_HEAD.size :])

    def _mac(self, purpose: str, sender: int, to: int, data: bytes) -> bytes:
        mac = self._key.copy()
        mac.update(f"{purpose} {sender} {to}\0".encode())
        mac.update(data)
        return mac.digest()


class Inbox:
    """Receives the messages of one purpose from one sender."""

    def __init__(self, signer: Signer, purpose: str, *, sender: int) -> None:
        self._signer, self._purpose, self._sender = signer, purpose, sender
        self.session = NO_SESSION
        """Session of the sender's newest message; NO_SESSION before the first one."""
        self._last = b""
        self._counter = 0
        self._former_sessions: set[bytes] = set()

    def open(self, data: bytes) -> Message | None:
        """Return the message if it is new; None if it repeats the newest one, or was sent before the sender knew this
        session.

        Raises MessageRefused.
        """
        if data == self._last:
            return None
        message = self._signer.open(self._purpose, data, sender=self._sender, to=self._signer.node)
        if message.echo != self._signer.session:
            if self.session == NO_SESSION:
                return None  # the sender did not yet know this process, which has just started
            raise MessageRefused("it was sent to an earlier process (replayed)")
        is_older = message.session == self.session and message.counter <= self._counter
        if is_older or message.session in self._former_sessions:
            raise MessageRefused("it is older than a message received before (replayed)")
        if self.session not in (NO_SESSION, message.session):
            self._former_sessions.add(self.session)  # a new session: the sender has been restarted
        self._last, self.session, self._counter = data, message.session, message.counter
        return message
