from datetime import UTC, datetime

from duemq.testing import MemoryCluster


def test_a_report_a_day_also_when_clocks_change():
    cluster = MemoryCluster(now=datetime(2027, 3, 1, tzinfo=UTC))
    cluster.create_topic("reports")
    cluster.put_schedule(
        "daily", topic="reports", body=b"go", cron="30 2 * * *", zone="Europe/Berlin"
    )
    cluster.advance("31d")
    assert len(cluster.messages("reports")) == 31
