"""An agent's connection where nodes prove themselves by MUNGE: begins sessions, proves each request, believes
no answer unproven.

The program munge makes the credential, in a child with a deadline: munged may hang.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import msgspec

from slurm_watchdog.agent.delivery.channel import Channel, Proven
from slurm_watchdog.base import clock
from slurm_watchdog.identity.munge_protocol import (
    EPOCH,
    SESSION_S,
    Session,
    answer_mac,
    authorization,
    encode_offer,
    macs_equal,
    new_session,
)
from slurm_watchdog.wire.http_client import AuthenticationFailed, Connection, NotKept, Response

MUNGE_S = 10.0
CREDENTIAL = re.compile(rb"MUNGE:[A-Za-z0-9+/=]+:")
PATH = "/v1/session"
RENEW = frozenset({401, 403})
"""The session is not known any more, or we come from another address than it began at: a new one is worth a try."""
MAX_LEFT = 3  # Children that could not be ended, and may still be there; with more of them no one else is sent.

Encode = Callable[[bytes], str]  # Payload -> credential. Raises Unproven.


class _Offer(msgspec.Struct, frozen=True):
    """What the controller says before a session: which of its lives this is."""

    epoch: str


class Munge:
    """The program munge, for credentials that `user` alone can decode."""

    def __init__(self, user: str, socket: str = "", deadline_s: float = MUNGE_S, program: str = "munge"):
        self._argv = [program, "--restrict-uid", user, "--cipher", "aes128", *(["--socket", socket] if socket else [])]
        self._user, self._deadline_s = user, deadline_s
        self._left: list[subprocess.Popen[bytes]] = []

    def encode(self, payload: bytes) -> str:
        """The credential. Raises Unproven."""
        self._left = [child for child in self._left if child.poll() is None]
        if len(self._left) >= MAX_LEFT:
            raise AuthenticationFailed("munge hangs: is munged well?")
        try:
            child = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
                start_new_session=True
            )  # fmt: skip
        except OSError as error:
            raise AuthenticationFailed(f"the program munge cannot be run: {error.strerror}") from error
        try:
            out, said = child.communicate(payload, self._deadline_s)
        except subprocess.TimeoutExpired as error:
            child.kill()
            self._left.append(child)
            raise AuthenticationFailed(
                f"munge gave no answer within {self._deadline_s:g} s: is munged well?"
            ) from error
        if child.returncode != 0 or not CREDENTIAL.fullmatch(out.strip()):
            raise AuthenticationFailed(f"munge failed: {_first_line(said)}{self._advice(said)}")
        return out.strip().decode("ascii")

    def _advice(self, said: bytes) -> str:
        unknown = b"nrecognized" in said and self._user.encode() in said
        return (
            f" (give the number of the controller's user: security.controller_user, id -u {self._user} there)"
            if unknown
            else ""
        )


def _first_line(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[0][:200] if lines else "it says nothing"


class ProvenConnection(Channel):
    """A channel on which each request and each answer is proven. Not for two threads."""

    def __init__(self, inner: Connection, node: str, encode: Encode, now: Callable[[], float] = clock.monotonic):
        super().__init__(inner)
        self._node, self._encode, self._now = node, encode, now
        self._session: Session | None = None

    def post(
        self, path: str, body: bytes, headers: dict[str, str], connect_s: float, answer_s: float
    ) -> Proven | Response:
        """See Channel.post. Only who could decode our credential can prove an answer: the user of the controller. Each
        connection is proven before a report goes over it."""
        began = False
        while True:
            if self._session is None or self._now() - self._session.began_at > SESSION_S:
                self._session, began = self._begin(path, headers, connect_s, answer_s), True
            session = self._session
            try:
                proof = {**headers, "Authorization": authorization(session, path, body)}
                # Never on another connection than that on which the session was proven: who listens there now
                # may be anybody.
                answer = self._inner.post_kept(path, body, proof, answer_s)
            except NotKept:
                self._session = None
                if began:
                    raise
                continue  # closed between two reports, as servers do, or by a new start of the controller
            except OSError:
                self._session = None  # it may have been taken, or the controller may be another
                raise
            if answer.status == 200:
                self._believe(session, answer)
                return Proven(answer.body)
            if answer.status not in RENEW:
                return answer
            self._session = None
            if began and answer.status == 403:
                return answer
            if began:
                raise AuthenticationFailed(f"the controller does not take our session: {_sentence(answer)}")

    def _believe(self, session: Session, answer: Response) -> None:
        given = answer.headers.get(b"authentication-info", b"").decode("latin-1")
        if not macs_equal(given, answer_mac(session.key, answer.status, session.counter, answer.body)):
            self._session = None
            self._inner.close()
            raise AuthenticationFailed(
                "the answer does not come from the controller: another program answers at its address"
            )

    def _begin(self, path: str, headers: dict[str, str], connect_s: float, answer_s: float) -> Session:
        where = path.rpartition("/v1/")[0] + PATH
        offer = self._inner.post(where, b"", headers, connect_s, answer_s)
        try:
            epoch = msgspec.json.decode(offer.body, type=_Offer).epoch if offer.status == 200 else ""
        except (msgspec.MsgspecError, RecursionError):
            epoch = ""
        if not EPOCH.fullmatch(epoch):
            raise AuthenticationFailed(
                f"the controller takes no sessions ({offer.status}): is security.mode the same there?"
            )
        session = new_session(self._node, self._now())
        credential = self._encode(encode_offer(session, epoch))
        answer = self._inner.post_kept(where, b"", {**headers, "Authorization": f"Munge {credential}"}, answer_s)
        if answer.status != 200:
            does = "takes no sessions yet" if answer.status >= 500 else "refuses our credential"
            raise AuthenticationFailed(f"the controller {does}: {_sentence(answer)}")
        self._believe(session, answer)
        return session


def _sentence(answer: Response) -> str:
    return f"{answer.status} {answer.body[:300].decode(errors='replace').strip()}"
