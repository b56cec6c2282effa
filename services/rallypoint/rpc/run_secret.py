"""TLS from a run secret: both ends derive the same authority from it, and each issues its own certificate.

So one text on every host of a job is enough for encrypted connections on which each end proves that it holds the
secret, which itself is never sent. Nothing is kept in files, and no clock matters: the certificates are always valid.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rallypoint.rpc.endpoint import CERTIFIED_NAME, Identity, RunSecret

_PEM = serialization.Encoding.PEM
_CURVE = ec.SECP256R1()
# Order of the group of the curve: private keys are from 1 to one below it (FIPS 186-5).
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_INFO = b"rallypoint run secret: certificate authority 1"
# RFC 5280: a certificate without a well-defined end.
_FIRST, _LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


# ---- Issuing certificates; `rallypoint tls init` does so too.


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority: its name and key, and between which times all its certificates are valid."""

    name: str
    key: ec.EllipticCurvePrivateKey
    first: datetime
    last: datetime

    def root(self, *extensions: x509.ExtensionType) -> bytes:
        """Return its own certificate as PEM; it may sign no other authority."""
        limits = x509.BasicConstraints(ca=True, path_length=0)
        return self._signed(self.name, self.key.public_key(), limits, *extensions)

    def issue(self, name: str, *extensions: x509.ExtensionType) -> tuple[bytes, bytes]:
        """Return a certificate with this common name, and its new private key, both as PEM."""
        key = new_key()
        limits = x509.BasicConstraints(ca=False, path_length=None)
        return self._signed(name, key.public_key(), limits, *extensions), private_pem(key)

    def _signed(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        limits: x509.BasicConstraints,
        *extensions: x509.ExtensionType,
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self.name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.first)
            .not_valid_after(self.last)
        )
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        for each in (limits, x509.SubjectKeyIdentifier.from_public_key(key), by, *extensions):
            critical = isinstance(each, x509.BasicConstraints | x509.KeyUsage)
            builder = builder.add_extension(each, critical=critical)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(_PEM)


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key."""
    return ec.generate_private_key(_CURVE)


def private_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    """Return a private key as PEM, not encrypted."""
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


# ---- The authority of a run secret.


@functools.lru_cache(maxsize=64)
def identity_of(secret: RunSecret) -> Identity:
    """Return the identity of this process among the holders of a secret; the same one for each call."""
    authority = Authority("rallypoint run", _authority_key(secret), _FIRST, _LAST)
    certificate, key = authority.issue(
        CERTIFIED_NAME,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
        x509.SubjectAlternativeName([x509.DNSName(CERTIFIED_NAME)]),
    )
    return Identity(certificate, key, authority.root())


def _authority_key(secret: RunSecret) -> ec.EllipticCurvePrivateKey:
    # 64 bits more than the order has: then no key is likelier than another.
    derived = HKDF(hashes.SHA256(), length=40, salt=None, info=_INFO).derive(secret.text.encode())
    return ec.derive_private_key(int.from_bytes(derived) % (_ORDER - 1) + 1, _CURVE)
