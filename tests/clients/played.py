"""Servers between a program and the cluster, of which a test plays a part."""

from concurrent import futures
from contextlib import contextmanager

import grpc

from duemq.transport import channel
from duemq.v1 import broker_pb2, nameserver_pb2
from duemq.v1.stubs import BrokerStub, NameserverStub
from tests.clients.programs import RUN_S_MAX
from tests.service.playing import PINGS, play


class Late:
    """A nameserver that has all brokers of a topic at one address when it is asked first."""

    def __init__(self, names):
        self._names, self._asked = names, 0

    def GetRoute(self, request, context):
        route = self._names.GetRoute(request, timeout=RUN_S_MAX)
        self._asked += 1
        if self._asked == 1:
            for served in route.brokers:
                served.address = route.brokers[0].address
        return route


@contextmanager
def played(player, file):
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2), options=PINGS)
    play(player, server, file)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


@contextmanager
def late_nameserver(cluster):
    with (
        channel.connect_blocking(cluster.nameserver, None) as connection,
        played(Late(NameserverStub(connection)), nameserver_pb2.DESCRIPTOR) as address,
    ):
        yield address


class Deaf:
    """In front of a broker: it does not hear the first commit, as where a connection breaks."""

    def __init__(self, broker):
        self._broker, self._asked = broker, 0

    def GetOffsets(self, request, context):
        return self._broker.GetOffsets(request, timeout=RUN_S_MAX)

    def Pull(self, request, context):
        request.wait_ms = 100  # nothing waits any more when the test is over
        return self._broker.Pull(request, timeout=RUN_S_MAX)

    def CommitOffsets(self, request, context):
        self._asked += 1
        if self._asked == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not heard")
        return self._broker.CommitOffsets(request, timeout=RUN_S_MAX)


class Redirecting:
    """A nameserver that knows one address."""

    def __init__(self, names, address):
        self._names, self._address = names, address

    def GetRoute(self, request, context):
        route = self._names.GetRoute(request, timeout=RUN_S_MAX)
        for served in route.brokers:
            served.address = self._address
        return route


@contextmanager
def redirected(cluster, address):
    """A nameserver of the cluster that has all brokers at `address`."""
    with (
        channel.connect_blocking(cluster.nameserver, None) as names,
        played(Redirecting(NameserverStub(names), address), nameserver_pb2.DESCRIPTOR) as found,
    ):
        yield found


@contextmanager
def deaf_broker(cluster, broker):
    """The nameserver of a cluster with one broker that does not hear the first commit."""
    with (
        channel.connect_blocking(cluster.address(broker), None) as connection,
        played(Deaf(BrokerStub(connection)), broker_pb2.DESCRIPTOR) as address,
        redirected(cluster, address) as found,
    ):
        yield found
