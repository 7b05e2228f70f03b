package clienttest;

import duemq.v1.*;
import duemq.v1.Error;
import duemq.v1.Record;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.MetadataUtils;
import java.io.IOException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/**
 * A DueMQ consumer with nothing but grpc-java and what protoc made of protos/: copy it, with Dialer, and begin.
 *
 * <pre>Consumer NAMESERVER GROUP TOPIC COUNT [earliest]</pre>
 *
 * It reads every queue of a topic by hand (no membership: run one process a group), goes on where the group has
 * committed, prints each message as a JSON line, and ends after COUNT of them. {@code earliest} begins at the beginning
 * instead. A message whose body is "fail" is sent back the first time and comes again, a second later, through the
 * group's own topic %RETRY%GROUP.
 */
public final class Consumer implements Runnable {
    private static final int WAIT_MS = 15_000; // how long a broker may park a pull that finds nothing; at most 30,000
    private static final int TURN_MS = 500; // the same where pulls take turns
    private static final int PULL_QUEUES = 1_024; // in a pull at most; a topic may have so many on a broker, and there is %RETRY%
    private static final int TIMEOUT_MS = 20_000; // of a call: longer than WAIT_MS
    private static final int ROUTE_MS = 5_000; // how often to ask for brokers, addresses and queues that are new
    private static final long RETRY_DELAY_MS = 1_000;
    private static final long BACKOFF_MS = 500;
    private static final Metadata.Key<String> STORE_ID =
            Metadata.Key.of("duemq-store-id", Metadata.ASCII_STRING_MARSHALLER);

    /** The application: throws when it cannot do with a message. */
    private static void process(Record record) {
        String body = record.getBody().toStringUtf8();
        if (body.equals("fail") && record.getAttempt() == 0) throw new IllegalArgumentException("it fails once");
        String form = "{\"body\": \"%s\", \"tag\": \"%s\", \"attempt\": %d}%n";
        synchronized (System.out) {
            System.out.printf(form, body, record.getTag(), record.getAttempt());
        }
    }

    /** A queue of one broker. */
    private record Queue(String topic, int id) {}

    /**
     * Where the group stands in a queue. {@code topicId} tells the topic from a later one of its name and is said with
     * each offset; {@code settled} was sent back earlier and is to be skipped.
     */
    private static final class Position {
        long topicId;
        long next;
        long committed;
        int processed; // since the last commit
        final Set<Long> settled = new HashSet<>();
    }

    /** A broker refuses for good; the same request would be refused again. */
    private static final class Refused extends RuntimeException {
        Refused(String what, Error error) {
            super(what + ": " + error.getCode() + ": " + error.getMessage());
        }
    }

    /** This topic is no more; another one may have its name. */
    private static final class Gone extends Exception {}

    private final String group;
    private final String topic;
    private final boolean earliest;
    private final Countdown done;
    private final Queue retries;
    private final Map<Queue, Position> positions = new HashMap<>();
    private volatile BrokerQueues route; // main replaces it
    private BrokerQueues followed; // null: look for queues
    private ManagedChannel channel;
    private String address = "";
    private Metadata meant = new Metadata();

    /** Consumes all queues that one broker has of the topic. */
    private Consumer(BrokerQueues route, String group, String topic, boolean earliest, Countdown done) {
        this.route = route;
        this.group = group;
        this.topic = topic;
        this.earliest = earliest;
        this.done = done;
        this.retries = new Queue("%RETRY%" + group, 0);
    }

    @Override
    public void run() {
        try {
            while (true) {
                try {
                    follow(route);
                    // Where a commit failed as a whole: nothing new may come there that brings another.
                    for (Queue queue : Set.copyOf(positions.keySet())) unlessGone(queue, () -> commit(queue));
                    pull();
                } catch (StatusRuntimeException e) { // the call as a whole failed; all of this may be repeated
                    Error error = Dialer.refusal(e);
                    if (error != null && !error.getRetryable() && !isGone(error)) throw new Refused(address, error);
                    System.err.println(error == null ? e.getStatus() : error.getMessage());
                    Thread.sleep(BACKOFF_MS);
                    channel.resetConnectBackoff();
                }
            }
        } catch (Refused | IOException | InterruptedException e) { // IOException: files of certificates
            done.end(e.getMessage());
        }
    }

