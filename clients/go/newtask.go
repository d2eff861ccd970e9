package taskd

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/taskd/taskd/clients/go/taskdpb"
)

// Priority says which tasks of a queue come first.
type Priority = taskdpb.Priority

// The priorities. A task without one has Medium.
const (
	High   = taskdpb.Priority_PRIORITY_HIGH
	Medium = taskdpb.Priority_PRIORITY_MEDIUM
	Low    = taskdpb.Priority_PRIORITY_LOW
)

// NewTask is a task that taskd does not have yet. Fields that are zero take the settings of the queue.
type NewTask struct {
	// Queue may be empty for a discovered task, which then goes to the queue of the task that discovered it.
	Queue string
	// Port is only for a discovered task of a stage, in place of Queue: the topology says which queues get it.
	Port string
	// Key is the name of the task, unique in the queue for ever. Without one it is the SHA-256 of the payload.
	Key string
	// Payload is sent as JSON; a string as text, and a []byte as it is. A [json.RawMessage] is JSON already.
	Payload any
	// Replicas is how many distinct workers must complete the task.
	Replicas int
	Priority Priority
	// Delay or NotBefore says when the first attempt may begin.
	Delay     time.Duration
	NotBefore time.Time
	// Lease is how long a worker may hold the task without extending, if the worker does not say.
	Lease time.Duration
	// MaxAttempts is the number of failures per replica after which the task is dead.
	MaxAttempts int
	Headers     map[string]string
	// TraceParent is a W3C trace context. Without one, taskd makes one.
	TraceParent string
	// Backoff is the task's own waits between attempts.
	Backoff *Backoff
	// Deadline or FinishWithin says when the task is dead if it is not completed.
	Deadline     time.Time
	FinishWithin time.Duration
	// IdempotencyKey makes an insert that is sent again be answered as the first time. Not for discovered tasks.
	IdempotencyKey string
	// LimitKey is what the task shares its limits with: a host, a tenant, an account. Only in queues with a limit_by;
	// without one it is what that says.
	LimitKey string
	// Sequence names tasks of the queue that go one after the other, in the order of their inserts.
	Sequence string
	// OnDead says what the next ones of its sequence do when the task dies: OnDeadNext (by default) or OnDeadHold.
	OnDead taskdpb.OnDead
	// Tree makes the task the root of a new tree, or lets it join one: taskd tells when all that came out of a root is
	// over. Discovered tasks are in the trees of their parents anyway.
	Tree *Tree
}

// Tree is a tree that a new task begins or joins.
type Tree struct {
	// ID is the open tree that the task joins. Without one, the task is the root of a new tree, which has its ID.
	ID string
	// Then is the queue that gets one task when the new tree has ended, with its counts as JSON.
	Then string
	// Timeout is the time in which all tasks of the new tree must be completed; otherwise they are dead then.
	Timeout time.Duration
	// OnDead says what dead tasks mean for the end of the new tree: TreeCountsDead (by default), TreeIgnoresDead or
	// TreeHoldsOnDead.
	OnDead taskdpb.TreeOnDead
}

// What dead tasks mean for the end of their tree.
const (
	// TreeCountsDead makes the tree fail.
	TreeCountsDead = taskdpb.TreeOnDead_TREE_ON_DEAD_COUNT
	// TreeIgnoresDead makes the tree done, whatever became of its tasks.
	TreeIgnoresDead = taskdpb.TreeOnDead_TREE_ON_DEAD_IGNORE
	// TreeHoldsOnDead keeps the tree open until the task is sent again or purged.
	TreeHoldsOnDead = taskdpb.TreeOnDead_TREE_ON_DEAD_HOLD
)

// What the death of a task means for the next ones of its sequence.
const (
	// OnDeadNext lets them go on.
	OnDeadNext = taskdpb.OnDead_ON_DEAD_NEXT
	// OnDeadHold lets them wait until the task is sent again or purged.
	OnDeadHold = taskdpb.OnDead_ON_DEAD_HOLD
)

