"""The methods of a servicer as gRPC takes them: found by name, decoded, guarded, encoded."""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from duemq.errors import DuemqError
from duemq.transport import status
from duemq_server.serving.calls import Watch, guard_coroutine, guard_generator, never_raising
from duemq_server.serving.metrics import RpcMetrics
from duemq_server.serving.permissions.access import Permissions
from duemq_server.serving.unsent import SMALL_BYTES, Unsent

# Generic in the stubs only.
RpcMethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Codec: TypeAlias = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]
"""Decodes a method's request, encodes its answer.  Where the answer comes encoded (`bytes`), who
made it takes its share of `Server.unsent`."""


def add_handlers(
    server: grpc.aio.Server, service: ServiceDescriptor, handlers: Mapping[str, RpcMethodHandler]
) -> None:
    """Serves `service` by what `method_handlers` made of it."""
    by_name = {path.rpartition("/")[2]: handler for path, handler in handlers.items()}
    generic = grpc.method_handlers_generic_handler(service.full_name, by_name)
    server.add_generic_rpc_handlers((generic,))


def method_handlers(
    service: ServiceDescriptor,
    servicer: object,
    overrides: Mapping[str, Codec] | None = None,
    metrics: RpcMetrics | None = None,
    unsent: Unsent | None = None,
    permissions: Permissions | None = None,
) -> dict[str, RpcMethodHandler]:
    """The methods of `servicer` that have the names of the service's rpcs, by their paths.

    A method is a coroutine function (request → answer; a stream of requests as an asynchronous
    iterator; answers of a stream through `context.write`) or, for a stream of answers, an
    asynchronous generator function.  A DuemqError that it raises travels by the table of status.py;
    any other exception is logged and travels as Internal.  gRPC cannot end a call with a status
    while one of its writes is under way: a method that writes raises only between its writes, and
    cancels none unless it is cancelled itself.  `overrides` names, for a method, other (request
    decoder, answer encoder) than the generated classes: the views of the hot path.  `permissions`:
    who may call them; None: everybody.
    """
    overrides = overrides or {}
    unknown = set(overrides) - set(service.methods_by_name)
    if unknown:
        raise ValueError(f"{service.full_name} has no {', '.join(sorted(unknown))}")
    return {
        f"/{service.full_name}/{method.name}": _handler(
            method, servicer, overrides.get(method.name), metrics, unsent, permissions
        )
        for method in service.methods
        if not _is_left_out(getattr(servicer, method.name))
    }


def _is_left_out(behaviour: Any) -> bool:
    """It is still the generated one, which only raises: gRPC itself answers UNIMPLEMENTED."""
    return str(behaviour.__module__).endswith("_pb2_grpc")


def _handler(
    method: MethodDescriptor,
    servicer: object,
    codec: Codec | None,
    metrics: RpcMetrics | None,
    unsent: Unsent | None,
    permissions: Permissions | None,
) -> RpcMethodHandler:
    behaviour = getattr(servicer, method.name)
    decode, encode = codec or (
        GetMessageClass(method.input_type).FromString,
        GetMessageClass(method.output_type).SerializeToString,
    )
    make = _HANDLERS[method.client_streaming, method.server_streaming]
    unary = not (method.client_streaming or method.server_streaming)
    if not method.client_streaming:
        decode = never_raising(decode)
    watch = Watch(method.containing_service.full_name, method.name, unary, metrics)
    if unsent is not None and encode is not bytes:
        behaviour, encode = _counted(behaviour, method, encode, unsent), bytes
    if permissions is not None:
        path = f"/{method.containing_service.full_name}/{method.name}"
        behaviour = permissions.around(behaviour, path, requests=method.client_streaming)
    guard = guard_generator if inspect.isasyncgenfunction(behaviour) else guard_coroutine
    return make(guard(behaviour, watch), request_deserializer=decode, response_serializer=encode)


def _counted(
    behaviour: Any, method: MethodDescriptor, encode: Callable[[Any], bytes], unsent: Unsent
) -> Any:
    """The same method, whose answers are encoded and take their shares of `unsent`."""

    async def generate(request: Any, context: Any) -> AsyncIterator[bytes]:
        async with aclosing(behaviour(request, context)) as found:
            async for answer in found:
                data = encode(answer)
                if len(data) <= SMALL_BYTES:
                    yield data
                    continue
                share = await unsent.take(context.peer(), len(data))
                try:
                    yield data
                finally:
                    share.give_back()

    async def write(request: Any, context: Any) -> None:
        await behaviour(request, _Counting(context, encode, unsent))

    async def answer(request: Any, context: Any) -> bytes:
        data = encode(await behaviour(request, context))
        if len(data) > SMALL_BYTES:
            share = unsent.take_now(context.peer(), len(data))
            context.add_done_callback(lambda _: share.give_back())
        return data

    if inspect.isasyncgenfunction(behaviour):
        return generate
    return write if method.server_streaming else answer


class _Counting:
    """The context of a method that writes its answers."""

    def __init__(self, context: Any, encode: Callable[[Any], bytes], unsent: Unsent) -> None:
        self._context = context
        self._encode = encode
        self._unsent = unsent
        self.invocation_metadata = context.invocation_metadata

    async def write(self, answer: Any) -> None:
        data = self._encode(answer)
        if len(data) <= SMALL_BYTES:
            await self._context.write(data)
            return
        share = await self._unsent.take(self._context.peer(), len(data))
        try:
            await self._context.write(data)
        finally:
            share.give_back()


# By (stream of requests, stream of answers).
_HANDLERS: dict[tuple[bool, bool], Callable[..., RpcMethodHandler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class LaterServices(grpc.GenericRpcHandler):
    """Services that come, and may be refused, while the server runs."""

    def __init__(self, names: Sequence[str], refuse: Callable[[], DuemqError | None]) -> None:
        self.names = tuple(names)
        self._refuse = refuse
        self._handlers: dict[str, RpcMethodHandler] = {}

    def expects(self, service: ServiceDescriptor) -> bool:
        """Whether it is one of these."""
        return service.full_name in self.names

    def add(self, handlers: Mapping[str, RpcMethodHandler]) -> None:
        """Methods by their paths: one of the services has come."""
        self._handlers.update(handlers)

    def service(self, details: grpc.HandlerCallDetails) -> "RpcMethodHandler | None":
        """What gRPC asks for; None: it is none of these methods, or has not come."""
        path = details.method
        if path[1:].rpartition("/")[0] not in self.names:
            return None
        error = self._refuse()
        return self._handlers.get(path) if error is None else _refused(error)


def _refused(error: DuemqError) -> RpcMethodHandler:
    """Whatever it is called with, streams or not."""

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(status.status_of(error), status.details(error), status.trailer(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
