"""TLS credentials from files that may be replaced while we run, as those who issue short-lived certificates do."""

from __future__ import annotations

import grpc

from rallypoint.rpc.endpoint import ClientTLS, FileNames
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.tls import TLSFileError, client_credentials, file_stamp

log = get_logger(__name__)

Stamp = tuple[tuple[int, int, int] | None, ...]


class Credentials:
    """What to connect with. gRPC can't exchange it under a channel, so that `current` is for the next one."""

    def __init__(self, tls: ClientTLS | None) -> None:
        """`tls`: None for plaintext.

        Raises:
            TLSFileError: A file is missing, unusable or does not match.
        """
        self._tls = tls
        self.names = tls.names if tls is not None else FileNames()
        """What the files are called where they were given, for messages."""
        self._stamp = self._look()
        self.current: grpc.ChannelCredentials | None = None if tls is None else client_credentials(tls)

    def refresh(self) -> None:
        """Read the files again if they were replaced; those that are no good (half written, say) change nothing."""
        stamp = self._look()
        if self._tls is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.current = client_credentials(self._tls)
        except TLSFileError as error:
            log.warning(
                "TLS files for etcd changed and are unusable; staying with the old ones", cause=str(error)
            )

    def _look(self) -> Stamp:
        if self._tls is None:
            return ()
        files = (self._tls.ca, self._tls.certificate, self._tls.key)
        return tuple(file_stamp(path) for path in files if path is not None)
