// A DueMQ consumer with nothing but google.golang.org/grpc and what protoc made of protos/: copy it, with ../dial, and
// begin.
//
//	consumer NAMESERVER GROUP TOPIC COUNT [earliest]
//
// It reads every queue of a topic by hand (no membership: run one process a group), goes on where the group has
// committed, prints each message as a JSON line, and ends after COUNT of them.  `earliest` begins at the beginning
// instead.  A message whose body is "fail" is sent back the first time and comes again, a second later, through the
// group's own topic %RETRY%GROUP.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"clienttest/dial"
	pb "clienttest/duemqv1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

const (
	waitMs       = 15_000           // how long a broker may park a pull that finds nothing; at most 30,000
	turnMs       = 500              // the same where pulls take turns
	pullQueues   = 1_024            // in a pull at most; a topic may have so many on a broker, and there is %RETRY%
	callTimeout  = 20 * time.Second // longer than waitMs
	routeEvery   = 5 * time.Second  // how often to ask for brokers, addresses and queues that are new
	retryDelayMs = 1_000
	backoff      = 500 * time.Millisecond
)

// A broker refuses for good; the same request would be refused again.
type refused struct{ error }

// This topic is no more; another one may have its name.
var errGone = errors.New("the topic is gone")

// The application: an error means that it cannot do with a message.
func process(record *pb.Record) error {
	if string(record.Body) == "fail" && record.Attempt == 0 {
		return errors.New("this body fails once")
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{
		"body": string(record.Body), "tag": record.Tag, "attempt": record.Attempt})
}

// A queue of one broker.
type queue struct {
	topic string
	id    int32
}

// Where the group stands in a queue.
type position struct {
	topicID   uint64 // tells the topic from a later one of its name; said with each offset
	next      int64
	committed int64
	processed int            // since the last commit
	settled   map[int64]bool // sent back earlier: to be skipped
}

// brokerLoop consumes all queues that one broker has of the topic.
type brokerLoop struct {
	route     atomic.Pointer[pb.BrokerQueues] // main replaces it
	group     string
	topic     string
	earliest  bool
	processed chan<- int

	followed  *pb.BrokerQueues // nil: look for queues
	address   string
	storeID   uint64 // of the broker: whom calls are for
	conn      *grpc.ClientConn
	broker    pb.BrokerClient
	positions map[queue]*position
}

func (l *brokerLoop) run() error {
	for {
		err := l.step()
		var refusal *dial.Refusal // of a call as a whole
		if errors.As(err, &refused{}) || errors.As(err, &refusal) && !refusal.Said.Retryable && !gone(refusal.Said) {
			return err
		}
		if err != nil { // everything here may be repeated: nothing is done twice
			fmt.Fprintln(os.Stderr, err)
			time.Sleep(backoff)
		}
	}
}

func (l *brokerLoop) step() error {
	if err := l.follow(l.route.Load()); err != nil {
		return err
	}
	// Where a commit failed as a whole: nothing new may come there that brings another.
	for q := range l.positions {
		if err := l.unlessGone(q, l.commit(q)); err != nil {
			return err
		}
	}
	return l.pull()
}

// follow does what is new in a route: an address where another replica leads, more queues.
func (l *brokerLoop) follow(route *pb.BrokerQueues) error {
	if proto.Equal(route, l.followed) {
		return nil
	}
	if route.Address != l.address {
		conn, err := dial.To(route.Address)
		if err != nil {
			return err
		}
		if l.conn != nil {
			l.conn.Close()
		}
		l.conn, l.address, l.broker = conn, route.Address, pb.NewBrokerClient(conn)
	}
	l.storeID = route.StoreId
	if err := l.assign(); err != nil {
		return err
	}
	l.followed = route
	return nil
}

// context is that of a call: it ends in time, and says whom it is for.  Another broker that has the address by now
// refuses it, and the next route tells where this one is.
func (l *brokerLoop) context() (context.Context, context.CancelFunc) {
	ctx := context.Background()
	if l.storeID != 0 { // else of an older release
		ctx = metadata.AppendToOutgoingContext(ctx, "duemq-store-id", strconv.FormatUint(l.storeID, 10))
	}
	return context.WithTimeout(ctx, callTimeout)
}

