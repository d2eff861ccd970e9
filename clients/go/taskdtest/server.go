// Package taskdtest stands in for taskd in tests of handlers and workers.
//
// [Run] runs one handler on one task. A [Server] keeps tasks in memory and serves real clients and workers on a port of
// the loopback interface: it knows keys, attempts and dead tasks. Unlike taskd it knows no time: leases do not expire,
// and delays are over at once.
package taskdtest

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	taskd "github.com/taskd/taskd/clients/go"
	"github.com/taskd/taskd/clients/go/internal/inmemory"
	"github.com/taskd/taskd/clients/go/taskdpb"
)

const (
	// defaultAttempts is taskd's.
	defaultAttempts = 5
	// mostPutOff bounds how often a task is put off: without time it would be so for ever.
	mostPutOff = 100
)

// pings are those of clients. By default a server of this library takes one every five minutes; taskd takes all.
var pings = keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}

// TB is the part of [testing.TB] that this package needs.
type TB interface {
	Helper()
	Cleanup(func())
	Fatalf(format string, args ...any)
}

// Outcome is how a task ended.
type Outcome struct {
	Status taskdpb.TaskStatus
	// Result and Encoding are those of the last completion.
	Result   []byte
	Encoding taskdpb.Encoding
	// Reason is that of the last rejection.
	Reason string
	// Attempts counts the failures.
	Attempts int
	// PutOff counts how often the task was put off.
	PutOff int
	// Hold and Pace are the last ones that its handler has reported of its limit key.
	Hold time.Duration
	Pace time.Duration
	// Discovered are the tasks that its handler discovered.
	Discovered []*taskdpb.NewTask
}

// Run runs a handler on one task until it ends, and returns how. Discovered tasks are named, and not run.
func Run(t TB, handler taskd.Handler, task taskd.NewTask) Outcome {
	t.Helper()
	if task.Queue == "" {
		task.Queue = "test"
	}
	if task.Key == "" {
		task.Key = "test"
	}
	server := NewServer(t)
	server.dropDiscovered = true
	server.Work(t, handler, taskd.WorkerOptions{Queues: []string{task.Queue}}, task)
	return server.Outcome(task.Queue, task.Key)
}

// Server keeps tasks in memory.
type Server struct {
	taskdpb.UnimplementedTasksServer
	taskdpb.UnimplementedDiscoveryServer
	taskdpb.UnimplementedOperatorServer

	grpc           *grpc.Server
	address        string
	dropDiscovered bool

	mu       sync.Mutex
	changed  chan struct{}
	tasks    map[name]*task
	byID     map[string]*task
	offered  []*task
	leased   map[lease]*task
	sessions map[string]*session
	polls    bool
	last     int
}

type name struct{ queue, key string }

// lease names a lease: as in taskd, tasks that are leased together share a token.
type lease struct{ id, token string }

type task struct {
	Outcome
	id   string
	new  *taskdpb.NewTask
	put  int
	held *session
	// givenBack counts how often it came back at no cost, without a delay.
	givenBack int
}

// learn takes what a handler has reported of the limit key.
func (t *task) learn(limit *taskdpb.LimitReport) {
	if limit.GetHold().AsDuration() > 0 {
		t.Hold = limit.Hold.AsDuration()
	}
	if limit.GetPace().AsDuration() > 0 {
		t.Pace = limit.Pace.AsDuration()
	}
}

type session struct {
	id     string
	queues []string
	demand int
	wakes  chan struct{}
	ended  []*taskdpb.ItemResult
	cut    chan error
	// closing asks the worker to go on elsewhere.
	closing bool
	started map[string]bool
}

// NewServer starts a server that ends with the test.
func NewServer(t TB) *Server {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("taskdtest: %v", err)
	}
	s := &Server{
		grpc:     grpc.NewServer(grpc.KeepaliveEnforcementPolicy(pings)),
		address:  listener.Addr().String(),
		changed:  make(chan struct{}),
		tasks:    map[name]*task{},
		byID:     map[string]*task{},
		leased:   map[lease]*task{},
		sessions: map[string]*session{},
	}
	taskdpb.RegisterTasksServer(s.grpc, s)
	taskdpb.RegisterDiscoveryServer(s.grpc, s)
	taskdpb.RegisterOperatorServer(s.grpc, s)
	go func() { _ = s.grpc.Serve(listener) }()
	inmemory.Add(s.address)
	t.Cleanup(func() {
		inmemory.Remove(s.address)
		s.grpc.Stop()
	})
	return s
}

// Address is that of its gRPC.
func (s *Server) Address() string { return s.address }

