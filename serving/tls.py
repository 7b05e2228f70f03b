"""The certificate that a server shows, taken anew from its files when these change."""

import grpc

from duemq.settings import Tls
from duemq.transport.tls import Certificates


def server_credentials(tls: Tls, *, verify_clients: bool) -> grpc.ServerCredentials:
    """With `verify_clients`, who shows no certificate of `tls.ca` is not let in.

    Raises InvalidArgument naming the file that is of no use.
    """
    files = Certificates(tls)

    def configuration() -> grpc.ServerCertificateConfiguration:
        ca, cert, key = files.pems
        assert cert is not None
        assert key is not None
        return grpc.ssl_server_certificate_configuration(
            [(key, cert)], ca if verify_clients else None
        )

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks with each handshake."""
        return configuration() if files.renew() else None

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        renewed,  # type: ignore[arg-type]  # None: as before
        require_client_authentication=verify_clients,
    )
