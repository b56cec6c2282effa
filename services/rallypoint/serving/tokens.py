"""Tokens: signed texts with which a client proves its name, its roles and the runs for which it has them.

A token is a JSON Web Token (RFC 7519), signed with Ed25519. A service knows only public keys; the holder of a
private key issues tokens, with `rallypoint token issue`.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.live_file import LiveFile
from rallypoint.serving.policy import Role

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# cryptography and jwt are imported where they are used: most servers and all agents have no tokens to check.

_ALGORITHM = "EdDSA"
_AUDIENCE = "rallypoint"
_PUBLIC_KEY = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
# Checked tokens that are remembered, since a check takes some 0.1 ms: more than the clients of a service.
_MOST_CHECKED = 16_384
_LONGEST_NAME = 256  # characters


@dataclass(frozen=True, slots=True)
class Token:
    """The content of a token.

    Attributes:
        roles: Its roles; those that this version does not know are left out.
        runs: Patterns of the runs for which it has them, as in a policy.
        expires: Unix seconds.
    """

    name: str
    roles: frozenset[Role]
    runs: Sequence[str]
    expires: float


class InvalidToken(Exception):
    """A token is not valid; the text has the reason, for its owner."""


def issue(key: Ed25519PrivateKey, token: Token, now: float) -> str:
    """Return a signed token; `now`: unix seconds."""
    import jwt  # noqa: PLC0415

    claims = {
        "aud": _AUDIENCE,
        "sub": token.name,
        "roles": sorted(token.roles),
        "runs": list(token.runs),
        "iat": int(now),
        "exp": int(token.expires),
    }
    return jwt.encode(claims, key, _ALGORITHM, headers={"kid": key_id(key.public_key())})


def key_id(key: Ed25519PublicKey) -> str:
    """Return the name of a key in the tokens that it signed."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def read_keys(path: Path) -> Mapping[str, Ed25519PublicKey]:
    """Return the public keys of a PEM file, by id.

    Raises:
        SettingError: It has none, or others; one line.
    """
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    try:
        keys = [load_pem_public_key(pem) for pem in _PUBLIC_KEY.findall(path.read_bytes())]
    except OSError as error:
        raise SettingError(f"cannot read --token-keys {path}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        keys = []
    if not keys or not all(isinstance(key, Ed25519PublicKey) for key in keys):
        raise SettingError(
            f"--token-keys {path} must hold public Ed25519 keys as PEM: `rallypoint token key` makes one"
        )
    return {key_id(key): key for key in keys if isinstance(key, Ed25519PublicKey)}


def check(text: str, keys: Mapping[str, Ed25519PublicKey]) -> Token:
    """Return the content of a token that one of the keys has signed and that has not expired; raise InvalidToken."""
    import jwt  # noqa: PLC0415

    try:
        kid = str(jwt.get_unverified_header(text).get("kid"))
        if kid not in keys:
            raise InvalidToken(f"it was signed with the key {kid!r}, which this server does not know")
        claims = jwt.decode(
            text,
            keys[kid],
            algorithms=[_ALGORITHM],
            audience=_AUDIENCE,
            options={"require": ["aud", "sub", "exp"]},
        )
    except (jwt.PyJWTError, OverflowError) as error:
        raise InvalidToken(f"{error}") from None
    return _content(claims)


def unchecked(text: str) -> tuple[str, Token]:
    """Return the key id and content of a token that need not be valid; raise InvalidToken if it is no token."""
    import jwt  # noqa: PLC0415

    try:
        kid = jwt.get_unverified_header(text).get("kid")
        return str(kid), _content(jwt.decode(text, options={"verify_signature": False}))
    except (jwt.PyJWTError, KeyError, TypeError, ValueError) as error:
        raise InvalidToken(f"{error}") from None


def _content(claims: Mapping[str, Any]) -> Token:
    """Return the content of claims; raise InvalidToken if they are not those of `issue`."""
    lists = claims.get("roles"), claims.get("runs")
    if not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in lists):
        raise InvalidToken("its roles and runs are no lists of texts")
    name = str(claims["sub"])
    if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise InvalidToken("its name is empty, too long, or not printable")
    known = frozenset(Role(role) for role in claims["roles"] if role in list(Role))
    try:
        return Token(name, known, claims["runs"], float(claims["exp"]))
    except (OverflowError, TypeError, ValueError):
        raise InvalidToken("its end is no time") from None


class TokenKeys:
    """Checks tokens with the public keys of a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises SettingError."""
        import jwt  # noqa: F401, PLC0415 (now, and not while the first call waits)

        self._keys = LiveFile("keys of tokens", [path], partial(read_keys, path))
        self._checked: OrderedDict[str, Token] = OrderedDict()

    def check(self, text: str) -> Token:
        """Return the content of a token; raise InvalidToken if it is not valid now."""
        if self._keys.refresh():
            self._checked.clear()
        token = self._checked.get(text)
        if token is None:
            token = self._checked[text] = check(text, self._keys.content)
            if len(self._checked) > _MOST_CHECKED:
                self._checked.popitem(last=False)
        elif token.expires <= time.time():
            del self._checked[text]
            raise InvalidToken("Signature has expired")
        return token
