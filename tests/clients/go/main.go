// A DueMQ client with nothing but generated code.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"time"

	"clienttest/dial"
	pb "clienttest/duemqv1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func require(condition bool, what string) {
	if !condition {
		check(fmt.Errorf("expected %s", what))
	}
}

func connect(address string) *grpc.ClientConn {
	conn, err := dial.To(address)
	check(err)
	return conn
}

func record(id, body, tag string) *pb.Record {
	return &pb.Record{MessageId: id, Body: []byte(body), Key: id, Tag: tag, BornMs: time.Now().UnixMilli()}
}

func main() {
	nameserver, topic := os.Args[1], os.Args[2]
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	cluster, err := pb.NewNameserverClient(connect(nameserver)).GetCluster(ctx, &pb.GetClusterRequest{})
	check(err)
	instance := cluster.Brokers[0]
	conn := connect(instance.Address)
	broker := pb.NewBrokerClient(conn)
	// Whom calls are for: another broker that has the address by now refuses them.
	meant := func(storeID uint64) context.Context {
		return metadata.AppendToOutgoingContext(ctx, "duemq-store-id", strconv.FormatUint(storeID, 10))
	}
	at := meant(instance.StoreId)
	description, err := pb.NewBrokerAdminClient(conn).CreateTopic(at, &pb.CreateTopicRequest{
		Topic: &pb.TopicConfig{Name: topic, Queues: 2}, IfMissing: true})
	check(err)
	queues := description.Topic.Queues

	// A batch, and again as after a lost answer: stored once.
	producer := rand.Uint64() >> 1
	batch := &pb.Batch{Topic: topic, QueueId: 0, ProducerId: producer, Records: &pb.RecordBatch{Records: []*pb.Record{
		record("go-1", "one", "a"), record("go-2", "two", "b"), record("go-3", "three", "a")}}}
	_, err = broker.Send(meant(instance.StoreId+1), &pb.SendRequest{Batches: []*pb.Batch{batch}})
	require(status.Code(err) == codes.Unavailable, "a batch for another broker to be refused")
	first, err := broker.Send(at, &pb.SendRequest{Batches: []*pb.Batch{batch}})
	check(err)
	again, err := broker.Send(at, &pb.SendRequest{Batches: []*pb.Batch{batch}})
	check(err)
	require(!first.Results[0].Duplicate && again.Results[0].Duplicate, "the repeated batch to be a duplicate")
	require(first.Results[0].BaseOffset == again.Results[0].BaseOffset, "one offset for both")

	// Delays: one to be delivered, one to be cancelled.
	delayed := func(id string, sequence uint64, delay int64) *pb.Batch {
		return &pb.Batch{Topic: topic, QueueId: -1, ProducerId: producer, Sequence: sequence, DelaysMs: []int64{delay},
			Records: &pb.RecordBatch{Records: []*pb.Record{record(id, "later", "d")}}}
	}
	timed, err := broker.Send(at, &pb.SendRequest{Batches: []*pb.Batch{delayed("go-4", 0, 200), delayed("go-5", 1, 3600000)}})
	check(err)
	far := timed.Results[1]
	handle := &pb.TimerHandle{StoreId: timed.StoreId, QueueId: far.QueueId, Offset: far.BaseOffset, DueMs: far.DueMs[0]}
	var shard *pb.TimerInstance
	for _, t := range cluster.Timers {
		if far.QueueId%t.Shards == t.Shard {
			shard = t
		}
	}
	answer, err := pb.NewTimerClient(connect(shard.Address)).Cancel(ctx, &pb.CancelRequest{Handles: []*pb.TimerHandle{handle}})
	check(err)
	require(answer.Results[0].Outcome == pb.CancelOutcome_CANCELLED, "CANCELLED")
	inspector := pb.NewTimerInspectorClient(connect(shard.Address))
	found, err := inspector.GetTimers(ctx, &pb.GetTimersRequest{Handles: []*pb.TimerHandle{handle}})
	check(err)
	require(found.Timers[0].State == pb.TimerState_TIMER_CANCELLED, "TIMER_CANCELLED")

	// Pull everything, tag a and then all.
	pull := func(filter string, want int) map[string]*pb.Record {
		got, offsets := map[string]*pb.Record{}, make([]int64, queues)
		for len(got) < want {
			request := &pb.PullRequest{WaitMs: 10000}
			for q := range queues {
				request.Queues = append(request.Queues, &pb.QueuePull{Topic: topic, QueueId: q, Offset: offsets[q], Filter: filter})
			}
			response, err := broker.Pull(at, request)
			check(err)
			for _, q := range response.Queues {
				require(q.Error == nil, "no error in the pull")
				offsets[q.QueueId] = q.NextOffset
				for _, r := range q.GetRecords().GetRecords() {
					got[r.MessageId] = r
				}
			}
		}
		return got
	}
	require(len(pull("a", 2)) == 2, "two records of tag a")
	all := pull("*", 4)
	require(string(all["go-1"].Body) == "one" && all["go-2"].Tag == "b", "the records as sent")
	require(all["go-4"].DueMs == timed.Results[0].DueMs[0], "the delayed record with its due time")
	require(all["go-4"].DueMs <= time.Now().UnixMilli(), "nothing early")

	// A refusal says what is wrong.
	_, err = broker.Send(at, &pb.SendRequest{Batches: []*pb.Batch{{Topic: topic, QueueId: 99,
		Records: &pb.RecordBatch{Records: []*pb.Record{record("go-6", "x", "")}}}}})
	var refusal *dial.Refusal
	require(errors.As(err, &refusal), "queue 99 to be refused")
	require(refusal.Said.Field == "queue_id" && refusal.Said.Value == "99", "the field and value of the refusal")

	check(json.NewEncoder(os.Stdout).Encode(map[string]any{"ok": true, "records": len(all), "refused": status.Code(err).String()}))
}