// Backoff is how long a task waits between its attempts.
type Backoff struct {
	// Kind is the growth from failure to failure. Without one, the waits are those of the queue.
	Kind taskdpb.BackoffKind
	// Initial is the wait after the first failure.
	Initial time.Duration
	// Maximum is the longest wait: a day by default, and at most.
	Maximum time.Duration
	// Jitter is the share, 0 to 1, by which a wait may be longer or shorter. Nil means 0.2.
	Jitter *float64
	// GiveUpAfter makes the task dead when its next attempt would begin later than this after its insert.
	GiveUpAfter time.Duration
}

// The kinds of backoff.
const (
	Constant    = taskdpb.BackoffKind_BACKOFF_KIND_CONSTANT
	Linear      = taskdpb.BackoffKind_BACKOFF_KIND_LINEAR
	Exponential = taskdpb.BackoffKind_BACKOFF_KIND_EXPONENTIAL
)

// message is the task as taskd takes it. `queue` is that of a task without one.
func (t NewTask) message(queue string) (*taskdpb.NewTask, error) {
	payload, encoding, err := encode(t.Payload)
	if err != nil {
		return nil, fmt.Errorf("the payload of task %q: %w", t.Key, err)
	}
	if t.Queue != "" || t.Port != "" {
		queue = t.Queue
	}
	if t.Replicas < 0 || t.MaxAttempts < 0 {
		return nil, fmt.Errorf("task %q: Replicas and MaxAttempts are not negative", t.Key)
	}
	message := &taskdpb.NewTask{
		Queue:           queue,
		Port:            t.Port,
		Key:             []byte(t.Key),
		Payload:         payload,
		PayloadEncoding: encoding,
		Priority:        t.Priority,
		Delay:           duration(t.Delay),
		NotBefore:       timestamp(t.NotBefore),
		LeaseDuration:   duration(t.Lease),
		Headers:         t.Headers,
		Traceparent:     t.TraceParent,
		IdempotencyKey:  t.IdempotencyKey,
		LimitKey:        t.LimitKey,
		Sequence:        t.Sequence,
		OnDead:          t.OnDead,
		Deadline:        timestamp(t.Deadline),
		FinishWithin:    duration(t.FinishWithin),
	}
	if t.Replicas > 0 {
		replicas := uint32(t.Replicas)
		message.Replicas = &replicas
	}
	if t.MaxAttempts > 0 {
		attempts := uint32(t.MaxAttempts)
		message.MaxAttempts = &attempts
	}
	if t.Backoff != nil {
		message.Backoff = &taskdpb.Backoff{
			Kind:        t.Backoff.Kind,
			Initial:     duration(t.Backoff.Initial),
			Maximum:     duration(t.Backoff.Maximum),
			Jitter:      t.Backoff.Jitter,
			GiveUpAfter: duration(t.Backoff.GiveUpAfter),
		}
	}
	if t.Tree != nil {
		message.Tree = &taskdpb.TaskTree{
			Id:      t.Tree.ID,
			Then:    t.Tree.Then,
			Timeout: duration(t.Tree.Timeout),
			OnDead:  t.Tree.OnDead,
		}
	}
	return message, nil
}

// encode writes a payload or a result.
func encode(value any) ([]byte, taskdpb.Encoding, error) {
	switch value := value.(type) {
	case nil:
		return nil, taskdpb.Encoding_ENCODING_UNSPECIFIED, nil
	case string:
		if !utf8.ValidString(value) {
			return nil, 0, errors.New("the string is not UTF-8; send it as a []byte")
		}
		return []byte(value), taskdpb.Encoding_ENCODING_TEXT, nil
	case json.RawMessage:
		if !json.Valid(value) {
			return nil, 0, errors.New("the json.RawMessage is not JSON")
		}
		return value, taskdpb.Encoding_ENCODING_JSON, nil
	case []byte:
		return value, taskdpb.Encoding_ENCODING_BYTES, nil
	default:
		written, err := json.Marshal(value)
		return written, taskdpb.Encoding_ENCODING_JSON, err
	}
}

func duration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
