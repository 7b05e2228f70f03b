"""A group's retry policy on the wire."""

from duemq.protocol.retry_policy import ExponentialDelays, RetryPolicy
from duemq.v1 import group_admin_pb2


def config_of(group: str, policy: RetryPolicy) -> group_admin_pb2.GroupConfig:
    """As it is sent."""
    config = group_admin_pb2.GroupConfig(group=group)
    if policy.retries_max is not None:
        config.retry.retries_max = policy.retries_max
    config.retry.delays_ms.extend(policy.delays_ms)
    if policy.exponential is not None:
        config.retry.exponential.initial_ms = policy.exponential.initial_ms
        config.retry.exponential.multiplier = policy.exponential.multiplier
        config.retry.exponential.max_ms = policy.exponential.max_ms
    return config


def policy_of(policy: group_admin_pb2.RetryPolicy) -> RetryPolicy:
    """As it was sent.  Raises InvalidArgument for what no policy may be."""
    exponential = None
    if policy.HasField("exponential"):
        sent = policy.exponential
        exponential = ExponentialDelays(sent.initial_ms, sent.multiplier, sent.max_ms)
    return RetryPolicy(
        policy.retries_max if policy.HasField("retries_max") else None,
        tuple(policy.delays_ms),
        exponential,
    )