    /** Its calls say whom they are for: another broker that has the address by now refuses them. */
    private BrokerGrpc.BrokerBlockingStub broker() {
        return BrokerGrpc.newBlockingStub(channel).withDeadlineAfter(TIMEOUT_MS, TimeUnit.MILLISECONDS)
                .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(meant));
    }

    /** Does what is new in a route: an address where another replica leads, more queues. */
    private void follow(BrokerQueues route) throws IOException {
        if (route.equals(followed)) return;
        if (!route.getAddress().equals(address)) {
            ManagedChannel dialed = Dialer.dial(route.getAddress());
            if (channel != null) channel.shutdownNow();
            channel = dialed;
            address = route.getAddress();
        }
        meant = new Metadata();
        if (route.getStoreId() != 0) meant.put(STORE_ID, Long.toUnsignedString(route.getStoreId())); // else an older release
        assign();
        followed = route;
    }

    /** Begins in queues that are new: where the group has committed, or at the beginning. */
    private void assign() {
        var ours = broker().getOffsets(GetOffsetsRequest.newBuilder().setGroup(group).setTopic(topic).build());
        ours.getQueuesList().forEach(found -> begin(found, earliest));
        var known = broker().getOffsets(GetOffsetsRequest.newBuilder().setGroup(group).build());
        for (OffsetResult found : known.getQueuesList()) {
            // This broker's queue of %RETRY% is there once a message was sent back.
            if (found.getTopic().equals(retries.topic)) begin(found, false);
        }
    }

    private void begin(OffsetResult found, boolean earliest) {
        Position at = new Position();
        at.topicId = found.getTopicId();
        if (!earliest) {
            at.next = Math.max(found.getOffset(), 0);
            at.committed = at.next;
            at.settled.addAll(found.getSettledList());
        }
        positions.putIfAbsent(new Queue(found.getTopic(), found.getQueueId()), at);
    }

    /** Polls all queues once: in one long poll, or in several that take turns where they are too many for one. */
    private void pull() throws InterruptedException {
        List<QueuePull> queues = new ArrayList<>();
        positions.forEach((queue, at) -> queues.add(QueuePull.newBuilder()
                .setTopic(queue.topic).setQueueId(queue.id).setTopicId(at.topicId).setOffset(at.next).build()));
        int waitMs = queues.size() > PULL_QUEUES ? TURN_MS : WAIT_MS;
        for (int first = 0; first < queues.size(); first += PULL_QUEUES) {
            var some = queues.subList(first, Math.min(first + PULL_QUEUES, queues.size()));
            poll(PullRequest.newBuilder().setGroup(group).setWaitMs(waitMs).addAllQueues(some).build());
        }
    }

    /** One long poll, and what it brought: processed, then committed. */
    private void poll(PullRequest request) throws InterruptedException {
        for (QueueRecords pulled : broker().pull(request).getQueuesList()) {
            Queue queue = new Queue(pulled.getTopic(), pulled.getQueueId());
            unlessGone(queue, () -> take(queue, pulled));
        }
    }

    private interface Act {
        void run() throws InterruptedException, Gone;
    }

    private void unlessGone(Queue queue, Act act) throws InterruptedException {
        try {
            act.run();
        } catch (Gone e) { // begin there again, if the topic was made anew
            positions.remove(queue);
            followed = null;
        }
    }

    /** Does what an answer says of one queue. */
    private void take(Queue queue, QueueRecords pulled) throws InterruptedException, Gone {
        if (pulled.hasError()) { // one queue's: the others are fine
            refused(queue, pulled);
            return;
        }
        int processed = consume(queue, pulled);
        Position at = positions.get(queue);
        at.processed += processed;
        at.next = pulled.getNextOffset();
        commit(queue);
    }

    /** Processes the records of one queue; what fails is sent back before it is committed. */
    private int consume(Queue queue, QueueRecords pulled) throws InterruptedException, Gone {
        int processed = 0;
        var records = pulled.getRecords().getRecordsList().iterator();
        for (int run = 0; run < pulled.getRunOffsetsCount(); run++) {
            for (long step = 0; step < pulled.getRunCounts(run); step++) {
                long offset = pulled.getRunOffsets(run) + step;
                Record record = records.next();
                if (positions.get(queue).settled.contains(offset)) continue;
                try {
                    process(record);
                    processed++;
                } catch (RuntimeException e) {
                    sendBack(queue, offset, e.getMessage());
                }
            }
        }
        return processed;
    }

    /** Gives a failed message back: stored for later and settled in one step. Idempotent. */
    private void sendBack(Queue queue, long offset, String why) throws InterruptedException, Gone {
        var failed = FailedMessage.newBuilder().setTopic(queue.topic).setQueueId(queue.id).setOffset(offset)
                .setTopicId(positions.get(queue).topicId).setError(why).setDelayMs(RETRY_DELAY_MS);
        var request = SendBackRequest.newBuilder().setGroup(group).addMessages(failed).build();
        while (true) {
            var result = broker().sendBack(request).getResults(0);
            if (!result.hasError()) break;
            again(queue + " at " + offset + " was not taken back", result.getError());
        }
        if (!positions.containsKey(retries)) followed = null; // there is such a queue now
    }

    /** Stores how far the group is: the next offset to consume. */
    private void commit(Queue queue) throws InterruptedException, Gone {
        Position at = positions.get(queue);
        if (at.committed == at.next) return;
        var commit = OffsetCommit.newBuilder().setTopic(queue.topic).setQueueId(queue.id)
                .setTopicId(at.topicId).setOffset(at.next);
        var request = CommitOffsetsRequest.newBuilder().setGroup(group).addCommits(commit).build();
        while (true) {
            var result = broker().commitOffsets(request).getQueues(0);
            if (!result.hasError()) break;
            again(queue + " was not committed", result.getError());
        }
        at.committed = at.next;
        done.count(at.processed);
        at.processed = 0;
    }

    private void refused(Queue queue, QueueRecords pulled) throws InterruptedException, Gone {
        if (pulled.getError().getCode() == ErrorCode.OFFSET_OUT_OF_RANGE) { // deleted by age, or beyond the end
            Position at = positions.get(queue);
            at.next = Math.max(pulled.getMinOffset(), Math.min(at.next, pulled.getMaxOffset()));
        } else {
            again(queue + " was refused", pulled.getError());
        }
    }

    /** The topic was deleted, and perhaps made anew: what is known of its queues is over. */
    private static boolean isGone(Error error) {
        return error.getCode() == ErrorCode.TOPIC_NOT_FOUND || error.getCode() == ErrorCode.TOPIC_REPLACED;
    }

    /** Returns, a moment later, where the same request can succeed now; else throws. */
    private static void again(String what, Error error) throws InterruptedException, Gone {
        if (isGone(error)) throw new Gone();
        if (!error.getRetryable()) throw new Refused(what, error);
        System.err.println(what + ": " + error.getMessage());
        Thread.sleep(BACKOFF_MS);
    }

    /** Tells {@code main} when enough messages were processed and committed, or why it is over. */
    private static final class Countdown {
        private final CountDownLatch ended = new CountDownLatch(1);
        private int left;
        private volatile String why;

        Countdown(int left) {
            this.left = left;
        }

        synchronized void count(int processed) {
            left -= processed;
            if (left <= 0) ended.countDown();
        }

        void end(String reason) {
            why = reason;
            ended.countDown();
        }
    }

    public static void main(String[] args) throws InterruptedException, IOException {
        boolean earliest = args.length > 4 && args[4].equals("earliest");
        Countdown done = new Countdown(Integer.parseInt(args[3]));
        ManagedChannel names = Dialer.dial(args[0]);
        Map<String, Consumer> consumers = new HashMap<>(); // by broker
        do {
            try {
                TopicRoute route = NameserverGrpc.newBlockingStub(names)
                        .withDeadlineAfter(TIMEOUT_MS, TimeUnit.MILLISECONDS)
                        .getRoute(GetRouteRequest.newBuilder().setTopic(args[2]).build());
                for (BrokerQueues part : route.getBrokersList()) {
                    Consumer known = consumers.get(part.getBroker());
                    if (known != null) {
                        known.route = part;
                        continue;
                    }
                    Consumer consumer = new Consumer(part, args[1], args[2], earliest, done);
                    consumers.put(part.getBroker(), consumer);
                    new Thread(consumer).start();
                }
            } catch (StatusRuntimeException e) {
                if (consumers.isEmpty()) throw e; // else go on with what is known
                names.resetConnectBackoff();
            }
        } while (!done.ended.await(ROUTE_MS, TimeUnit.MILLISECONDS));
        if (done.why != null) System.err.println(done.why);
        System.exit(done.why == null ? 0 : 1);
    }
}
