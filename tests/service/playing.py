"""Parts of a cluster that a test plays: a server of those rpcs that the player has methods for."""

from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message_factory import GetMessageClass

from duemq.transport.channel import NAMESERVER_KEEPALIVE_MS

# By (stream of requests, stream of answers).
HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

# Clients ping so often, and are sent away for it by a server that has not heard of that.
PINGS = [
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", NAMESERVER_KEEPALIVE_MS // 2),
]


def play(player: object, server: Any, *files: FileDescriptor) -> None:
    """Serves the services of `files`; gRPC answers UNIMPLEMENTED for what `player` lacks."""
    for service in (service for file in files for service in file.services_by_name.values()):
        handlers = {
            method.name: HANDLERS[method.client_streaming, method.server_streaming](
                getattr(player, method.name),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
            for method in service.methods
            if hasattr(player, method.name)
        }
        assert handlers, f"{type(player).__name__} plays nothing of {service.full_name}"
        generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
        server.add_generic_rpc_handlers((generic,))
