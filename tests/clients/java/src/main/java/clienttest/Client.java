package clienttest;

import duemq.v1.*;
import duemq.v1.Record;
import com.google.protobuf.ByteString;
import io.grpc.ClientInterceptor;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.MetadataUtils;
import java.io.IOException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/** A DueMQ client with nothing but generated code. */
public final class Client {
    private static final List<ManagedChannel> CHANNELS = new ArrayList<>();
    private static final Metadata.Key<String> STORE_ID =
            Metadata.Key.of("duemq-store-id", Metadata.ASCII_STRING_MARSHALLER);

    private static ManagedChannel dial(String address) throws IOException {
        ManagedChannel channel = Dialer.dial(address);
        CHANNELS.add(channel);
        return channel;
    }

    /** Calls say whom they are for: another broker that has the address by now refuses them. */
    private static ClientInterceptor meant(long storeId) {
        Metadata metadata = new Metadata();
        metadata.put(STORE_ID, Long.toUnsignedString(storeId));
        return MetadataUtils.newAttachHeadersInterceptor(metadata);
    }

    private static void require(boolean condition, String what) {
        if (!condition) throw new AssertionError("expected " + what);
    }

    private static Record record(String id, String body, String tag) {
        return Record.newBuilder().setMessageId(id).setBody(ByteString.copyFromUtf8(body)).setKey(id).setTag(tag)
                .setBornMs(System.currentTimeMillis()).build();
    }

    private static Map<String, Record> pull(
            BrokerGrpc.BrokerBlockingStub broker, String topic, int queues, String filter, int want) {
        Map<String, Record> got = new HashMap<>();
        long[] offsets = new long[queues];
        while (got.size() < want) {
            PullRequest.Builder request = PullRequest.newBuilder().setWaitMs(10_000);
            for (int q = 0; q < queues; q++) {
                request.addQueues(QueuePull.newBuilder().setTopic(topic).setQueueId(q).setOffset(offsets[q]).setFilter(filter));
            }
            for (QueueRecords queue : broker.pull(request.build()).getQueuesList()) {
                require(!queue.hasError(), "no error in the pull");
                offsets[queue.getQueueId()] = queue.getNextOffset();
                queue.getRecords().getRecordsList().forEach(r -> got.put(r.getMessageId(), r));
            }
        }
        return got;
    }

    public static void main(String[] args) throws IOException {
        String topic = args[1];
        Cluster cluster = NameserverGrpc.newBlockingStub(dial(args[0])).withDeadlineAfter(30, TimeUnit.SECONDS)
                .getCluster(GetClusterRequest.getDefaultInstance());
        ManagedChannel channel = dial(cluster.getBrokers(0).getAddress());
        long storeId = cluster.getBrokers(0).getStoreId();
        var anyone = BrokerGrpc.newBlockingStub(channel).withDeadlineAfter(30, TimeUnit.SECONDS);
        var broker = anyone.withInterceptors(meant(storeId));
        int queues = BrokerAdminGrpc.newBlockingStub(channel).withDeadlineAfter(30, TimeUnit.SECONDS)
                .withInterceptors(meant(storeId))
                .createTopic(CreateTopicRequest.newBuilder().setIfMissing(true)
                        .setTopic(TopicConfig.newBuilder().setName(topic).setQueues(2)).build())
                .getTopic().getQueues();

        // A batch, and again as after a lost answer: stored once.
        long producer = ThreadLocalRandom.current().nextLong(1, Long.MAX_VALUE);
        Batch batch = Batch.newBuilder().setTopic(topic).setQueueId(0).setProducerId(producer)
                .setRecords(RecordBatch.newBuilder().addRecords(record("java-1", "one", "a"))
                        .addRecords(record("java-2", "two", "b")).addRecords(record("java-3", "three", "a"))).build();
        SendRequest send = SendRequest.newBuilder().addBatches(batch).build();
        try {
            anyone.withInterceptors(meant(storeId ^ 1)).send(send);
            throw new AssertionError("a batch for another broker is to be refused");
        } catch (StatusRuntimeException e) {
            require(e.getStatus().getCode() == Status.Code.UNAVAILABLE, "UNAVAILABLE");
        }
        BatchResult first = broker.send(send).getResults(0);
        BatchResult again = broker.send(send).getResults(0);
        require(!first.getDuplicate() && again.getDuplicate(), "the repeated batch to be a duplicate");
        require(first.getBaseOffset() == again.getBaseOffset(), "one offset for both");

        // Delays: one to be delivered, one to be cancelled.
        Batch.Builder delayed = Batch.newBuilder().setTopic(topic).setQueueId(-1).setProducerId(producer);
        SendResponse timed = broker.send(SendRequest.newBuilder()
                .addBatches(delayed.clone().setSequence(0).addDelaysMs(200)
                        .setRecords(RecordBatch.newBuilder().addRecords(record("java-4", "later", "d"))))
                .addBatches(delayed.clone().setSequence(1).addDelaysMs(3_600_000)
                        .setRecords(RecordBatch.newBuilder().addRecords(record("java-5", "never", "d")))).build());
        BatchResult far = timed.getResults(1);
        TimerInstance shard = cluster.getTimersList().stream()
                .filter(t -> far.getQueueId() % t.getShards() == t.getShard()).findFirst().orElseThrow();
        CancelOutcome outcome = TimerGrpc.newBlockingStub(dial(shard.getAddress())).withDeadlineAfter(30, TimeUnit.SECONDS)
                .cancel(CancelRequest.newBuilder().addHandles(TimerHandle.newBuilder().setStoreId(timed.getStoreId())
                        .setQueueId(far.getQueueId()).setOffset(far.getBaseOffset()).setDueMs(far.getDueMs(0))).build())
                .getResults(0).getOutcome();
        require(outcome == CancelOutcome.CANCELLED, "CANCELLED");

        // Pull everything, tag a and then all.
        require(pull(broker, topic, queues, "a", 2).size() == 2, "two records of tag a");
        Map<String, Record> all = pull(broker, topic, queues, "*", 4);
        require(all.get("java-1").getBody().toStringUtf8().equals("one"), "the records as sent");
        require(all.get("java-4").getDueMs() == timed.getResults(0).getDueMs(0), "the delayed record with its due time");
        require(all.get("java-4").getDueMs() <= System.currentTimeMillis(), "nothing early");

        // A refusal says what is wrong.
        String refused = "";
        try {
            broker.send(SendRequest.newBuilder().addBatches(Batch.newBuilder().setTopic(topic).setQueueId(99)
                    .setRecords(RecordBatch.newBuilder().addRecords(record("java-6", "x", "")))).build());
        } catch (StatusRuntimeException e) {
            refused = e.getStatus().getCode().name();
            require(Dialer.refusal(e).getField().equals("queue_id"), "the field of the refusal");
        }
        require(!refused.isEmpty(), "queue 99 to be refused");
        System.out.printf("{\"ok\": true, \"records\": %d, \"refused\": \"%s\"}%n", all.size(), refused);
        CHANNELS.forEach(ManagedChannel::shutdownNow);
    }
}
