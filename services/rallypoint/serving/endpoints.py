"""Where a service of several replicas is: a list of endpoints, as in `a:29400,b:29400,c:29400`."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.serving.endpoint import Endpoint, EndpointError, parse_endpoint


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Places of one service, each once, in the order in which they were given; at least one."""

    places: tuple[Endpoint, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.places))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach any of them."""
        return all(place.loopback for place in self.places)


def parse_endpoints(text: str) -> Endpoints:
    """Reads where a service is.

    Args:
        text: One or more of `host:port`, `[ipv6]:port` and `unix:/path`, separated by commas. A name may have
            several addresses. What is there twice counts once.

    Raises:
        EndpointError: A part is none of these; the message says which, and what is wrong with it.
    """
    parts = [part.strip() for part in text.split(",")]
    # A password has no place here; of one that is given, no part is to be told as an endpoint of its own.
    if len(parts) == 1 or ("@" in text and "unix:" not in text):
        return Endpoints((parse_endpoint(text),))
    places = []
    for number, part in enumerate(parts, 1):
        if not part:
            raise EndpointError(
                f"endpoint {number} of {text!r} is empty, expected host:port,host:port and so on"
            )
        try:
            places.append(parse_endpoint(part))
        except EndpointError as error:
            raise EndpointError(f"endpoint {number} of {len(parts)}: {error}") from None
    return Endpoints(tuple(dict.fromkeys(places)))
