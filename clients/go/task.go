package taskd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/taskd/taskd/clients/go/taskdpb"
)

// Handler does the work of a task. What it returns completes the task: nil is no result, a string is text, a []byte is
// bytes, and anything else is sent as JSON. An error rejects the task, and taskd makes another attempt after the
// backoff of the queue, up to its maximum of attempts, unless the error is one of [Reject], [RetryAfter], [PutOff]
// or [Throttle].
//
// The context ends when nobody waits for the work any more, which [context.Cause] explains. A handler may run more than
// once for a task, so its effects must be repeatable.
type Handler func(ctx context.Context, task *Task) (any, error)

// Middleware wraps a handler, to do something before and after it.
type Middleware func(next Handler) Handler

// JSON makes a handler of a function that takes the payload of its tasks. A task whose payload does not fit is rejected
// for good; one without a payload comes with the zero value.
func JSON[P any](work func(ctx context.Context, task *Task, payload P) (any, error)) Handler {
	return func(ctx context.Context, task *Task) (any, error) {
		var payload P
		if err := task.Decode(&payload); err != nil {
			return nil, err
		}
		return work(ctx, task, payload)
	}
}

// Task is a task that a worker has a lease of.
type Task struct {
	ID    string
	Queue string
	// Key is the name of the task in its queue, byte for byte.
	Key     string
	Payload []byte
	// Encoding is the kind of the payload, as the insert said.
	Encoding taskdpb.Encoding
	Headers  map[string]string
	// TraceParent is the W3C trace context for the spans of the handler.
	TraceParent string
	// Attempt is 1 for the first one.
	Attempt int
	// Replicas is how many distinct workers must complete the task.
	Replicas int
	Priority Priority
	// LimitKey is what the task shares its limits with, such as a host. It is empty if the task has no limits.
	LimitKey string
	// Worker is the name of the worker that has it.
	Worker string

	mu         sync.Mutex
	discovered []NewTask
	hold       time.Duration
	pace       time.Duration
}

func taskOf(leased *taskdpb.LeasedTask, worker string) *Task {
	return &Task{
		ID:          leased.Id,
		Queue:       leased.Queue,
		Key:         string(leased.Key),
		Payload:     leased.Payload,
		Encoding:    leased.PayloadEncoding,
		Headers:     leased.Headers,
		TraceParent: leased.Traceparent,
		Attempt:     int(leased.Attempt),
		Replicas:    int(leased.Replicas),
		Priority:    leased.Priority,
		LimitKey:    leased.LimitKey,
		Worker:      worker,
	}
}

// Decode reads the payload into what `value` points to: JSON by its type, text into a string. Without a payload it
// changes nothing. A handler that returns its error rejects the task for good, because no attempt could read it.
func (t *Task) Decode(value any) error {
	if len(t.Payload) == 0 {
		return nil
	}
	if t.Encoding != taskdpb.Encoding_ENCODING_JSON {
		switch value := value.(type) {
		case *string:
			*value = string(t.Payload)
			return nil
		case *[]byte:
			*value = t.Payload
			return nil
		}
	}
	err := json.Unmarshal(t.Payload, value)
	var syntax *json.SyntaxError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &syntax) && t.Encoding == taskdpb.Encoding_ENCODING_TEXT:
		return Reject(fmt.Errorf("the payload is text, not JSON: %w", err))
	case errors.As(err, &syntax):
		return Reject(fmt.Errorf("the payload is not JSON: %w", err))
	default:
		return Reject(fmt.Errorf("the payload is not as expected: %w", err))
	}
}

// Discover adds tasks that are inserted when this one is completed; a task without a queue goes to the queue of this
// one. taskd drops those whose keys it has seen before.
//
// A completion has at most 10,000 of them, and 2 MiB. The worker inserts further ones before it reports the task, for
// which its token needs the role insert, too.
func (t *Task) Discover(tasks ...NewTask) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.discovered = append(t.discovered, tasks...)
}

func (t *Task) discoveries() []NewTask {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.discovered
}

// Hold makes taskd start nothing of the task's limit key for this long, at whichever worker, such as a Retry-After. taskd
// learns it when the handler returns, whatever that returns, and takes at most an hour. Without a LimitKey it does
// nothing. Together with [PutOff] the attempt costs nothing.
func (t *Task) Hold(hold time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hold = hold
}

// Pace makes starts of the task's limit key at least so far apart, such as a Crawl-delay, as for [Task.Hold]. taskd keeps
// it for an hour.
func (t *Task) Pace(pace time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pace = pace
}

// limit is what the handler has learnt of the limit key, or nil.
func (t *Task) limit() *taskdpb.LimitReport {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.hold <= 0 && t.pace <= 0 {
		return nil
	}
	return &taskdpb.LimitReport{
		Hold: durationpb.New(min(max(t.hold, 0), longestLimit)),
		Pace: durationpb.New(min(max(t.pace, 0), longestLimit)),
	}
}

// Rejection is an error of a handler that says what becomes of its task.
type Rejection struct {
	Err error
	// Never means that this worker makes no other attempt. A task for one worker is dead.
	Never bool
	// NotStarted means that no failure counts.
	NotStarted bool
	// Delay is the wait before the next attempt. Zero means the backoff of the queue.
	Delay time.Duration
	// Throttles means that the worker takes no tasks until Delay is over.
	Throttles bool
}

func (r *Rejection) Error() string {
	if r.Err == nil {
		return "rejected"
	}
	return r.Err.Error()
}

func (r *Rejection) Unwrap() error { return r.Err }

// Reject rejects the task for good: this worker makes no other attempt, so a task for one worker is dead.
func Reject(err error) error { return &Rejection{Err: err, Never: true} }

// RetryAfter makes another attempt after this time, in place of the queue's backoff.
func RetryAfter(after time.Duration, err error) error { return &Rejection{Err: err, Delay: after} }

// PutOff makes taskd offer the task again after this time, and count no failure: for a site that is busy, or a service
// that is away. After 0 the task comes again at once, or, after [Task.Hold], when the hold is over. Nothing bounds how
// often a task is put off, except its deadline.
func PutOff(after time.Duration, reason string) error {
	return &Rejection{Err: errors.New(reason), NotStarted: true, Delay: after}
}

// Throttle puts the task off as [PutOff] does, and the worker takes no tasks until the time is over: for a service that
// every task needs and that is away or asks for a pause. Tasks that wait in the worker go to others at once.
func Throttle(after time.Duration, reason string) error {
	return &Rejection{Err: errors.New(reason), NotStarted: true, Delay: after, Throttles: true}
}

// PutOffUntil is PutOff with a time in place of a duration.
func PutOffUntil(when time.Time, reason string) error {
	return PutOff(max(time.Until(when), time.Millisecond), reason)
}
