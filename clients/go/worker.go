package taskd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// WorkerOptions are the options of a [Worker]. All but Queues have defaults.
type WorkerOptions struct {
	// Queues are those whose tasks the worker takes.
	Queues []string
	// Weights are how several queues share the tasks, from 1 to 1000 each: with 3 for "a" and 1 for "b", three of four are
	// of a while both have some. A queue that is absent has 1. Priorities then order the tasks of each queue only. By
	// default they decide over all queues.
	Weights map[string]uint32
	// Name is how taskd knows the worker: it credits a name once for a task, and takes two workers of one name for one.
	// By default it is that of the environment variable TASKD_WORKER, or of the host; a second worker without this option
	// on the same host and queue does not start, and outside Linux not even the first.
	Name string
	// Concurrency is how many handlers run at a time. By default 10.
	Concurrency int
	// Prefetch is how many tasks wait in this process for a handler. By default none.
	Prefetch int
	// Lease is how long taskd leaves a task to the worker, which extends it every third of that. The worker may be
	// silent for half of it before taskd gives its tasks to others. By default 30 s.
	Lease time.Duration
	// TimeLimit is how long a handler may take. By default as long as it likes.
	TimeLimit time.Duration
	// Grace is how long a stop waits for handlers before it ends their contexts. By default 25 s.
	Grace time.Duration
	// Poll makes the worker ask for tasks, instead of holding a stream on which taskd sends them. A worker does so by
	// itself if taskd, or a proxy before it, has no streams.
	Poll bool
	// Wait is how long taskd keeps a poll that finds no task. By default 20 s.
	Wait time.Duration
	// Takeover ends the sessions of an earlier worker of the same name at the start, so that its tasks go back at once.
	Takeover bool
	// Logger takes what a worker says: from where it takes tasks, which attempts failed, that taskd is away. By default
	// [slog.Default].
	Logger *slog.Logger
	// Middleware wraps the handler; the first is the outermost.
	Middleware []Middleware
}

// Worker calls a handler for each task that it gets.
type Worker struct {
	client  *Client
	options WorkerOptions
	handler Handler
	log     *slog.Logger
	// hasDefaultName means that nobody chose the name for this worker.
	hasDefaultName bool

	mu      sync.Mutex
	isBegun bool
	stops   chan struct{}
	kills   chan struct{}
	stats   Stats
}

// Stats counts what a worker did.
type Stats struct {
	// Taken counts the leases.
	Taken     int
	Completed int
	Rejected  int
	// GivenBack counts the tasks that went back at no cost: at a stop before they began, or put off by their handlers.
	GivenBack int
	// Lost counts the leases that ended otherwise: expired, cancelled, or done by others.
	Lost int
	// Running counts the handlers at work.
	Running int
}

// UnreportedError is the error of a worker that stopped before taskd answered its last reports. Other workers do these
// tasks again, unless taskd has the reports.
type UnreportedError struct{ Tasks int }

func (e *UnreportedError) Error() string {
	return fmt.Sprintf("taskd did not answer the reports of %d tasks", e.Tasks)
}

// NewWorker makes a worker, which does nothing before Run.
func NewWorker(client *Client, options WorkerOptions, handler Handler) *Worker {
	for n := len(options.Middleware) - 1; n >= 0; n-- {
		handler = options.Middleware[n](handler)
	}
	hasDefaultName := options.Name == ""
	if hasDefaultName {
		options.Name = defaultName()
	}
	if options.Concurrency <= 0 {
		options.Concurrency = 10
	}
	if options.Lease <= 0 {
		options.Lease = 30 * time.Second
	}
	options.Lease = max(options.Lease, 300*time.Millisecond)
	if options.Grace <= 0 {
		options.Grace = 25 * time.Second
	}
	if options.Wait <= 0 {
		options.Wait = 20 * time.Second
	}
	options.Prefetch = max(options.Prefetch, 0)
	return &Worker{
		client:         client,
		options:        options,
		handler:        handler,
		log:            logger(options.Logger),
		hasDefaultName: hasDefaultName,
		stops:          make(chan struct{}),
		kills:          make(chan struct{}),
	}
}

// Run works until the context ends or Stop is called. It then takes no more tasks, gives back those that have not begun,
// and waits for the handlers, at most for [WorkerOptions.Grace], and for taskd to answer their reports.
//
// While taskd is away it tries again, for ever. It returns an error if another worker has its default name, if taskd
// refuses the worker for good, for example because its token is not valid, or an [*UnreportedError].
func (w *Worker) Run(ctx context.Context) error {
	if len(w.options.Queues) == 0 {
		return errors.New("the worker has no queue; set WorkerOptions.Queues")
	}
	if w.handler == nil {
		return errors.New("the worker has no handler")
	}
	w.mu.Lock()
	isBegun := w.isBegun
	w.isBegun = true
	w.mu.Unlock()
	if isBegun {
		return errors.New("a worker runs once; make a new one")
	}
	if w.hasDefaultName && !w.client.isInMemory() {
		giveBack, err := takeName(w.options.Name, w.options.Queues)
		if err != nil {
			return err
		}
		defer giveBack()
	}
	return newRun(ctx, w).run(ctx)
}

// Stop begins a stop; Run returns when it is over. The second call ends the contexts of the handlers, too. If the end of
// Run's context has begun the stop, the first call does nothing.
func (w *Worker) Stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.stops:
	default:
		close(w.stops)
		return
	}
	select {
	case <-w.kills:
	default:
		close(w.kills)
	}
}

// Name is how taskd knows the worker.
func (w *Worker) Name() string { return w.options.Name }

// Stats returns the counts so far.
func (w *Worker) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stats
}

func (w *Worker) count(change func(*Stats)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(&w.stats)
}
