package taskd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/taskd/taskd/clients/go/taskdpb"
)

// DefaultAddress is that of the gRPC of a taskd on the same machine.
const DefaultAddress = "127.0.0.1:7601"

const (
	// The tasks of one insert call, and their bytes.
	insertTasks = 500
	insertBytes = 2 << 20
	// mostAwaited is how many tasks an insert that waits may have.
	mostAwaited = 1000
	// mostResultBytes is what taskd gives at most in the answer to an insert that waits; a client takes less.
	mostResultBytes = 12 << 20
	// mostIDs is how many ids a call takes.
	mostIDs = 1000
	// drainedWait is how long one call waits until a queue is drained.
	drainedWait = callTimeout / 2
	// sayAwayAfter is how long a call is repeated before the client says so.
	sayAwayAfter = 3 * time.Second
	// streamLinger is how long a task of InsertSeq waits for others that share its call.
	streamLinger = 100 * time.Millisecond
)

// ClientOptions are the options of a [Client]. All have defaults.
type ClientOptions struct {
	// Addresses are those of the gRPC of taskd's processes, as host:port or https://host:port. While one is away, the
	// client calls the next one. By default [DefaultAddress].
	Addresses []string
	// Token is the access token. By default that of the environment variable TASKD_TOKEN.
	Token string
	// TLS is how the client trusts and shows certificates. With it, addresses without a scheme are ones of TLS.
	TLS *tls.Config
	// Patience is for how long a call is repeated while taskd is away or asks to try later. By default a minute. A
	// worker never gives up.
	Patience time.Duration
	// Logger takes what a client says: that taskd is away, while a call is repeated. By default [slog.Default].
	Logger *slog.Logger
}

// Client calls taskd. It connects with its first call, and serves any number of goroutines.
type Client struct {
	servers  *servers
	patience time.Duration
	outage   outage
}

// NewClient returns an error if an address or the token cannot be used.
func NewClient(options ClientOptions) (*Client, error) {
	token := options.Token
	if token == "" {
		token = os.Getenv("TASKD_TOKEN")
	}
	servers, err := newServers(options.Addresses, token, options.TLS)
	if err != nil {
		return nil, err
	}
	patience := options.Patience
	if patience == 0 {
		patience = time.Minute
	}
	return &Client{servers: servers, patience: patience, outage: outage{log: logger(options.Logger)}}, nil
}

// Close ends the connections, and the calls and workers that use them: their error is [ErrClosed].
func (c *Client) Close() error { return c.servers.close() }

// Conn makes the calls that this package has no method for, with the generated code of package taskdpb:
//
//	taskdpb.NewOperatorClient(client.Conn()).PauseQueue(ctx, &taskdpb.PauseQueueRequest{Queue: "pages"})
//
// A unary call goes to the next process while one is away, up to [ClientOptions.Patience].
func (c *Client) Conn() grpc.ClientConnInterface { return conn{c} }

type conn struct{ client *Client }

func (c conn) Invoke(ctx context.Context, method string, request, answer any, options ...grpc.CallOption) error {
	return c.client.call(ctx, 0, func(ctx context.Context, conn *grpc.ClientConn) error {
		return conn.Invoke(ctx, method, request, answer, options...)
	})
}

func (c conn) NewStream(ctx context.Context, what *grpc.StreamDesc, method string, options ...grpc.CallOption) (grpc.ClientStream, error) {
	chosen := c.client.servers.pick()
	stream, err := chosen.conn.NewStream(ctx, what, method, options...)
	err = c.client.servers.callError(ctx, err, chosen)
	if isAway(err) {
		c.client.servers.leave(chosen)
	}
	return stream, err
}

// call repeats a call while taskd is away. Each try may take callTimeout and this much longer.
func (c *Client) call(ctx context.Context, longer time.Duration, call func(context.Context, *grpc.ClientConn) error) error {
	var pauses pauses
	began := time.Now()
	end := began.Add(c.patience)
	for {
		err := c.servers.once(ctx, longer, call)
		if !isAway(err) {
			if err == nil {
				c.back()
			}
			return err
		}
		c.sayAway(began, err)
		pause := pauses.next()
		if time.Now().Add(pause).After(end) {
			return err
		}
		if !sleep(ctx, pause) {
			return context.Cause(ctx)
		}
	}
}

// sayAway says that taskd is away if a call has been repeated for some time.
func (c *Client) sayAway(began time.Time, err error) {
	if time.Since(began) >= sayAwayAfter {
		c.outage.away(err)
	}
}

func (c *Client) back() {
	if c.outage.over() {
		c.outage.log.Info("taskd is back", "at", c.servers.pick().address)
	}
}

