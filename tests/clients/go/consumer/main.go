// A DueMQ consumer with nothing but google.golang.org/grpc and what protoc made of protos/: copy it and begin.
//
//	consumer NAMESERVER GROUP TOPIC COUNT [earliest]
//
// It reads every queue of a topic by hand (no membership: run one process a group), goes on where the group has
// committed, prints each message as a JSON line, and ends after COUNT of them.  `earliest` seeks to the beginning
// first.  A message whose body is "fail" is sent back the first time and comes again, a second later, through the
// group's own topic %RETRY%GROUP.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	pb "clienttest/duemqv1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	waitMs       = 15_000           // how long a broker may park a pull that finds nothing; at most 30,000
	callTimeout  = 20 * time.Second // longer than waitMs
	retryDelayMs = 1_000
	backoff      = 500 * time.Millisecond
	answerBytes  = 16 << 20 // a pull answers up to 8 MiB
)

// A refusal that would be the same again.
type refused struct{ error }

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
	next    int64
	settled map[int64]bool // sent back earlier: to be skipped
}

// brokerLoop consumes all queues that one broker has of the topic: one long poll for all of them.
type brokerLoop struct {
	broker    pb.BrokerClient
	group     string
	topic     string
	queues    int32
	positions map[queue]*position
	processed chan<- int
}

func (l *brokerLoop) run(earliest bool) error {
	for {
		err := l.step(earliest)
		if errors.As(err, &refused{}) {
			return err
		}
		if err != nil { // the call as a whole failed; everything here may be repeated: nothing is done twice
			fmt.Fprintln(os.Stderr, describe(err))
			time.Sleep(backoff)
		}
	}
}

func (l *brokerLoop) step(earliest bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	if l.positions == nil {
		return l.assign(ctx, earliest)
	}
	return l.pull(ctx)
}

// assign begins where the group has committed; a queue without an offset at the beginning.
func (l *brokerLoop) assign(ctx context.Context, earliest bool) error {
	known, err := l.broker.GetOffsets(ctx, &pb.GetOffsetsRequest{Group: l.group})
	if err != nil {
		return err
	}
	l.positions = map[queue]*position{}
	for id := range l.queues {
		l.seek(queue{l.topic, id}, 0, nil)
	}
	for _, found := range known.Queues {
		// This broker's queue of %RETRY% is there once a message was sent back.
		if found.Topic == l.retries().topic || (found.Topic == l.topic && !earliest) {
			l.seek(queue{found.Topic, found.QueueId}, max(found.Offset, 0), found.Settled)
		}
	}
	return nil
}

// seek goes on there; commit to make it last.
func (l *brokerLoop) seek(q queue, offset int64, settled []int64) {
	l.positions[q] = &position{next: offset, settled: map[int64]bool{}}
	for _, each := range settled {
		l.positions[q].settled[each] = true
	}
}

func (l *brokerLoop) retries() queue { return queue{"%RETRY%" + l.group, 0} }

// pull is one long poll, and what it brought: processed, then committed.
func (l *brokerLoop) pull(ctx context.Context) error {
	request := &pb.PullRequest{Group: l.group, WaitMs: waitMs}
	for q, at := range l.positions {
		request.Queues = append(request.Queues, &pb.QueuePull{Topic: q.topic, QueueId: q.id, Offset: at.next})
	}
	answer, err := l.broker.Pull(ctx, request)
	if err != nil {
		return err
	}
	for _, pulled := range answer.Queues {
		q := queue{pulled.Topic, pulled.QueueId}
		if pulled.Error != nil { // one queue's: the others are fine
			if err := l.refusal(q, pulled); err != nil {
				return err
			}
			continue
		}
		count, err := l.consume(q, pulled)
		if err != nil {
			return err
		}
		l.positions[q].next = pulled.NextOffset
		if err := l.commit(q); err != nil {
			return err
		}
		l.processed <- count
	}
	return nil
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
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	answer, err := l.broker.SendBack(ctx, &pb.SendBackRequest{Group: l.group, Messages: []*pb.FailedMessage{{
		Topic: q.topic, QueueId: q.id, Offset: offset, Error: failure.Error(), DelayMs: proto.Int64(retryDelayMs)}}})
	if err != nil {
		return err
	}
	if e := answer.Results[0].Error; e != nil {
		return refused{fmt.Errorf("%v offset %d was not taken back: %s", q, offset, e.Message)}
	}
	if l.positions[l.retries()] == nil {
		l.seek(l.retries(), 0, nil)
	}
	return nil
}

// commit stores how far the group is: the next offset to consume.
func (l *brokerLoop) commit(q queue) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	answer, err := l.broker.CommitOffsets(ctx, &pb.CommitOffsetsRequest{Group: l.group, Commits: []*pb.OffsetCommit{{
		Topic: q.topic, QueueId: q.id, Offset: l.positions[q].next}}})
	if err == nil && answer.Queues[0].Error != nil {
		fmt.Fprintf(os.Stderr, "%v not committed: %s\n", q, answer.Queues[0].Error.Message)
	}
	return err
}

// refusal handles an error in band.  Retryable says whether the same request can succeed later.
func (l *brokerLoop) refusal(q queue, pulled *pb.QueueRecords) error {
	switch e := pulled.Error; {
	case e.Code == pb.ErrorCode_OFFSET_OUT_OF_RANGE: // deleted by age, or beyond the end
		l.seek(q, max(pulled.MinOffset, min(l.positions[q].next, pulled.MaxOffset)), nil)
	case e.Retryable:
		time.Sleep(backoff)
	default:
		return refused{fmt.Errorf("%v: %s: %s", q, e.Code, e.Message)}
	}
	return nil
}

// describe says what a failed call says.  Its trailer `duemq-error-bin` (grpc.Trailer) holds a whole pb.Error.
func describe(err error) string {
	return status.Code(err).String() + ": " + status.Convert(err).Message()
}

func dial(address string) *grpc.ClientConn {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(answerBytes)))
	exitOn(err)
	return conn
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
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	route, err := pb.NewNameserverClient(dial(nameserver)).GetRoute(ctx, &pb.GetRouteRequest{Topic: topic})
	exitOn(err)
	processed := make(chan int)
	for _, part := range route.Brokers {
		loop := &brokerLoop{broker: pb.NewBrokerClient(dial(part.Address)), group: group, topic: topic,
			queues: part.Queues, processed: processed}
		go func() { exitOn(loop.run(earliest)) }()
	}
	for left > 0 {
		left -= <-processed
	}
}
