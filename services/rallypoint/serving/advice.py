"""What to change when a connection fails in the TLS handshake, of which gRPC tells in the words of its libraries."""

from __future__ import annotations

from rallypoint.serving.settings import ClientTLS

_NO_TLS_THERE = "it speaks plaintext: leave the --tls flags out"
_UNKNOWN_AUTHORITY = "its certificate is not signed by an authority in --tls-ca"
_OTHER_NAME = "its certificate is for another host name: connect to a name that is in it"
_EXPIRED = "its certificate is expired, or not valid yet: replace it, or look at the clocks"
_WANTS_TLS = "it may want TLS: give --tls-ca"
_WANTS_CERTIFICATE = "it may want a client certificate: give --tls-cert and --tls-key"
_WANTS_ANOTHER = "it may want a client certificate of another authority: look at --tls-cert"


def tls_advice(message: str, tls: ClientTLS | None) -> str | None:
    """Says what to change, where a failed connection looks like one of TLS.

    Args:
        message: what gRPC says of the failure.
        tls: what was connected with; None for plaintext.

    Returns:
        Half a sentence about the server; None if the message tells of something else.
    """
    if tls is None:
        return _WANTS_TLS if "Socket closed" in message else None
    for sign, advice in (
        ("WRONG_VERSION_NUMBER", _NO_TLS_THERE),
        ("Hostname Verification", _OTHER_NAME),
        ("certificate has expired", _EXPIRED),
        ("certificate is not yet valid", _EXPIRED),
        ("CERTIFICATE_VERIFY_FAILED", _UNKNOWN_AUTHORITY),
        ("Socket closed", _WANTS_ANOTHER if tls.certificate else _WANTS_CERTIFICATE),
    ):
        if sign in message:
            return advice
    return None
