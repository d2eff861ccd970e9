package taskd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/taskd/taskd/clients/go/taskdpb"
)

const (
	// mostReason is how many bytes of a reason taskd takes, a little less.
	mostReason = 4000
	// longestDelay is what taskd takes.
	longestDelay = 365 * 24 * time.Hour
	// longestLimit is the longest hold or pace that taskd takes.
	longestLimit = time.Hour
	// The discovered tasks of a completion, and their bytes. taskd takes 8 MiB, with the result.
	mostDiscovered      = 10_000
	mostDiscoveredBytes = 2 << 20
)

// outcome is what becomes of a task: one of the two.
type outcome struct {
	completion *taskdpb.Completion
	rejection  *taskdpb.Rejection
}

func (o outcome) size() int {
	if o.completion != nil {
		return proto.Size(o.completion)
	}
	return proto.Size(o.rejection)
}

// addLimit adds what the handler has learnt of the task's limit key. taskd would refuse the report of a task without one.
func (o outcome) addLimit(task *Task) {
	if task.LimitKey == "" {
		return
	}
	if o.completion != nil {
		o.completion.Limit = task.limit()
	} else {
		o.rejection.Limit = task.limit()
	}
}

// panicError is the error of a handler that panicked, or ended its goroutine.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("the handler panicked: %v", e.value) }

// call runs the handler, and makes an error of a panic.
func call(ctx context.Context, handler Handler, task *Task) (result any, err error) {
	defer recovered(&err)
	return handler(ctx, task)
}

// recovered makes an error of a panic. It is deferred itself.
func recovered(err *error) {
	if value := recover(); value != nil {
		*err = &panicError{value: value, stack: debug.Stack()}
	}
}

// complete makes the completion of a task, and returns the discovered tasks that it has no room for. A result or a payload
// may panic when it is encoded.
func complete(leased *taskdpb.LeasedTask, task *Task, result any) (_ *taskdpb.Completion, _ []*taskdpb.NewTask, err error) {
	defer recovered(&err)
	encoded, encoding, err := encode(result)
	if err != nil {
		return nil, nil, fmt.Errorf("the result cannot be sent: %w", err)
	}
	completion := &taskdpb.Completion{
		Id:             leased.Id,
		LeaseToken:     leased.LeaseToken,
		Result:         encoded,
		ResultEncoding: encoding,
	}
	var surplus []*taskdpb.NewTask
	bytes := 0
	for _, one := range task.discoveries() {
		message, err := one.message(leased.Queue)
		if err != nil {
			return nil, nil, fmt.Errorf("a discovered task cannot be sent: %w", err)
		}
		bytes += proto.Size(message) + 8
		isTooMuch := len(completion.Discovered) >= mostDiscovered || bytes > mostDiscoveredBytes
		// Only taskd knows the queue of an output, and refuses a completion with too many of them.
		if isTooMuch && message.Port == "" {
			if message.Traceparent == "" {
				message.Traceparent = leased.Traceparent
			}
			surplus = append(surplus, message)
			continue
		}
		completion.Discovered = append(completion.Discovered, message)
	}
	return completion, surplus, nil
}

// reject makes the rejection of a task.
func reject(leased *taskdpb.LeasedTask, err error) *taskdpb.Rejection {
	retry := true
	rejection := &taskdpb.Rejection{
		Id:         leased.Id,
		LeaseToken: leased.LeaseToken,
		Reason:     cut(err.Error()),
		Retry:      &retry,
	}
	var said *Rejection
	if errors.As(err, &said) {
		retry = !said.Never || said.NotStarted
		rejection.NotStarted = said.NotStarted
		if said.Delay > 0 {
			rejection.Delay = durationpb.New(min(said.Delay, longestDelay))
		}
	}
	return rejection
}

// rejectHandled makes the rejection of a task whose handler returned an error. One that panics when it is read, such as a
// nil [*Rejection], is a panic of the handler; the returned error is then that, and otherwise the same.
func rejectHandled(leased *taskdpb.LeasedTask, err error) (*taskdpb.Rejection, error) {
	var rejection *taskdpb.Rejection
	var panicked error
	func() {
		defer recovered(&panicked)
		rejection = reject(leased, err)
	}()
	if panicked != nil {
		return reject(leased, panicked), panicked
	}
	return rejection, err
}

// giveBack makes the rejection of a task that has not begun. It costs nothing.
func giveBack(leased *taskdpb.LeasedTask, why string) *taskdpb.Rejection {
	return reject(leased, &Rejection{Err: errors.New("not started: " + why), NotStarted: true})
}

// cut is the reason without what is not UTF-8, and not longer than taskd takes.
func cut(reason string) string {
	reason = strings.ToValidUTF8(reason, "\uFFFD")
	if len(reason) <= mostReason {
		return reason
	}
	end := mostReason
	for !utf8.RuneStart(reason[end]) {
		end--
	}
	return reason[:end] + " …"
}

// logFailure says why an attempt failed, so that no error of a handler is silent.
func logFailure(log *slog.Logger, task *Task, err error) {
	about := []any{"queue", task.Queue, "key", task.Key, "id", task.ID, "attempt", task.Attempt}
	var panicked *panicError
	var said *Rejection
	switch {
	case errors.As(err, &panicked):
		log.Error(panicked.Error(), append(about, "stack", string(panicked.stack))...)
	case errors.As(err, &said) && said.NotStarted:
		log.Info("the task is put off: "+said.Error(), append(about, "for", said.Delay)...)
	case errors.As(err, &said) && said.Never:
		log.Warn("the task is rejected for good: "+said.Error(), about...)
	default:
		log.Warn("the attempt failed: "+err.Error(), about...)
	}
}
