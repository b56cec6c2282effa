"""What a replica says of itself to the others."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Registration:
    """One replica that is alive.

    Attributes:
        address: How clients reach it: host:port.
        instance: Drawn anew by each process: tells a replica from the one of its name before.
        since: When the process began to serve, unix seconds; for people.
        lease_ttl: Seconds after which it is gone from etcd if it dies.
    """

    address: str
    instance: str
    since: float
    lease_ttl: float

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Registration | None:
        """From JSON; None if it is none. Fields that a newer version adds are left alone."""
        try:
            fields = json.loads(content)
            return cls(
                str(fields["address"]),
                str(fields["instance"]),
                float(fields["since"]),
                float(fields["lease_ttl"]),
            )
        except (ValueError, KeyError, TypeError):
            return None
