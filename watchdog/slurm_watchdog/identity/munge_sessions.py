"""The sessions of agents that authenticate by MUNGE, one a node, in memory: after a restart each starts a new one."""

from __future__ import annotations

import os
from collections.abc import Callable

from slurm_watchdog.identity.munge_decoder import Credential
from slurm_watchdog.identity.munge_protocol import (
    GRACE_S,
    SESSION_S,
    RequestProof,
    Session,
    SessionOffer,
    decode_offer,
    macs_equal,
    parse_authorization,
    request_mac,
)

MAX_SESSIONS = 65_536


class AuthenticationError(Exception):
    """Why a request is not believed: (outcome, sentence)."""


class Sessions:
    """Who has begun a session, and what of it has been seen."""

    def __init__(self, own_uid: int, agent_uids: frozenset[int], now: Callable[[], float], most: int = MAX_SESSIONS):
        """`own_uid` runs the controller; agents of `agent_uids` are believed, `most` of them at once."""
        self._most = most
        self.epoch = os.urandom(16).hex()  # A random id of this run of the controller.
        self._own_uid, self._agent_uids, self._now = own_uid, agent_uids, now
        self._of_node: dict[str, Session] = {}
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    # -- beginning ---------------------------------------------------------------------------------------------

    def check_credential(self, credential: Credential) -> SessionOffer:
        """The session that a credential begins, if it may. Raises AuthenticationError."""
        if credential.uid not in self._agent_uids:
            raise AuthenticationError(
                "unauthorized", f"the credential was made by user {credential.uid}; see security.agent_user"
            )
        if credential.restricted_to != self._own_uid or not credential.encrypted:
            raise AuthenticationError(
                "unauthorized",
                f"the credential is not for user {self._own_uid} alone; see security.controller_user",
            )
        try:
            beginning = decode_offer(credential.payload)
        except ValueError as error:
            raise AuthenticationError("unauthorized", str(error)) from error
        if beginning.epoch != self.epoch:
            raise AuthenticationError("no_session", "the credential is for a controller that no longer runs")
        before = self._of_node.get(beginning.node)
        if beginning.session in self._by_id or (before is not None and credential.made_at < before.made_at):
            raise AuthenticationError("replayed", "this credential is older than one that was shown before")
        return beginning

    def begin(self, beginning: SessionOffer, address: str, made_at: int) -> Session:
        """Replaces the node's earlier session. Call it once the address is known to be the node's."""
        before = self._of_node.pop(beginning.node, None)
        if before is not None:
            del self._by_id[before.id]
        while len(self._of_node) >= self._most:
            oldest = next(iter(self._of_node))
            del self._by_id[self._of_node.pop(oldest).id]
        key = bytes.fromhex(beginning.key)
        session = Session(beginning.session, key, beginning.node, self._now(), 0, address, made_at)
        self._of_node[beginning.node] = self._by_id[session.id] = session
        return session

    # -- afterwards --------------------------------------------------------------------------------------------

    def claim(self, authorization: str, address: str) -> tuple[Session, RequestProof]:
        """The session that a request claims to be of, before its body has come. Raises AuthenticationError."""
        claim = parse_authorization(authorization)
        if claim is None:
            raise AuthenticationError("unauthorized", "nodes prove themselves by MUNGE here; see security.mode")
        known = self._by_id.get(claim.session)
        if known is None or self._now() - known.began_at > SESSION_S + GRACE_S:
            raise AuthenticationError("no_session", "no such session: begin one")
        if known.address != address:
            raise AuthenticationError("wrong_node", f"this session is not of {address}")
        if claim.counter <= known.counter:
            raise AuthenticationError("replayed", f"request {claim.counter} of this session has been here before")
        return known, claim

    def authenticate(self, authorization: str, address: str, path: str, body: bytes) -> tuple[Session, int]:
        """The session of a whole request, which can't be shown again from now on, and its counter. Raises
        AuthenticationError."""
        session, claim = self.claim(authorization, address)
        if not macs_equal(claim.mac, request_mac(session.key, path, claim.counter, body)):
            raise AuthenticationError("unauthorized", "the request was changed on its way, or is another client's")
        session.counter = claim.counter
        return session, claim.counter
