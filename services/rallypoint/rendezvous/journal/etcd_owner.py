"""Who owns a journal on etcd: what stands under its owner key."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rallypoint.rendezvous.journal.journal import JournalError


@dataclass(frozen=True, slots=True)
class Owner:
    """A replica of the service.

    Attributes:
        replica: Its name, which its next process has too.
        address: How clients reach it: host:port.
        instance: Drawn anew by each process.
    """

    replica: str
    address: str
    instance: str

    def encode(self, claim: str = "") -> bytes:
        """As JSON. `claim`: what tells one claim of the same owner from another."""
        return json.dumps({**asdict(self), **({"claim": claim} if claim else {})}).encode()

    @classmethod
    def decode(cls, content: bytes) -> Owner:
        """From JSON. What isn't there is empty: somebody owns the journal all the same, whoever it is."""
        try:
            fields = json.loads(content)
            known = {name: str(fields.get(name, "")) for name in cls.__slots__}
        except (ValueError, AttributeError):
            known = dict.fromkeys(cls.__slots__, "")
        return cls(**known)


class OwnedElsewhere(JournalError):
    """The journal can't be opened: another process has it.

    Attributes:
        owner: Which.
    """

    def __init__(self, where: str, owner: Owner) -> None:
        super().__init__(
            f"the journal in etcd under {where} is owned by {owner.replica or 'another replica'} "
            f"({owner.address or 'address unknown'}); it is free once that one stops, or its lease ends"
        )
        self.owner = owner