// Inserted is taskd's answer to one new task.
type Inserted struct {
	// Status is CREATED, DUPLICATE or REJECTED. CREATED is a promise: taskd keeps the task, whatever is killed. A
	// duplicate is also the answer to a call that had to be repeated.
	Status taskdpb.InsertStatus
	// ID is that of the new task, or of the task that has its key. It is empty for a rejected one.
	ID string
	// Note says why a task was rejected, or how the task ended that has its key.
	Note string
	// Tree is the tree that the task is in, if the insert named one. That of a duplicate is the one that had it first.
	Tree string
	// TaskStatus is the status at the end of the wait, for InsertAndWait.
	TaskStatus taskdpb.TaskStatus
	// Results are those of a completed task, one for each worker, for InsertAndWait.
	Results []*taskdpb.TaskResult
}

// The answers to an insert.
const (
	Created   = taskdpb.InsertStatus_INSERT_STATUS_CREATED
	Duplicate = taskdpb.InsertStatus_INSERT_STATUS_DUPLICATE
	Rejected  = taskdpb.InsertStatus_INSERT_STATUS_REJECTED
)

// IsOpen tells whether the task was not final at the end of the wait.
func (i Inserted) IsOpen() bool { return i.Status != Rejected && !IsFinal(i.TaskStatus) }

// Insert stores one task. The error of an invalid one is a [*RejectedError].
func (c *Client) Insert(ctx context.Context, task NewTask) (Inserted, error) {
	inserted, err := c.InsertBatch(ctx, []NewTask{task})
	if err != nil {
		return Inserted{}, err
	}
	return inserted[0], rejection(task, inserted[0])
}

func rejection(task NewTask, inserted Inserted) error {
	if inserted.Status == Rejected {
		return &RejectedError{Queue: task.Queue, Key: task.Key, Reason: inserted.Note}
	}
	return nil
}

// InsertBatch stores tasks, in calls of up to 500, and answers task by task, in their order. A rejected one does not
// hold up the others. After an error some tasks may be stored: inserting all of them again makes no task twice.
func (c *Client) InsertBatch(ctx context.Context, tasks []NewTask) ([]Inserted, error) {
	messages, err := messagesOf(tasks)
	if err != nil {
		return nil, err
	}
	return c.insertMessages(ctx, messages)
}

func messagesOf(tasks []NewTask) ([]*taskdpb.NewTask, error) {
	messages := make([]*taskdpb.NewTask, 0, len(tasks))
	for _, task := range tasks {
		message, err := task.message("")
		if err != nil {
			return nil, err
		}
		messages = append(messages, message)
	}
	return messages, nil
}

func (c *Client) insertMessages(ctx context.Context, messages []*taskdpb.NewTask) ([]Inserted, error) {
	inserted := make([]Inserted, 0, len(messages))
	for len(messages) > 0 {
		count := 0
		bytes := 0
		for count < len(messages) && count < insertTasks {
			bytes += proto.Size(messages[count])
			if count > 0 && bytes > insertBytes {
				break
			}
			count++
		}
		answers, err := c.insertCall(ctx, messages[:count])
		if err != nil {
			return nil, err
		}
		inserted = append(inserted, answers...)
		messages = messages[count:]
	}
	return inserted, nil
}

// insertCall sends the tasks of one call until each has an answer.
func (c *Client) insertCall(ctx context.Context, tasks []*taskdpb.NewTask) ([]Inserted, error) {
	inserted := make([]Inserted, len(tasks))
	open := make([]int, len(tasks))
	for place := range tasks {
		open[place] = place
	}
	var pauses pauses
	end := time.Now().Add(c.patience)
	for {
		request := &taskdpb.InsertTasksRequest{}
		for _, place := range open {
			request.Tasks = append(request.Tasks, tasks[place])
		}
		var answer *taskdpb.InsertTasksResponse
		err := c.call(ctx, 0, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
			answer, err = taskdpb.NewDiscoveryClient(conn).InsertTasks(ctx, request)
			return err
		})
		if isOfItems(err) {
			return c.insertApart(ctx, tasks, err)
		}
		if err != nil {
			return nil, err
		}
		var later []int
		for n, result := range answer.Results {
			if n >= len(open) {
				break
			}
			if result.Status == taskdpb.InsertStatus_INSERT_STATUS_TRY_LATER {
				later = append(later, open[n])
				continue
			}
			inserted[open[n]] = insertedOf(result)
		}
		if len(later) == 0 {
			return inserted, nil
		}
		if len(later) < len(open) {
			end = time.Now().Add(c.patience)
			pauses.reset()
		}
		open = later
		if time.Now().After(end) {
			return nil, &AwayError{Address: c.servers.pick().address, Message: "it asks to try later"}
		}
		if !sleep(ctx, pauses.next()) {
			return nil, context.Cause(ctx)
		}
	}
}

