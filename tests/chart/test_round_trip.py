"""The script of `helm test`, against processes that make nothing by themselves."""

import asyncio
import importlib.util

import duemq
from tests.chart.conftest import CHART
from tests.service.running_cluster import running_cluster
from tests.service.test_timer_service import running_shard


def script():
    spec = importlib.util.spec_from_file_location("round_trip", CHART / "files" / "round_trip.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_a_release_that_makes_no_topics_and_groups_by_itself_passes(tmp_path, monkeypatch):
    refusing = {"auto_create_topics": False, "auto_create_groups": False}
    round_trip = script()
    monkeypatch.setattr(round_trip, "DELAY_S", 0.1)

    def groups(nameserver):
        with duemq.Admin(nameserver) as admin:
            # The shard has one of its own, as soon as it has noted how far it is.
            return [each.name for each in admin.groups() if each.name != "%TIMER%"]

    async with (
        running_cluster(tmp_path, "b0", "b1", **refusing) as cluster,
        running_shard(cluster, tmp_path),
    ):
        monkeypatch.setenv("NAMESERVERS", cluster.nameserver)
        await asyncio.to_thread(round_trip.main)
        assert await asyncio.to_thread(groups, cluster.nameserver) == []
        await asyncio.to_thread(round_trip.main)  # the topic is there by now