// Client returns a client of the server, which ends with the test.
func (s *Server) Client(t TB) *taskd.Client {
	t.Helper()
	client, err := taskd.NewClient(taskd.ClientOptions{Addresses: []string{s.address}, Token: "test"})
	if err != nil {
		t.Fatalf("taskdtest: %v", err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// Work inserts tasks, runs a worker until they and all that it discovers have ended, and returns its counts.
func (s *Server) Work(t TB, handler taskd.Handler, options taskd.WorkerOptions, tasks ...taskd.NewTask) taskd.Stats {
	t.Helper()
	client := s.Client(t)
	inserted, err := client.InsertBatch(context.Background(), tasks)
	if err != nil {
		t.Fatalf("taskdtest: %v", err)
	}
	for _, one := range inserted {
		if one.Status == taskd.Rejected {
			t.Fatalf("taskdtest: %s", one.Note)
		}
	}
	worker := taskd.NewWorker(client, options, handler)
	settled, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		s.Settle(settled)
		worker.Stop()
	}()
	if err := worker.Run(context.Background()); err != nil {
		t.Fatalf("taskdtest: %v", err)
	}
	return worker.Stats()
}

// Settle waits until no task is offered or leased.
func (s *Server) Settle(ctx context.Context) {
	for {
		s.mu.Lock()
		isSettled := len(s.offered) == 0 && len(s.leased) == 0
		changed := s.changed
		s.mu.Unlock()
		if isSettled {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// Outcome says how a task ended. Its status is zero for a task that the server does not have.
func (s *Server) Outcome(queue, key string) Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := s.tasks[name{queue, key}]
	if found == nil {
		return Outcome{}
	}
	return found.Outcome
}

// Started tells whether a worker with a stream has said that it began with the task.
func (s *Server) Started(queue, key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := s.tasks[name{queue, key}]
	return found != nil && found.held != nil && found.held.started[found.id]
}

// WithoutStreams makes the server one that has no streams, so that workers poll.
func (s *Server) WithoutStreams() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.polls = true
}

// CutStreams ends all streams as a connection that breaks does. Their sessions go on.
func (s *Server) CutStreams() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.sessions {
		select {
		case one.cut <- status.Error(codes.Unavailable, "cut by the test"):
		default:
		}
	}
}

// CloseStreams asks the workers to go on elsewhere, as a taskd that stops.
func (s *Server) CloseStreams() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.sessions {
		one.closing = true
		one.wake()
	}
}

// Forget makes the server forget its sessions, as a taskd that was restarted.
func (s *Server) Forget() {
	s.CutStreams()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions = map[string]*session{}
}

// EndLease takes a task away from its worker, which hears that it is LEASE_LOST or CANCELLED.
func (s *Server) EndLease(queue, key string, why taskdpb.ItemStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := s.tasks[name{queue, key}]
	if found == nil {
		return
	}
	for token, one := range s.leased {
		if one == found {
			delete(s.leased, token)
			found.Status = taskdpb.TaskStatus_TASK_STATUS_CANCELLED
			if found.held != nil {
				found.held.ended = append(found.held.ended, &taskdpb.ItemResult{Id: found.id, Status: why})
				found.held.wake()
			}
		}
	}
	s.notify()
}

func (s *Server) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
	for _, one := range s.sessions {
		one.wake()
	}
}

func (s *session) wake() {
	select {
	case s.wakes <- struct{}{}:
	default:
	}
}

// add stores tasks, and answers each. The caller holds the lock.
func (s *Server) add(all []*taskdpb.NewTask) []*taskdpb.InsertResult {
	var results []*taskdpb.InsertResult
	for _, one := range all {
		if one.Queue == "" {
			results = append(results, &taskdpb.InsertResult{Status: taskd.Rejected, Error: "the queue has no name"})
			continue
		}
		at := name{one.Queue, string(one.Key)}
		if at.key == "" {
			at.key = string(one.Payload)
		}
		if found := s.tasks[at]; found != nil {
			results = append(results, &taskdpb.InsertResult{Status: taskd.Duplicate, Id: found.id})
			continue
		}
		s.last++
		added := &task{id: fmt.Sprintf("task-%d", s.last), new: one}
		added.Status = taskdpb.TaskStatus_TASK_STATUS_QUEUED
		s.tasks[at] = added
		s.byID[added.id] = added
		s.offered = append(s.offered, added)
		results = append(results, &taskdpb.InsertResult{Status: taskd.Created, Id: added.id})
	}
	s.notify()
	return results
}

