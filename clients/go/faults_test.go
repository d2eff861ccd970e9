package taskd_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	taskd "github.com/taskd/taskd/clients/go"
	"github.com/taskd/taskd/clients/go/taskdpb"
	"github.com/taskd/taskd/clients/go/taskdtest"
)

// serve serves the tasks of a server on a port of its own, with the faults that the options bring.
func serve(t *testing.T, server *taskdtest.Server, options ...grpc.ServerOption) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serving := grpc.NewServer(options...)
	taskdpb.RegisterTasksServer(serving, server)
	taskdpb.RegisterDiscoveryServer(serving, server)
	go func() { _ = serving.Serve(listener) }()
	t.Cleanup(serving.Stop)
	return listener.Addr().String()
}

// fault comes before each unary call. Without an error, the call is made.
func fault(check func(ctx context.Context, request any) error) grpc.ServerOption {
	return grpc.UnaryInterceptor(func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if err := check(ctx, request); err != nil {
			return nil, err
		}
		return handler(ctx, request)
	})
}

func clientOf(t *testing.T, options taskd.ClientOptions) *taskd.Client {
	t.Helper()
	client, err := taskd.NewClient(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestRefusedBatchLosesNoReport(t *testing.T) {
	server := taskdtest.NewServer(t)
	begin := map[string]chan struct{}{"first": make(chan struct{}), "second": make(chan struct{}), "third": make(chan struct{})}
	goOn := make(chan struct{})
	var calls atomic.Int32
	address := serve(t, server, fault(func(_ context.Context, request any) error {
		if _, isOfCompletions := request.(*taskdpb.CompleteTasksRequest); !isOfCompletions {
			return nil
		}
		switch calls.Add(1) {
		case 1:
			<-goOn
		case 2:
			return status.Error(codes.InvalidArgument, "one of these is wrong")
		case 3:
			// The first half waits for taskd, while other tasks end and the second half goes.
			close(begin["third"])
			return status.Error(codes.Unavailable, "away")
		}
		return nil
	}))
	var tasks []taskd.NewTask
	for wave, count := range map[string]int{"first": 1, "second": 8, "third": 4} {
		for n := range count {
			tasks = append(tasks, taskd.NewTask{Queue: "q", Key: fmt.Sprint(wave, n), Payload: wave})
		}
	}
	client := clientOf(t, taskd.ClientOptions{Addresses: []string{address}})
	insert(t, client, tasks...)
	options := taskd.WorkerOptions{Queues: []string{"q"}, Poll: true, Concurrency: len(tasks)}
	worker, stop := start(t, client, options, func(_ context.Context, task *taskd.Task) (any, error) {
		<-begin[string(task.Payload)]
		return nil, nil
	})
	until(t, "all run", func() bool { return worker.Stats().Running == len(tasks) })
	close(begin["first"])
	until(t, "the first report is under way", func() bool { return calls.Load() == 1 })
	close(begin["second"])
	until(t, "the second ones wait", func() bool { return worker.Stats().Running == 4 })
	close(goOn)
	until(t, "all are completed", func() bool { return worker.Stats().Completed == len(tasks) })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		if outcome := server.Outcome("q", task.Key); outcome.Status != completed {
			t.Errorf("%s: %+v", task.Key, outcome)
		}
	}
}

func TestLeasesSurviveASilentProcess(t *testing.T) {
	server := taskdtest.NewServer(t)
	var isSilent atomic.Bool
	silent := serve(t, server, fault(func(ctx context.Context, _ any) error {
		if isSilent.Load() {
			<-ctx.Done()
		}
		return ctx.Err()
	}))
	extended := make(chan time.Time, 1)
	other := serve(t, server, fault(func(_ context.Context, request any) error {
		if _, isExtension := request.(*taskdpb.ExtendTasksRequest); isExtension {
			select {
			case extended <- time.Now():
			default:
			}
		}
		return nil
	}))
	insert(t, server.Client(t), taskd.NewTask{Queue: "q", Key: "a"})
	client := clientOf(t, taskd.ClientOptions{Addresses: []string{silent, other}})
	goOn := make(chan struct{})
	finish := sync.OnceFunc(func() { close(goOn) })
	defer finish()
	leased := make(chan time.Time, 1)
	options := taskd.WorkerOptions{Queues: []string{"q"}, Poll: true, Lease: 6 * time.Second}
	worker, stop := start(t, client, options, func(context.Context, *taskd.Task) (any, error) {
		leased <- time.Now()
		isSilent.Store(true)
		<-goOn
		return nil, nil
	})
	began := <-leased
	if took := (<-extended).Sub(began); took >= options.Lease {
		t.Errorf("the other process was asked after %s", took)
	}
	finish()
	until(t, "it is completed", func() bool { return worker.Stats().Completed == 1 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

func TestSurplusIsInsertedAgainAfterPauses(t *testing.T) {
	server := taskdtest.NewServer(t)
	var isAway atomic.Bool
	var calls atomic.Int32
	address := serve(t, server, fault(func(_ context.Context, request any) error {
		if _, isInsert := request.(*taskdpb.InsertTasksRequest); isInsert && isAway.Load() {
			calls.Add(1)
			return status.Error(codes.Unavailable, "away")
		}
		return nil
	}))
	client := clientOf(t, taskd.ClientOptions{Addresses: []string{address}, Patience: time.Nanosecond})
	insert(t, client, taskd.NewTask{Queue: "q", Key: "a"})
	isAway.Store(true)
	time.AfterFunc(400*time.Millisecond, func() { isAway.Store(false) })
	worker, stop := start(t, client, taskd.WorkerOptions{Queues: []string{"q"}}, func(_ context.Context, task *taskd.Task) (any, error) {
		// One has room in the completion.
		task.Discover(taskd.NewTask{Queue: "found", Key: "b", Payload: make([]byte, 3<<19)},
			taskd.NewTask{Queue: "found", Key: "c", Payload: make([]byte, 3<<19)})
		return nil, nil
	})
	until(t, "it is completed", func() bool { return worker.Stats().Completed == 1 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"b", "c"} {
		if outcome := server.Outcome("found", key); outcome.Status != queued {
			t.Errorf("%s: %+v", key, outcome)
		}
	}
	if calls.Load() > 12 {
		t.Errorf("%d calls in 0.4 s", calls.Load())
	}
}

// lateStream withholds the first frame of the worker from the server.
type lateStream struct {
	grpc.ServerStream
	arrived chan<- struct{}
	goOn    <-chan struct{}
}

func (s *lateStream) RecvMsg(message any) error {
	err := s.ServerStream.RecvMsg(message)
	if frame, isFrame := message.(*taskdpb.WorkerFrame); isFrame && frame.Open != nil {
		s.arrived <- struct{}{}
		<-s.goOn
	}
	return err
}

func TestStopWaitsForTheOpeningOfAStream(t *testing.T) {
	server := taskdtest.NewServer(t)
	arrived := make(chan struct{}, 10)
	goOn := make(chan struct{})
	address := serve(t, server, grpc.StreamInterceptor(func(of any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		return handler(of, &lateStream{ServerStream: stream, arrived: arrived, goOn: goOn})
	}))
	client := clientOf(t, taskd.ClientOptions{Addresses: []string{address}})
	insert(t, client, taskd.NewTask{Queue: "q", Key: "a"})
	worker, stop := start(t, client, taskd.WorkerOptions{Queues: []string{"q"}}, crawl)
	<-arrived
	worker.Stop()
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	select {
	case <-stopped:
		t.Error("the tasks that taskd may have sent stay away")
	case <-time.After(200 * time.Millisecond):
	}
	close(goOn)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if outcome := server.Outcome("q", "a"); outcome.Status != queued || outcome.Attempts != 0 {
		t.Errorf("%+v", outcome)
	}
}

// saysThatItIsNotGRPC makes a worker and an insert at the wrong port.
func saysThatItIsNotGRPC(t *testing.T, address string) {
	t.Helper()
	said := address + ": it does not answer as gRPC: taskd's gRPC port is 7601 by default, 7600 is HTTP"
	var log journal
	options := taskd.ClientOptions{Addresses: []string{address}, Patience: time.Hour, Logger: log.logger()}
	client, err := taskd.NewClient(options)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	inserted := make(chan error, 1)
	go func() {
		_, err := client.Insert(ctx, taskd.NewTask{Queue: "q", Key: "a"})
		inserted <- err
	}()
	for _, poll := range []bool{false, true} {
		var workerLog journal
		_, stop := start(t, client, taskd.WorkerOptions{Queues: []string{"q"}, Poll: poll, Logger: workerLog.logger()}, crawl)
		until(t, "the worker says so", func() bool { return strings.Contains(workerLog.String(), said) })
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(workerLog.String(), "takes tasks of") {
			t.Errorf("it takes no tasks: %s", workerLog.String())
		}
	}
	until(t, "the client says so", func() bool { return strings.Contains(log.String(), said) })
	cancel()
	if err := <-inserted; !errors.Is(err, context.Canceled) {
		t.Errorf("the insert: %v", err)
	}
}

func TestAServerOfHTTPIsNamed(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	saysThatItIsNotGRPC(t, server.Listener.Addr().String())
	saysThatItIsNotGRPC(t, newProcess(t, "").start().http)
}

func TestNothingIsSaidBeforeTaskdRefusesAQueue(t *testing.T) {
	client := newProcess(t, "").start().client(taskd.ClientOptions{})
	for _, poll := range []bool{false, true} {
		var log journal
		options := taskd.WorkerOptions{Queues: []string{"my pages"}, Poll: poll, Logger: log.logger()}
		err := taskd.NewWorker(client, options, crawl).Run(context.Background())
		if err == nil || !strings.Contains(err.Error(), `queue "my pages" contains ' '`) {
			t.Errorf("poll=%t: %v", poll, err)
		}
		if log.String() != "" {
			t.Errorf("poll=%t: it says %s", poll, log.String())
		}
	}
}

func TestACallSaysThatTaskdIsAwayAndBack(t *testing.T) {
	address := freePort(t)
	var log journal
	options := taskd.ClientOptions{Addresses: []string{address}, Patience: time.Hour, Logger: log.logger()}
	client, err := taskd.NewClient(options)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	inserted := make(chan error, 1)
	go func() {
		_, err := client.Insert(context.Background(), taskd.NewTask{Queue: "q", Key: "a"})
		inserted <- err
	}()
	until(t, "it says that taskd is away", func() bool {
		return strings.Contains(log.String(), "taskd is away, trying again: taskd at "+address)
	})
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	serving := grpc.NewServer()
	taskdpb.RegisterDiscoveryServer(serving, taskdtest.NewServer(t))
	go func() { _ = serving.Serve(listener) }()
	defer serving.Stop()
	if err := <-inserted; err != nil {
		t.Error(err)
	}
	if strings.Count(log.String(), "is away") != 1 || strings.Count(log.String(), "taskd is back") != 1 {
		t.Errorf("it says %s", log.String())
	}
}

// topicsOf takes 600 records, and 8 MiB, at once.
type topicsOf struct {
	taskdpb.UnimplementedTopicsServer
	calls []int
	// answers are those to the first records of the next calls, or unspecified for a call that fails.
	answers []taskdpb.PublishStatus
}

func (s *topicsOf) Publish(_ context.Context, request *taskdpb.PublishRequest) (*taskdpb.PublishResponse, error) {
	count := len(request.Records)
	if count > 600 {
		return nil, status.Error(codes.InvalidArgument, "at most 600 items (max_items)")
	}
	if proto.Size(request) > 8<<20 {
		return nil, status.Error(codes.OutOfRange, "the message is too large")
	}
	s.calls = append(s.calls, count)
	answer := &taskdpb.PublishResponse{}
	for range count {
		answer.Results = append(answer.Results, &taskdpb.PublishResult{Status: taskd.Stored})
	}
	if len(s.answers) > 0 {
		answer.Results[0].Status = s.answers[0]
		s.answers = s.answers[1:]
	}
	if answer.Results[0].Status == taskdpb.PublishStatus_PUBLISH_STATUS_UNSPECIFIED {
		return nil, status.Error(codes.PermissionDenied, "the token was revoked")
	}
	return answer, nil
}

func TestRecordsGoInCallsThatTaskdTakes(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	topics := &topicsOf{}
	serving := grpc.NewServer(grpc.MaxRecvMsgSize(32 << 20))
	taskdpb.RegisterTopicsServer(serving, topics)
	go func() { _ = serving.Serve(listener) }()
	t.Cleanup(serving.Stop)
	client := clientOf(t, taskd.ClientOptions{Addresses: []string{listener.Addr().String()}})

	small := make([]taskd.Record, 1200)
	var large []taskd.Record
	for n := range 7 {
		size := 1 << 20
		if n == 3 {
			size = 9 << 20
		}
		large = append(large, taskd.Record{Value: make([]byte, size)})
	}
	refused := taskdpb.PublishStatus_PUBLISH_STATUS_UNSPECIFIED
	for _, test := range []struct {
		records []taskd.Record
		answers []taskdpb.PublishStatus
		calls   []int
		want    map[taskdpb.PublishStatus]int
		isError bool
	}{
		{small, nil, []int{500, 500, 200}, map[taskdpb.PublishStatus]int{taskd.Stored: 1200}, false},
		// By their bytes. One that is too large does not hold up the others.
		{large, nil, []int{3, 3}, map[taskdpb.PublishStatus]int{taskd.Stored: 6, taskd.RecordRejected: 1}, false},
		// A record of the same key in a later call would come before the one that is sent again.
		{
			small, []taskdpb.PublishStatus{taskd.Stored, taskd.PublishTryLater}, []int{500, 500},
			map[taskdpb.PublishStatus]int{taskd.Stored: 999, taskd.PublishTryLater: 201}, false,
		},
		{
			small, []taskdpb.PublishStatus{taskd.Stored, refused}, []int{500, 500},
			map[taskdpb.PublishStatus]int{taskd.Stored: 500}, true,
		},
	} {
		topics.calls, topics.answers = nil, test.answers
		results, err := client.Publish(t.Context(), "orders", test.records)
		got := map[taskdpb.PublishStatus]int{}
		for _, result := range results {
			got[result.Status]++
		}
		if (err != nil) != test.isError || !maps.Equal(got, test.want) || !slices.Equal(topics.calls, test.calls) {
			t.Errorf("%v of calls %v, error %v; want %v of %v", got, topics.calls, err, test.want, test.calls)
		}
	}
}
