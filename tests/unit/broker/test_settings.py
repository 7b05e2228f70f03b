from duemq.protocol.retry_policy import RetryPolicy
from duemq_server.broker.records.batch import BatchLimits
from duemq_server.broker.settings import Settings
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.serving import settings as rpc_settings


def test_the_store_follows_the_settings() -> None:
    given = {
        "auto_create_topics": "false",
        "default_queues": "3",
        "message_bytes_max": "10",
        "batch_bytes_max": "2KiB",
        "properties_bytes_max": "30",
        "delay_levels": "1s 1m",
        "timer_queues": "2",
        "producer_memory": "90s",
        "auto_create_groups": "false",
        "retries_max": "5",
        "retry_delays": "2s",
    }
    variables = {rpc_settings.variable(name): value for name, value in given.items()}
    settings = rpc_settings.read(Settings, ("--name", "b1", "--data-dir", "/data"), variables)

    assert settings.store_settings() == StoreSettings(
        auto_create_topics=False,
        default_queues=3,
        limits=BatchLimits(10, 2 << 10, 30),
        delay_levels_ms=(1_000, 60_000),
        timer_queues=2,
        lane_idle_ms=90_000,
        auto_create_groups=False,
        retry=RetryPolicy(5, (2_000,)),
    )