// lease takes tasks of the queues. The caller holds the lock.
func (s *Server) lease(queues []string, most int, by *session) []*taskdpb.LeasedTask {
	var leased []*taskdpb.LeasedTask
	s.last++
	token := fmt.Sprintf("lease-%d", s.last)
	s.offered = slices.DeleteFunc(s.offered, func(one *task) bool {
		if len(leased) == most || !slices.Contains(queues, one.new.Queue) {
			return false
		}
		s.leased[lease{one.id, token}] = one
		one.Status = taskdpb.TaskStatus_TASK_STATUS_ASSIGNED
		one.held = by
		leased = append(leased, &taskdpb.LeasedTask{
			Id:              one.id,
			Queue:           one.new.Queue,
			Key:             one.new.Key,
			Payload:         one.new.Payload,
			PayloadEncoding: one.new.PayloadEncoding,
			Headers:         one.new.Headers,
			Traceparent:     one.new.Traceparent,
			LeaseToken:      token,
			Attempt:         uint32(one.Attempts + 1),
			Replicas:        max(one.new.GetReplicas(), 1),
			Priority:        priorityOf(one.new),
			LimitKey:        one.new.LimitKey,
		})
		return true
	})
	return leased
}

func priorityOf(one *taskdpb.NewTask) taskd.Priority {
	if one.Priority == taskdpb.Priority_PRIORITY_UNSPECIFIED {
		return taskd.Medium
	}
	return one.Priority
}

// end takes the lease of a report. The caller holds the lock.
func (s *Server) end(id, token string) (*task, *taskdpb.ItemResult) {
	found := s.leased[lease{id, token}]
	if found == nil {
		return nil, &taskdpb.ItemResult{Id: id, Status: taskdpb.ItemStatus_ITEM_STATUS_LEASE_LOST}
	}
	delete(s.leased, lease{id, token})
	found.held = nil
	return found, &taskdpb.ItemResult{Id: id, Status: taskdpb.ItemStatus_ITEM_STATUS_OK}
}

func (s *Server) complete(all []*taskdpb.Completion) []*taskdpb.ItemResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	var results []*taskdpb.ItemResult
	for _, one := range all {
		found, result := s.end(one.Id, one.LeaseToken)
		results = append(results, result)
		if found == nil {
			continue
		}
		found.learn(one.Limit)
		found.Status = taskdpb.TaskStatus_TASK_STATUS_COMPLETED
		found.Result = one.Result
		found.Encoding = one.ResultEncoding
		found.Discovered = append(found.Discovered, one.Discovered...)
		if !s.dropDiscovered {
			s.add(one.Discovered)
		}
	}
	s.notify()
	return results
}

func (s *Server) reject(all []*taskdpb.Rejection) []*taskdpb.ItemResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	var results []*taskdpb.ItemResult
	for _, one := range all {
		found, result := s.end(one.Id, one.LeaseToken)
		results = append(results, result)
		if found == nil {
			continue
		}
		found.learn(one.Limit)
		found.Reason = one.Reason
		found.Status = taskdpb.TaskStatus_TASK_STATUS_QUEUED
		attempts := defaultAttempts
		if found.new.MaxAttempts != nil {
			attempts = int(*found.new.MaxAttempts)
		}
		isDead := false
		switch {
		case one.NotStarted && one.Delay.AsDuration() > 0:
			found.PutOff++
			isDead = found.PutOff >= mostPutOff
		case one.NotStarted:
			found.givenBack++
			isDead = found.givenBack >= mostPutOff
		default:
			found.Attempts++
			isDead = one.Retry != nil && !*one.Retry || found.Attempts >= attempts
		}
		if isDead {
			found.Status = taskdpb.TaskStatus_TASK_STATUS_DEAD
			continue
		}
		s.offered = append(s.offered, found)
	}
	s.notify()
	return results
}

func (s *Server) extend(all []*taskdpb.Extension, by *session) []*taskdpb.ItemResult {
	s.mu.Lock()
	defer s.mu.Unlock()
	var results []*taskdpb.ItemResult
	for _, one := range all {
		result := &taskdpb.ItemResult{Id: one.Id, Status: taskdpb.ItemStatus_ITEM_STATUS_LEASE_LOST}
		if found := s.leased[lease{one.Id, one.LeaseToken}]; found != nil {
			result.Status = taskdpb.ItemStatus_ITEM_STATUS_OK
			if by != nil {
				found.held = by
			}
		}
		results = append(results, result)
	}
	return results
}