// assign begins in queues that are new: where the group has committed, or at the beginning.
func (l *brokerLoop) assign() error {
	ctx, cancel := l.context()
	defer cancel()
	ours, err := l.broker.GetOffsets(ctx, &pb.GetOffsetsRequest{Group: l.group, Topic: l.topic})
	if err != nil {
		return err
	}
	for _, found := range ours.Queues {
		l.begin(found, l.earliest)
	}
	known, err := l.broker.GetOffsets(ctx, &pb.GetOffsetsRequest{Group: l.group})
	if err != nil {
		return err
	}
	for _, found := range known.Queues {
		// This broker's queue of %RETRY% is there once a message was sent back.
		if found.Topic == l.retries().topic {
			l.begin(found, false)
		}
	}
	return nil
}

func (l *brokerLoop) begin(found *pb.OffsetResult, earliest bool) {
	q := queue{found.Topic, found.QueueId}
	if l.positions[q] != nil {
		return
	}
	at := &position{topicID: found.TopicId, settled: map[int64]bool{}}
	if !earliest {
		at.next = max(found.Offset, 0)
		at.committed = at.next
		for _, each := range found.Settled {
			at.settled[each] = true
		}
	}
	l.positions[q] = at
}

func (l *brokerLoop) retries() queue { return queue{"%RETRY%" + l.group, 0} }

// pull polls all queues once: in one long poll, or in several that take turns where they are too many for one.
func (l *brokerLoop) pull() error {
	var queues []*pb.QueuePull
	for q, at := range l.positions {
		queues = append(queues, &pb.QueuePull{Topic: q.topic, QueueId: q.id, TopicId: at.topicID, Offset: at.next})
	}
	wait := int32(waitMs)
	if len(queues) > pullQueues {
		wait = turnMs
	}
	for some := range slices.Chunk(queues, pullQueues) {
		if err := l.poll(&pb.PullRequest{Group: l.group, WaitMs: wait, Queues: some}); err != nil {
			return err
		}
	}
	return nil
}

// poll is one long poll, and what it brought: processed, then committed.
func (l *brokerLoop) poll(request *pb.PullRequest) error {
	ctx, cancel := l.context()
	defer cancel()
	answer, err := l.broker.Pull(ctx, request)
	if err != nil {
		return err
	}
	for _, pulled := range answer.Queues {
		q := queue{pulled.Topic, pulled.QueueId}
		if err := l.unlessGone(q, l.take(q, pulled)); err != nil {
			return err
		}
	}
	return nil
}

// unlessGone passes an error on, unless the topic is gone: then it begins there again, if that was made anew.
func (l *brokerLoop) unlessGone(q queue, err error) error {
	if errors.Is(err, errGone) {
		delete(l.positions, q)
		l.followed = nil
		return nil
	}
	return err
}

// take does what an answer says of one queue.
func (l *brokerLoop) take(q queue, pulled *pb.QueueRecords) error {
	at := l.positions[q]
	if e := pulled.Error; e != nil { // one queue's: the others are fine
		if e.Code == pb.ErrorCode_OFFSET_OUT_OF_RANGE { // deleted by age, or beyond the end
			at.next = max(pulled.MinOffset, min(at.next, pulled.MaxOffset))
			return nil
		}
		return again(fmt.Sprint(q), e)
	}
	count, err := l.consume(q, pulled)
	if err != nil {
		return err
	}
	at.next = pulled.NextOffset
	at.processed += count
	return l.commit(q)
}

// consume processes the records of one queue; what fails is sent back before it is committed.
func (l *brokerLoop) consume(q queue, pulled *pb.QueueRecords) (count int, err error) {
	records := pulled.GetRecords().GetRecords()
	for run, first := range pulled.RunOffsets {
		for offset := first; offset < first+pulled.RunCounts[run]; offset++ {
			record := records[0]
			records = records[1:]
			if l.positions[q].settled[offset] {
				continue
			}
			if failure := process(record); failure == nil {
				count++
			} else if err := l.sendBack(q, offset, failure); err != nil {
				return count, err
			}
		}
	}
	return count, nil
}

