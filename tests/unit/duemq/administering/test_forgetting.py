"""Giving up a broker that comes back while nameservers are told."""

from types import SimpleNamespace

import pytest

from duemq.administering.forgetting import Forgetting
from duemq.errors import InvalidArgument, PermissionDenied
from duemq.v1 import nameserver_pb2

NAMESERVERS = ("ns-a:1", "ns-b:1", "ns-c:1")


class Asking(Forgetting):
    """`refusals`: by nameserver and whether it is the dry run, what it says; others give up."""

    def __init__(self, refusals):
        self.told = []

        async def once(address, _, timeout_s):
            dry_run = self.round
            if (error := refusals.get((address, dry_run))) is not None:
                raise error
            if not dry_run:
                self.told.append(address)
            return nameserver_pb2.ForgetResponse(address="b:1", lost_ms=5)

        self._client = SimpleNamespace(nameservers=NAMESERVERS, once=once)

    async def _ask_to_forget(self, name, *, timer, dry_run):
        self.round = dry_run
        return await super()._ask_to_forget(name, timer=timer, dry_run=dry_run)


@pytest.mark.parametrize("at", NAMESERVERS)
@pytest.mark.parametrize("kind", [InvalidArgument, PermissionDenied])
async def test_who_gave_it_up_is_named_where_another_one_hears_it_by_then(at, kind):
    admin = Asking({(at, False): kind("broker b0 lives", field="broker", value="b0")})
    with pytest.raises(kind) as raised:
        await admin.forget("b0")
    others = sorted(set(NAMESERVERS) - {at})
    assert sorted(admin.told) == others
    told = f"broker b0 lives; given up by {', '.join(others)}, until heard there"
    assert str(raised.value) == told
    assert (raised.value.field, raised.value.value) == ("broker", "b0")


async def test_while_one_hears_it_none_gives_it_up():
    admin = Asking({("ns-b:1", True): InvalidArgument("broker b0 lives")})
    with pytest.raises(InvalidArgument, match=r"^broker b0 lives$"):
        await admin.forget("b0")
    assert admin.told == []


async def test_what_all_refuse_is_told_as_it_is():
    admin = Asking({(at, False): InvalidArgument("broker b0 lives") for at in NAMESERVERS})
    with pytest.raises(InvalidArgument, match=r"^broker b0 lives$"):
        await admin.forget("b0")
