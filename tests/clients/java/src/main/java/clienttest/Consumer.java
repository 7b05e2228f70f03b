package clienttest;

import duemq.v1.*;
import duemq.v1.Error;
import duemq.v1.Record;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/**
 * A DueMQ consumer with nothing but grpc-java and what protoc made of protos/: copy it and begin.
 *
 * <pre>Consumer NAMESERVER GROUP TOPIC COUNT [earliest]</pre>
 *
 * It reads every queue of a topic by hand (no membership: run one process a group), goes on where the group has
 * committed, prints each message as a JSON line, and ends after COUNT of them. {@code earliest} seeks to the beginning
 * first. A message whose body is "fail" is sent back the first time and comes again, a second later, through the
 * group's own topic %RETRY%GROUP.
 */
public final class Consumer implements Runnable {
    private static final int WAIT_MS = 15_000; // how long a broker may park a pull that finds nothing; at most 30,000
    private static final int TIMEOUT_MS = 20_000; // of a call: longer than WAIT_MS
    private static final long RETRY_DELAY_MS = 1_000;
    private static final long BACKOFF_MS = 500;
    private static final int ANSWER_BYTES = 16 << 20; // a pull answers up to 8 MiB

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

    /** Where the group stands in a queue; {@code settled} was sent back earlier and is to be skipped. */
    private static final class Position {
        long next;
        final Set<Long> settled = new HashSet<>();
    }

    /** A refusal that would be the same again. */
    private static final class Refused extends RuntimeException {
        Refused(Queue queue, String what, Error error) {
            super(queue + " " + what + ": " + error.getCode() + ": " + error.getMessage());
        }
    }

    private final ManagedChannel channel;
    private final String group;
    private final String topic;
    private final int queues;
    private final boolean earliest;
    private final Countdown done;
    private final Queue retries;
    private final Map<Queue, Position> positions = new HashMap<>();

    /** Consumes all queues that one broker has of the topic: one long poll for all of them. */
    private Consumer(BrokerQueues part, String group, String topic, boolean earliest, Countdown done) {
        this.channel = dial(part.getAddress());
        this.group = group;
        this.topic = topic;
        this.queues = part.getQueues();
        this.earliest = earliest;
        this.done = done;
        this.retries = new Queue("%RETRY%" + group, 0);
    }

    @Override
    public void run() {
        try {
            while (true) {
                try {
                    if (positions.isEmpty()) assign();
                    pull();
                } catch (StatusRuntimeException e) { // the call as a whole failed; all of this may be repeated
                    System.err.println(e.getStatus()); // trailer `duemq-error-bin` holds a whole duemq.v1.Error
                    Thread.sleep(BACKOFF_MS);
                }
            }
        } catch (Refused | InterruptedException e) {
            done.end(e.getMessage());
        }
    }

    private BrokerGrpc.BrokerBlockingStub broker() {
        return BrokerGrpc.newBlockingStub(channel).withDeadlineAfter(TIMEOUT_MS, TimeUnit.MILLISECONDS);
    }

    /** Begins where the group has committed; a queue without an offset at the beginning. */
    private void assign() {
        var known = broker().getOffsets(GetOffsetsRequest.newBuilder().setGroup(group).build());
        for (int id = 0; id < queues; id++) seek(new Queue(topic, id), 0);
        for (OffsetResult found : known.getQueuesList()) {
            // This broker's queue of %RETRY% is there once a message was sent back.
            boolean again = found.getTopic().equals(retries.topic);
            if (again || (found.getTopic().equals(topic) && !earliest)) {
                Queue queue = new Queue(found.getTopic(), found.getQueueId());
                seek(queue, Math.max(found.getOffset(), 0)).settled.addAll(found.getSettledList());
            }
        }
    }

    /** Goes on there; commit to make it last. */
    private Position seek(Queue queue, long offset) {
        Position position = new Position();
        position.next = offset;
        positions.put(queue, position);
        return position;
    }

    /** One long poll, and what it brought: processed, then committed. */
    private void pull() throws InterruptedException {
        PullRequest.Builder request = PullRequest.newBuilder().setGroup(group).setWaitMs(WAIT_MS);
        positions.forEach((queue, at) -> request.addQueues(
                QueuePull.newBuilder().setTopic(queue.topic).setQueueId(queue.id).setOffset(at.next)));
        for (QueueRecords pulled : broker().pull(request.build()).getQueuesList()) {
            Queue queue = new Queue(pulled.getTopic(), pulled.getQueueId());
            if (pulled.hasError()) { // one queue's: the others are fine
                refused(queue, pulled);
                continue;
            }
            int processed = consume(queue, pulled);
            positions.get(queue).next = pulled.getNextOffset();
            commit(queue);
            done.count(processed);
        }
    }

    /** Processes the records of one queue; what fails is sent back before it is committed. */
    private int consume(Queue queue, QueueRecords pulled) {
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
    private void sendBack(Queue queue, long offset, String why) {
        var failed = FailedMessage.newBuilder().setTopic(queue.topic).setQueueId(queue.id).setOffset(offset)
                .setError(why).setDelayMs(RETRY_DELAY_MS);
        var request = SendBackRequest.newBuilder().setGroup(group).addMessages(failed).build();
        var result = broker().sendBack(request).getResults(0);
        if (result.hasError()) throw new Refused(queue, offset + " was not taken back", result.getError());
        if (!positions.containsKey(retries)) seek(retries, 0);
    }

    /** Stores how far the group is: the next offset to consume. */
    private void commit(Queue queue) {
        var commit = OffsetCommit.newBuilder().setTopic(queue.topic).setQueueId(queue.id)
                .setOffset(positions.get(queue).next);
        var request = CommitOffsetsRequest.newBuilder().setGroup(group).addCommits(commit).build();
        var result = broker().commitOffsets(request).getQueues(0);
        if (result.hasError()) System.err.println(queue + " not committed: " + result.getError().getMessage());
    }

    /** An error in band. {@code retryable} says whether the same request can succeed later. */
    private void refused(Queue queue, QueueRecords pulled) throws InterruptedException {
        Error error = pulled.getError();
        if (error.getCode() == ErrorCode.OFFSET_OUT_OF_RANGE) { // deleted by age, or beyond the end
            long next = Math.min(positions.get(queue).next, pulled.getMaxOffset());
            seek(queue, Math.max(pulled.getMinOffset(), next));
        } else if (error.getRetryable()) {
            Thread.sleep(BACKOFF_MS);
        } else {
            throw new Refused(queue, "was refused", error);
        }
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

    private static ManagedChannel dial(String address) {
        return ManagedChannelBuilder.forTarget(address).usePlaintext().maxInboundMessageSize(ANSWER_BYTES).build();
    }

    public static void main(String[] args) throws InterruptedException {
        boolean earliest = args.length > 4 && args[4].equals("earliest");
        Countdown done = new Countdown(Integer.parseInt(args[3]));
        TopicRoute route = NameserverGrpc.newBlockingStub(dial(args[0]))
                .withDeadlineAfter(TIMEOUT_MS, TimeUnit.MILLISECONDS)
                .getRoute(GetRouteRequest.newBuilder().setTopic(args[2]).build());
        for (BrokerQueues part : route.getBrokersList()) {
            new Thread(new Consumer(part, args[1], args[2], earliest, done)).start();
        }
        done.ended.await();
        if (done.why != null) System.err.println(done.why);
        System.exit(done.why == null ? 0 : 1);
    }
}