// InsertTasks is a call of taskd.
func (s *Server) InsertTasks(ctx context.Context, request *taskdpb.InsertTasksRequest) (*taskdpb.InsertTasksResponse, error) {
	s.mu.Lock()
	results := s.add(request.Tasks)
	s.mu.Unlock()
	if request.Wait == nil {
		return &taskdpb.InsertTasksResponse{Results: results}, nil
	}
	waiting, cancel := context.WithTimeout(ctx, request.Wait.AsDuration())
	defer cancel()
	for {
		s.mu.Lock()
		isOver := true
		for _, one := range results {
			if found := s.byID[one.Id]; found != nil {
				one.TaskStatus = found.Status
				isOver = isOver && taskd.IsFinal(found.Status)
				if found.Status == taskdpb.TaskStatus_TASK_STATUS_COMPLETED {
					one.Results = []*taskdpb.TaskResult{{Result: found.Result, ResultEncoding: found.Encoding}}
				}
			}
		}
		changed := s.changed
		s.mu.Unlock()
		if isOver || waiting.Err() != nil {
			return &taskdpb.InsertTasksResponse{Results: results}, nil
		}
		select {
		case <-changed:
		case <-waiting.Done():
		}
	}
}

// GetTask is a call of taskd.
func (s *Server) GetTask(_ context.Context, request *taskdpb.GetTaskRequest) (*taskdpb.Task, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := s.byID[request.Id]
	if found == nil {
		return nil, status.Errorf(codes.NotFound, "there is no task %s", request.Id)
	}
	return &taskdpb.Task{
		Id:       found.id,
		Queue:    found.new.Queue,
		Key:      found.new.Key,
		Payload:  found.new.Payload,
		Status:   found.Status,
		Attempts: uint32(found.Attempts),
		Reason:   found.Reason,
	}, nil
}

// CancelTasks is a call of taskd.
func (s *Server) CancelTasks(_ context.Context, request *taskdpb.CancelTasksRequest) (*taskdpb.CancelTasksResponse, error) {
	answer := &taskdpb.CancelTasksResponse{}
	for _, id := range request.Ids {
		s.mu.Lock()
		found := s.byID[id]
		result := &taskdpb.ItemResult{Id: id, Status: taskdpb.ItemStatus_ITEM_STATUS_UNKNOWN_TASK}
		if found != nil {
			result.Status = taskdpb.ItemStatus_ITEM_STATUS_OK
			found.Status = taskdpb.TaskStatus_TASK_STATUS_CANCELLED
			s.offered = slices.DeleteFunc(s.offered, func(one *task) bool { return one == found })
		}
		s.mu.Unlock()
		if found != nil {
			s.EndLease(found.new.Queue, string(found.new.Key), taskdpb.ItemStatus_ITEM_STATUS_CANCELLED)
		}
		answer.Results = append(answer.Results, result)
	}
	return answer, nil
}

// GetQueue is a call of taskd. Its answer says only whether the queue is drained.
func (s *Server) GetQueue(ctx context.Context, request *taskdpb.GetQueueRequest) (*taskdpb.Queue, error) {
	waiting, cancel := context.WithTimeout(ctx, request.WaitDrained.AsDuration())
	defer cancel()
	for {
		s.mu.Lock()
		isKnown := false
		isDrained := true
		for at, one := range s.tasks {
			if at.queue == request.Queue {
				isKnown = true
				isDrained = isDrained && taskd.IsFinal(one.Status)
			}
		}
		changed := s.changed
		s.mu.Unlock()
		if !isKnown {
			return nil, status.Errorf(codes.NotFound, "queue %s never had a task", request.Queue)
		}
		if isDrained || waiting.Err() != nil {
			return &taskdpb.Queue{Queue: request.Queue, Drained: &isDrained}, nil
		}
		select {
		case <-changed:
		case <-waiting.Done():
		}
	}
}

// GetTasks is a call of taskd.
func (s *Server) GetTasks(ctx context.Context, request *taskdpb.GetTasksRequest) (*taskdpb.GetTasksResponse, error) {
	waiting, cancel := context.WithTimeout(ctx, request.Wait.AsDuration())
	defer cancel()
	for {
		s.mu.Lock()
		leased := s.lease(request.Queues, int(max(request.MaxTasks, 1)), nil)
		changed := s.changed
		s.mu.Unlock()
		if len(leased) > 0 || waiting.Err() != nil {
			return &taskdpb.GetTasksResponse{Tasks: leased}, nil
		}
		select {
		case <-changed:
		case <-waiting.Done():
		}
	}
}