// sendBack gives a failed message back: stored for later and settled in one step.  Idempotent.
func (l *brokerLoop) sendBack(q queue, offset int64, failure error) error {
	request := &pb.SendBackRequest{Group: l.group, Messages: []*pb.FailedMessage{{
		Topic: q.topic, QueueId: q.id, TopicId: l.positions[q].topicID, Offset: offset,
		Error: failure.Error(), DelayMs: proto.Int64(retryDelayMs)}}}
	err := l.repeat(fmt.Sprintf("%v at %d was not taken back", q, offset), func(ctx context.Context) (*pb.Error, error) {
		answer, err := l.broker.SendBack(ctx, request)
		if err != nil {
			return nil, err
		}
		return answer.Results[0].Error, nil
	})
	if err == nil && l.positions[l.retries()] == nil {
		l.followed = nil // there is such a queue now
	}
	return err
}

// commit stores how far the group is: the next offset to consume.
func (l *brokerLoop) commit(q queue) error {
	at := l.positions[q]
	if at.committed == at.next {
		return nil
	}
	request := &pb.CommitOffsetsRequest{Group: l.group, Commits: []*pb.OffsetCommit{{
		Topic: q.topic, QueueId: q.id, TopicId: at.topicID, Offset: at.next}}}
	err := l.repeat(fmt.Sprintf("%v was not committed", q), func(ctx context.Context) (*pb.Error, error) {
		answer, err := l.broker.CommitOffsets(ctx, request)
		if err != nil {
			return nil, err
		}
		return answer.Queues[0].Error, nil
	})
	if err != nil {
		return err
	}
	at.committed = at.next
	l.processed <- at.processed
	at.processed = 0
	return nil
}

// repeat calls until what is asked for is done, or refused for good, or the call as a whole fails.
func (l *brokerLoop) repeat(what string, call func(context.Context) (*pb.Error, error)) error {
	for {
		ctx, cancel := l.context()
		refusal, err := call(ctx)
		cancel()
		if err != nil || refusal == nil {
			return err
		}
		if err := again(what, refusal); err != nil {
			return err
		}
	}
}

// again returns nil, a moment later, where the same request can succeed now.
func again(what string, e *pb.Error) error {
	switch {
	case gone(e):
		return errGone
	case !e.Retryable:
		return refused{fmt.Errorf("%s: %s: %s", what, e.Code, e.Message)}
	}
	fmt.Fprintf(os.Stderr, "%s: %s\n", what, e.Message)
	time.Sleep(backoff)
	return nil
}

// gone: the topic was deleted, and perhaps made anew.  What is known of its queues is over.
func gone(e *pb.Error) bool {
	return e.Code == pb.ErrorCode_TOPIC_NOT_FOUND || e.Code == pb.ErrorCode_TOPIC_REPLACED
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	nameserver, group, topic := os.Args[1], os.Args[2], os.Args[3]
	left, err := strconv.Atoi(os.Args[4])
	exitOn(err)
	earliest := len(os.Args) > 5 && os.Args[5] == "earliest"
	conn, err := dial.To(nameserver)
	exitOn(err)
	names := pb.NewNameserverClient(conn)
	processed := make(chan int)
	loops := map[string]*brokerLoop{} // by broker
	follow := func() {
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		answer, err := names.GetRoute(ctx, &pb.GetRouteRequest{Topic: topic})
		if len(loops) == 0 {
			exitOn(err)
		}
		for _, route := range answer.GetBrokers() { // none after an error: go on with what is known
			loop := loops[route.Broker]
			if loop == nil {
				loop = &brokerLoop{group: group, topic: topic, earliest: earliest, processed: processed,
					positions: map[queue]*position{}}
				loops[route.Broker] = loop
				loop.route.Store(route)
				go func() { exitOn(loop.run()) }()
			}
			loop.route.Store(route)
		}
	}
	follow()
	for routes := time.Tick(routeEvery); left > 0; {
		select {
		case count := <-processed:
			left -= count
		case <-routes:
			follow()
		}
	}
}
