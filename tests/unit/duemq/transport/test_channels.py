"""One channel an address, and another one for another certificate."""

import asyncio

import grpc

from duemq.transport.channel import Channels
from tests.certificates import authority, certificate, needs_openssl

A, B = "127.0.0.1:1", "127.0.0.1:2"
SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


async def test_an_address_has_one_channel_until_it_is_left():
    channels = Channels(None)
    first = channels.to(A)
    assert channels.to(A) is first
    assert channels.to(B) is not first
    channels.leave([A, "nobody:1"])
    assert channels.addresses == {B}
    assert channels.to(A) is not first
    await channels.close()
    assert channels.addresses == set()


@needs_openssl
async def test_a_new_certificate_makes_a_new_channel_and_disturbs_no_old_one(tmp_path):
    tls = certificate(authority(tmp_path), "mine")
    channels = Channels(tls)
    first = channels.to(A)
    assert channels.to(A) is first
    certificate(tmp_path / "ca.pem", "mine")
    second = channels.to(A)
    assert second is not first
    assert channels.to(A) is second
    assert first.get_state() is not SHUTDOWN


@needs_openssl
async def test_what_two_new_certificates_have_passed_is_closed(tmp_path):
    tls = certificate(authority(tmp_path), "mine")
    channels = Channels(tls)
    made = [channels.to(A)]
    for _ in range(3):
        certificate(tmp_path / "ca.pem", "mine")
        made.append(channels.to(A))
    await asyncio.gather(*channels._closing)
    assert [each.get_state() is SHUTDOWN for each in made] == [True, True, False, False]
    await channels.close()
    assert all(each.get_state() is SHUTDOWN for each in made)