// insertApart inserts tasks that taskd refuses together: one of them is wrong, or they are too large for one call.
func (c *Client) insertApart(ctx context.Context, tasks []*taskdpb.NewTask, why error) ([]Inserted, error) {
	if len(tasks) == 1 {
		return []Inserted{{Status: Rejected, Note: why.Error()}}, nil
	}
	half := len(tasks) / 2
	inserted, err := c.insertCall(ctx, tasks[:half])
	if err != nil {
		return nil, err
	}
	others, err := c.insertCall(ctx, tasks[half:])
	return append(inserted, others...), err
}

func insertedOf(result *taskdpb.InsertResult) Inserted {
	return Inserted{
		Status:     result.Status,
		ID:         result.Id,
		Note:       result.Error,
		Tree:       result.Tree,
		TaskStatus: result.TaskStatus,
		Results:    result.Results,
	}
}

// InsertSeq stores as many tasks as there are, in bounded memory, and yields the answer to each, in order. An error ends
// it; so does leaving the loop. `tasks` is read by a goroutine of its own.
func (c *Client) InsertSeq(ctx context.Context, tasks iter.Seq[NewTask]) iter.Seq2[Inserted, error] {
	return func(yield func(Inserted, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		read := make(chan NewTask, insertTasks)
		go func() {
			defer close(read)
			for task := range tasks {
				select {
				case read <- task:
				case <-ctx.Done():
					return
				}
			}
		}()
		for {
			batch := nextBatch(ctx, read)
			if len(batch) == 0 {
				if err := context.Cause(ctx); err != nil {
					yield(Inserted{}, err)
				}
				return
			}
			inserted, err := c.InsertBatch(ctx, batch)
			if err != nil {
				yield(Inserted{}, err)
				return
			}
			for _, one := range inserted {
				if !yield(one, nil) {
					return
				}
			}
		}
	}
}

// nextBatch waits for a task, and takes those that come soon after it. It returns none at the end.
func nextBatch(ctx context.Context, read <-chan NewTask) []NewTask {
	var batch []NewTask
	var late <-chan time.Time
	for len(batch) < insertTasks {
		select {
		case task, isOpen := <-read:
			if !isOpen {
				return batch
			}
			batch = append(batch, task)
			if late == nil {
				late = time.After(streamLinger)
			}
		case <-late:
			return batch
		case <-ctx.Done():
			return nil
		}
	}
	return batch
}

// InsertAndWait stores one task and waits until it is final, at most for `wait`. [Inserted.TaskStatus] says whether it
// is, and [Inserted.Results] how. A duplicate waits for the task that has its key. A token needs the role read, too.
func (c *Client) InsertAndWait(ctx context.Context, task NewTask, wait time.Duration) (Inserted, error) {
	inserted, err := c.InsertBatchAndWait(ctx, []NewTask{task}, wait)
	if err != nil {
		return Inserted{}, err
	}
	return inserted[0], rejection(task, inserted[0])
}

// InsertBatchAndWait stores up to 1,000 tasks and waits until all are final, at most for `wait`.
func (c *Client) InsertBatchAndWait(ctx context.Context, tasks []NewTask, wait time.Duration) ([]Inserted, error) {
	if len(tasks) > mostAwaited {
		return nil, fmt.Errorf("%d tasks in an insert that waits; at most %d", len(tasks), mostAwaited)
	}
	messages, err := messagesOf(tasks)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	end := began.Add(wait)
	inserted, err := c.insertMessages(ctx, messages)
	if err != nil {
		return nil, err
	}
	var pauses pauses
	for {
		// The same insert stores nothing, and waits on. taskd waits for a minute at most.
		request := &taskdpb.InsertTasksRequest{MaxBytes: mostResultBytes}
		var open []int
		for place, one := range inserted {
			if one.IsOpen() {
				open = append(open, place)
				request.Tasks = append(request.Tasks, messages[place])
			}
		}
		if len(open) == 0 {
			return inserted, nil
		}
		left := max(time.Until(end), 0)
		request.Wait = durationpb.New(left)
		var answer *taskdpb.InsertTasksResponse
		err := c.servers.once(ctx, left, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
			answer, err = taskdpb.NewDiscoveryClient(conn).InsertTasks(ctx, request)
			return err
		})
		if err != nil && !isAway(err) {
			return inserted, err
		}
		if err != nil {
			c.sayAway(began, err)
		}
		if err == nil {
			c.back()
			for n, result := range answer.Results {
				if n < len(open) {
					inserted[open[n]].TaskStatus = result.TaskStatus
					inserted[open[n]].Results = result.Results
				}
			}
		}
		if left == 0 {
			return inserted, nil
		}
		if !sleep(ctx, min(pauses.next(), left)) {
			return inserted, context.Cause(ctx)
		}
	}
}

