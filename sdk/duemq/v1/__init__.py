"""Generated from protos/, but for this file: the wire contract, package duemq.v1."""

from importlib import import_module
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder
from google.protobuf.message_factory import GetMessageClass


def build(serialized: bytes, module: dict[str, Any]) -> None:
    """Puts the messages of a described file, and its DESCRIPTOR, into a module's names.

    By the same calls as modules of protoc's, which hold a copy of them each.
    """
    described = descriptor_pool.Default().AddSerializedFile(serialized)
    module["DESCRIPTOR"] = described
    builder.BuildMessageAndEnumDescriptors(described, module)
    builder.BuildTopDescriptorsAndMessages(described, module["__name__"], module)


class Stub:
    """A service as its clients call it: `stub.Method(request, timeout=…)`, or a stream's method.

    Each method is made of its descriptor when it is first asked for: most stubs are for one call.
    So a stub loads no messages before it is used.
    """

    service: tuple[str, str]
    """The module of its messages, and its name there."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        module, service_name = self.service
        service = import_module(module).DESCRIPTOR.services_by_name[service_name]
        method = service.methods_by_name.get(name)
        if method is None:
            raise AttributeError(name)
        streams = method.client_streaming, method.server_streaming
        kind = "_".join("stream" if each else "unary" for each in streams)
        made = getattr(self._channel, kind)(
            f"/{service.full_name}/{name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
            _registered_method=True,
        )
        setattr(self, name, made)
        return made

    @classmethod
    def ask(cls, name: str, request: Any) -> Any:
        """The call of a unary method, of a channel and seconds."""
        return lambda to, left_s, **more: getattr(cls(to), name)(request, timeout=left_s, **more)