// CompleteTasks is a call of taskd.
func (s *Server) CompleteTasks(_ context.Context, request *taskdpb.CompleteTasksRequest) (*taskdpb.CompleteTasksResponse, error) {
	return &taskdpb.CompleteTasksResponse{Results: s.complete(request.Completions)}, nil
}

// RejectTasks is a call of taskd.
func (s *Server) RejectTasks(_ context.Context, request *taskdpb.RejectTasksRequest) (*taskdpb.RejectTasksResponse, error) {
	return &taskdpb.RejectTasksResponse{Results: s.reject(request.Rejections)}, nil
}

// ExtendTasks is a call of taskd.
func (s *Server) ExtendTasks(_ context.Context, request *taskdpb.ExtendTasksRequest) (*taskdpb.ExtendTasksResponse, error) {
	return &taskdpb.ExtendTasksResponse{Results: s.extend(request.Extensions, nil)}, nil
}

// StreamTasks is a call of taskd.
func (s *Server) StreamTasks(stream taskdpb.Tasks_StreamTasksServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	own, resumed, err := s.open(first)
	if err != nil {
		return err
	}
	opened := &taskdpb.SessionOpened{
		Session:   own.id,
		Resumed:   resumed,
		Granted:   first.Open.Want,
		MaxTasks:  10_000,
		Heartbeat: durationpb.New(time.Second),
		Timeout:   durationpb.New(15 * time.Second),
	}
	if err := stream.Send(&taskdpb.TaskdFrame{Opened: opened, Demand: first.Open.Want}); err != nil {
		return err
	}
	frames := make(chan *taskdpb.WorkerFrame)
	go func() {
		defer close(frames)
		for {
			frame, err := stream.Recv()
			if err != nil {
				return
			}
			select {
			case frames <- frame:
			case <-stream.Context().Done():
				return
			}
		}
	}()
	beat := time.NewTicker(time.Second)
	defer beat.Stop()
	for {
		answer := &taskdpb.TaskdFrame{}
		select {
		case err := <-own.cut:
			return err
		case <-beat.C:
		case <-own.wakes:
		case frame, isOpen := <-frames:
			if !isOpen {
				return nil
			}
			answer.Answer = s.take(own, frame)
			if frame.Close {
				s.close(own)
				return nil
			}
		}
		s.mu.Lock()
		if own.closing {
			own.closing = false
			own.demand = 0
			answer.Closing = &taskdpb.SessionClosing{Reason: "it stops"}
		}
		answer.Tasks = s.lease(own.queues, own.demand, own)
		own.demand -= len(answer.Tasks)
		answer.Demand = uint32(own.demand)
		answer.Ended = own.ended
		own.ended = nil
		s.mu.Unlock()
		if err := stream.Send(answer); err != nil {
			return err
		}
	}
}

func (s *Server) open(first *taskdpb.WorkerFrame) (*session, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.polls {
		return nil, false, status.Error(codes.Unimplemented, "it has no streams")
	}
	if first.Open == nil {
		return nil, false, status.Error(codes.InvalidArgument, "the first frame does not say open")
	}
	own := s.sessions[first.Open.Session]
	resumed := own != nil
	if !resumed {
		s.last++
		own = &session{id: fmt.Sprintf("session-%d", s.last), wakes: make(chan struct{}, 1), started: map[string]bool{}}
		s.sessions[own.id] = own
	}
	own.cut = make(chan error, 1)
	own.queues = first.Open.Queues
	own.demand = int(first.Open.Want)
	for _, id := range first.Started {
		own.started[id] = true
	}
	own.wake()
	return own, resumed, nil
}

// take takes a frame of a worker.
func (s *Server) take(own *session, frame *taskdpb.WorkerFrame) *taskdpb.FrameAnswer {
	s.mu.Lock()
	for _, id := range frame.Started {
		own.started[id] = true
	}
	surrendered := 0
	if frame.Surrender {
		surrendered = own.demand
		own.demand = 0
	}
	own.demand += int(frame.Want)
	s.mu.Unlock()
	if frame.Number == 0 {
		return nil
	}
	return &taskdpb.FrameAnswer{
		Number:      frame.Number,
		Completions: s.complete(frame.Completions),
		Rejections:  s.reject(frame.Rejections),
		Extensions:  s.extend(frame.Extensions, own),
		Granted:     frame.Want,
		Surrendered: uint32(surrendered),
	}
}

// close offers again what a session had in hand.
func (s *Server) close(own *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, own.id)
	for token, one := range s.leased {
		if one.held == own {
			delete(s.leased, token)
			one.Status = taskdpb.TaskStatus_TASK_STATUS_QUEUED
			s.offered = append(s.offered, one)
		}
	}
	s.notify()
}