// IsFinal tells whether a status is COMPLETED, DEAD or CANCELLED.
func IsFinal(status taskdpb.TaskStatus) bool {
	switch status {
	case taskdpb.TaskStatus_TASK_STATUS_COMPLETED, taskdpb.TaskStatus_TASK_STATUS_DEAD,
		taskdpb.TaskStatus_TASK_STATUS_CANCELLED:
		return true
	default:
		return false
	}
}

// Get reads one task with its payload and its history.
func (c *Client) Get(ctx context.Context, id string) (*taskdpb.Task, error) {
	return taskdpb.NewDiscoveryClient(c.Conn()).GetTask(ctx, &taskdpb.GetTaskRequest{Id: id})
}

// Wait returns the task when it is COMPLETED, DEAD or CANCELLED, or when the context ends.
func (c *Client) Wait(ctx context.Context, id string) (*taskdpb.Task, error) {
	var pauses pauses
	for {
		task, err := c.Get(ctx, id)
		if err != nil || IsFinal(task.Status) {
			return task, err
		}
		if c.watch(ctx, id) {
			pauses.reset()
		}
		// The store learns of a final status a moment after the watcher.
		if !sleep(ctx, pauses.next()) {
			return task, context.Cause(ctx)
		}
	}
}

// watch returns true at a final status, and false if the stream ends before.
func (c *Client) watch(ctx context.Context, id string) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := taskdpb.NewDiscoveryClient(c.Conn()).WatchTask(ctx, &taskdpb.WatchTaskRequest{Id: id})
	if err != nil {
		return false
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return errors.Is(err, io.EOF)
		}
		if IsFinal(event.Status) {
			return true
		}
	}
}

// List yields the tasks of a filter without their payloads, the newest first. An error ends it.
func (c *Client) List(ctx context.Context, filter *taskdpb.TaskFilter) iter.Seq2[*taskdpb.Task, error] {
	return func(yield func(*taskdpb.Task, error) bool) {
		request := &taskdpb.ListTasksRequest{Filter: filter}
		for {
			page, err := taskdpb.NewDiscoveryClient(c.Conn()).ListTasks(ctx, request)
			if err != nil {
				yield(nil, err)
				return
			}
			for _, task := range page.Tasks {
				if !yield(task, nil) {
					return
				}
			}
			if page.Cursor == "" {
				return
			}
			request.Cursor = page.Cursor
		}
	}
}

// WaitDrained returns when nothing of a queue is unfinished, delayed, in backoff or on its way any more, or with an error
// when the context ends. [IsNotFound] tells whether the queue never had a task. A token needs the role read.
func (c *Client) WaitDrained(ctx context.Context, queue string) error {
	operator := taskdpb.NewOperatorClient(c.Conn())
	request := &taskdpb.GetQueueRequest{Queue: queue, WaitDrained: durationpb.New(drainedWait)}
	for {
		began := time.Now()
		answer, err := operator.GetQueue(ctx, request)
		if err != nil || answer.GetDrained() {
			return err
		}
		// A taskd that is about to stop does not wait, nor one whose setting max_wait is short.
		if !sleep(ctx, max(shortestRound-time.Since(began), 0)) {
			return context.Cause(ctx)
		}
	}
}

// Cancel cancels tasks, and answers id by id, in order. TRY_LATER means that taskd cancels it as soon as it can.
func (c *Client) Cancel(ctx context.Context, ids ...string) ([]*taskdpb.ItemResult, error) {
	var results []*taskdpb.ItemResult
	for len(ids) > 0 {
		count := min(len(ids), mostIDs)
		request := &taskdpb.CancelTasksRequest{Ids: ids[:count]}
		answer, err := taskdpb.NewDiscoveryClient(c.Conn()).CancelTasks(ctx, request)
		if err != nil {
			return results, err
		}
		results = append(results, answer.Results...)
		ids = ids[count:]
	}
	return results, nil
}

// Explain says where a task is and what happens to it next, and with a worker, why that one does not get it. The
// request names the task by its id, or by its queue and key.
func (c *Client) Explain(ctx context.Context, request *taskdpb.ExplainTaskRequest) (*taskdpb.TaskExplanation, error) {
	return taskdpb.NewDiscoveryClient(c.Conn()).ExplainTask(ctx, request)
}

// IsNotFound tells whether a call failed because there is no such task.
func IsNotFound(err error) bool { return hasCode(err, codes.NotFound) }

// logger is the one of an option, or that of the program.
func logger(given *slog.Logger) *slog.Logger {
	if given != nil {
		return given
	}
	return slog.Default()
}
