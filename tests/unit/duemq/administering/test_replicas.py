from duemq.administering.probes import replicas_in
from duemq.descriptions import ReplicaDescription
from duemq.v1 import nameserver_pb2 as pb


def instance(kind=pb.BrokerInstance, *, epoch=1, counter=1, heard=0, lag=0, role=pb.FOLLOWER):
    return kind(
        name="g",
        version=pb.Version(epoch=epoch, counter=counter),
        last_heard_ms=heard,
        replicas=[pb.ReplicaReport(name="b", role=role, epoch=epoch, lag_bytes=lag)],
    )


def lag_of(*clusters):
    [replica] = replicas_in(clusters).of_brokers["g"]
    return replica.lag_bytes


def test_a_replica_is_as_it_was_reported():
    report = pb.ReplicaReport(
        name="b",
        role=pb.LEARNER,
        epoch=3,
        lag_bytes=5,
        lag_s=0.5,
        address="b:1",
        since_ms=7,
        reason="slow",
    )
    timers = [pb.TimerInstance(name="t", replicas=[report])]
    assert replicas_in([pb.Cluster(timers=timers)]).of_timers == {
        "t": (
            ReplicaDescription(
                "b",
                "learner",
                False,
                3,
                lag_bytes=5,
                lag_s=0.5,
                address="b:1",
                since_ms=7,
                reason="slow",
            ),
        )
    }


def test_the_nameserver_counts_that_heard_of_it_last():
    old = pb.Cluster(brokers=[instance(epoch=2, counter=9, heard=99, lag=1)])
    new = pb.Cluster(brokers=[instance(epoch=3, counter=1, heard=1, lag=2)])
    assert lag_of(old, new) == lag_of(new, old) == 2
    later = pb.Cluster(brokers=[instance(epoch=3, counter=1, heard=2, lag=3)])
    assert lag_of(new, later) == lag_of(later, new) == 3


def test_one_that_is_lost_is_listed_until_a_newer_one_is_there():
    lost = pb.Cluster(lost_brokers=[instance(epoch=2, lag=1)])
    assert lag_of(lost) == 1
    assert lag_of(lost, pb.Cluster(brokers=[instance(epoch=3, lag=2)])) == 2


def test_a_role_of_a_newer_release_is_named_by_its_number():
    [replica] = replicas_in([pb.Cluster(brokers=[instance(role=99)])]).of_brokers["g"]
    assert replica.role == "role 99"
