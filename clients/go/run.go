package taskd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/taskd/taskd/clients/go/taskdpb"
)

const (
	// mostUnreported is how many reports may wait for an answer before the worker takes no more tasks.
	mostUnreported = 2000
	// The reports of one call, and their bytes; a single one may have more.
	mostReports     = 500
	mostReportBytes = 2 << 20
	// mostExtensions is how many leases one call extends, unless taskd takes fewer.
	mostExtensions = 500
	// drainWithin is how long taskd may take to say that no task is on its way any more.
	drainWithin = 5 * time.Second
	// answerComes is how long the answer to a poll may take at a stop.
	answerComes = 250 * time.Millisecond
	// lastWords is how long handlers may take after the end of their contexts.
	lastWords = 5 * time.Second
	// lastReports is how long taskd may take to answer the last reports.
	lastReports = 10 * time.Second
	closeWithin = 2 * time.Second
	// shortestRound is the time from a poll that found nothing to the next one.
	shortestRound = 100 * time.Millisecond
	// shortestPause is the least time between two rounds of extensions.
	shortestPause = 10 * time.Millisecond
	// stopped is why tasks go back that wait in a worker which stops.
	stopped = "the worker stopped"
	// mostTasks is how many tasks one call may ask for.
	mostTasks = 1000
)

type heldState int

const (
	isWaiting heldState = iota
	isRunning
	// isReported means that the outcome is known. Its report has not been answered yet.
	isReported
	isGone
)

// lease names a lease. Tasks that were leased together may share a token.
type lease struct{ id, token string }

func leaseOf(leased *taskdpb.LeasedTask) lease {
	return lease{id: leased.Id, token: leased.LeaseToken}
}

// held is a task in the hands of the worker.
type held struct {
	leased *taskdpb.LeasedTask
	task   *Task
	// number grows from lease to lease.
	number int
	state  heldState
	cancel context.CancelCauseFunc
	// began is when its handler began, and said how often a line has said that it still runs.
	began time.Time
	said  int
	// told is closed when taskd was told that the handler begins, or cannot be told on this stream.
	told   chan struct{}
	isTold bool
}

// report is an outcome that taskd has not answered.
type report struct {
	held *held
	outcome
}

// lane holds the reports of one kind. One call of each kind is under way at a time.
type lane struct {
	waiting []*report
	later   pauses
}

// run is one run of a worker: what it has in hand, and the goroutines that share it.
type run struct {
	w       *Worker
	options WorkerOptions
	log     *slog.Logger
	servers *servers
	// calls ends with the run: it is the context of all calls. values is that of handlers.
	calls  context.Context
	end    context.CancelFunc
	values context.Context
	failed chan struct{}
	// extendNow asks to extend all leases at once.
	extendNow chan struct{}
	session   *session

	mu         sync.Mutex
	changed    chan struct{}
	held       map[lease]*held
	waiting    []*held
	running    int
	accepted   int
	isStopping bool
	// throttledUntil is when the worker may take tasks again, after a handler has throttled it.
	throttledUntil time.Time
	completions    lane
	rejections     lane
	extensions     int
	fatal          error
	// isGreeted means that the worker has said from where it takes tasks.
	isGreeted bool
	outage    outage
}

func newRun(ctx context.Context, w *Worker) *run {
	values := context.WithoutCancel(ctx)
	calls, end := context.WithCancel(values)
	r := &run{
		w:          w,
		options:    w.options,
		log:        w.log,
		servers:    w.client.servers,
		calls:      calls,
		end:        end,
		values:     values,
		failed:     make(chan struct{}),
		extendNow:  make(chan struct{}, 1),
		changed:    make(chan struct{}),
		held:       map[lease]*held{},
		extensions: mostExtensions,
		outage:     outage{log: w.log},
	}
	r.session = newSession(r)
	return r
}

// run works until a stop, and returns when all is over.
func (r *run) run(ctx context.Context) error {
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer r.end()
	help := func(work func()) {
		helpers.Add(1)
		go func() {
			defer helpers.Done()
			work()
		}()
	}
	taking, stopTaking := context.WithCancel(r.calls)
	defer stopTaking()
	hasTaken := make(chan struct{})
	help(r.extendLeases)
	help(func() { r.deliverAll(&r.completions) })
	help(func() { r.deliverAll(&r.rejections) })
	help(func() {
		defer close(hasTaken)
		if r.options.Poll {
			r.poll(taking)
		} else {
			r.session.run(taking)
		}
	})

	select {
	case <-ctx.Done():
	case <-r.w.stops:
	case <-r.failed:
	}
	grace := time.NewTimer(r.options.Grace)
	defer grace.Stop()
	r.beginStop()
	r.waitFor(drainWithin, func() bool { return r.fatal != nil || r.session.isDrained() })

	// The handlers.
	r.waitUnless(grace.C, r.w.kills, func() bool { return r.running == 0 || r.fatal != nil })
	r.endHandlers()
	r.waitFor(lastWords, func() bool { return r.running == 0 })
	r.rejectRest()

	// Their reports.
	r.waitFor(lastReports, func() bool { return len(r.held) == 0 || r.fatal != nil })
	r.session.close()
	stopTaking()
	<-hasTaken

	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fatal != nil {
		return r.fatal
	}
	if len(r.held) > 0 {
		return &UnreportedError{Tasks: len(r.held)}
	}
	return nil
}

// notify wakes everybody who waits for a change. The caller holds the lock.
func (r *run) notify() {
	close(r.changed)
	r.changed = make(chan struct{})
	r.session.wake()
}

// waitFor waits until something is true, at most this long.
func (r *run) waitFor(limit time.Duration, isTrue func() bool) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	return r.waitUnless(timer.C, nil, isTrue)
}

// waitUnless waits until something is true, or one of the channels says to wait no longer.
func (r *run) waitUnless(over <-chan time.Time, kills <-chan struct{}, isTrue func() bool) bool {
	for {
		r.mu.Lock()
		done := isTrue()
		changed := r.changed
		r.mu.Unlock()
		if done {
			return true
		}
		select {
		case <-changed:
		case <-over:
			return false
		case <-kills:
			return false
		}
	}
}

// fail ends the run because taskd refuses the worker.
func (r *run) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fatal != nil {
		return
	}
	r.fatal = err
	close(r.failed)
	r.notify()
}

// away says that taskd is away.
func (r *run) away(err error) {
	if r.calls.Err() == nil {
		r.outage.away(err)
	}
}

// back notes that taskd gives tasks. The first time it says from where the worker takes them.
func (r *run) back(address string) {
	wasAway := r.outage.over()
	r.mu.Lock()
	isGreeted := r.isGreeted
	r.isGreeted = true
	r.mu.Unlock()
	switch {
	case !isGreeted:
		r.log.Info(fmt.Sprintf("worker %s takes tasks of %s from %s", r.options.Name,
			strings.Join(r.options.Queues, ", "), strings.Join(r.servers.addresses, ", ")))
	case wasAway:
		r.log.Info("taskd is back", "at", address)
	}
}

// Tasks.

// room is how many tasks the worker takes. The caller holds the lock.
func (r *run) room() int {
	if r.isStopping || r.fatal != nil || r.isThrottled() || len(r.held) > r.options.Concurrency+r.options.Prefetch+mostUnreported {
		return 0
	}
	return max(r.options.Concurrency+r.options.Prefetch-r.running-len(r.waiting), 0)
}

// isThrottled tells whether the worker takes no tasks for a while. The caller holds the lock.
func (r *run) isThrottled() bool { return time.Now().Before(r.throttledUntil) }

// throttle takes no tasks for so long. The caller holds the lock.
func (r *run) throttle(pause time.Duration) {
	until := time.Now().Add(pause)
	if until.Before(r.throttledUntil) {
		return
	}
	r.throttledUntil = until
	r.giveBackWaiting("the worker takes no tasks for a while")
	time.AfterFunc(pause, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.notify()
	})
}

// accept takes tasks in hand. The caller holds the lock.
func (r *run) accept(tasks []*taskdpb.LeasedTask) {
	taken := 0
	for _, leased := range tasks {
		if r.held[leaseOf(leased)] != nil {
			continue
		}
		taken++
		r.accepted++
		one := &held{leased: leased, task: taskOf(leased, r.options.Name), number: r.accepted, told: make(chan struct{})}
		r.held[leaseOf(leased)] = one
		r.waiting = append(r.waiting, one)
	}
	if taken == 0 {
		return
	}
	r.w.count(func(stats *Stats) { stats.Taken += taken })
	switch {
	case r.isStopping:
		r.giveBackWaiting(stopped)
	case r.isThrottled():
		r.giveBackWaiting("the worker takes no tasks for a while")
	}
	r.begin()
	r.notify()
}

// begin starts handlers for tasks that wait. The caller holds the lock.
func (r *run) begin() {
	for !r.isStopping && r.fatal == nil && r.running < r.options.Concurrency && len(r.waiting) > 0 {
		one := r.waiting[0]
		r.waiting = r.waiting[1:]
		r.running++
		one.state = isRunning
		one.began = time.Now()
		ctx, cancel := context.WithCancelCause(r.values)
		one.cancel = cancel
		r.session.started(one)
		r.w.count(func(stats *Stats) { stats.Running++ })
		go r.work(ctx, one)
	}
}

// work runs the handler of a task.
func (r *run) work(ctx context.Context, one *held) {
	defer one.cancel(nil)
	// A task that ends this process must not look like one that has not begun.
	<-one.told
	if r.options.TimeLimit > 0 {
		timer := time.AfterFunc(r.options.TimeLimit, func() { r.overtime(one) })
		defer timer.Stop()
	}
	// A handler that ends its goroutine does not return from here.
	var result any
	var err error = &panicError{value: "it ended its goroutine"}
	defer func() { r.finish(ctx, one, result, err) }()
	result, err = call(ctx, r.w.handler, one.task)
}

// finish reports what the handler of a task said, and starts the next one.
func (r *run) finish(ctx context.Context, one *held, result any, err error) {
	var completion *taskdpb.Completion
	if err == nil {
		var surplus []*taskdpb.NewTask
		completion, surplus, err = complete(one.leased, one.task, result)
		if err == nil && len(surplus) > 0 {
			err = r.insertSurplus(ctx, one.task, surplus)
		}
	}
	what := outcome{completion: completion}
	if err != nil {
		what = outcome{}
		what.rejection, err = rejectHandled(one.leased, err)
		var said *Rejection
		if errors.Is(context.Cause(ctx), ErrStopped) && !errors.As(err, &said) {
			// Another worker gets it at once.
			what.rejection.Delay = durationpb.New(0)
		}
	}

	// The log comes before the report: nothing is to be said any more when Run returns.
	r.mu.Lock()
	counts := one.state == isRunning
	r.mu.Unlock()
	var panicked *panicError
	if err != nil && (counts || errors.As(err, &panicked)) {
		logFailure(r.log, one.task, err)
	} else if counts {
		r.log.Debug("the task is done", "queue", one.task.Queue, "key", one.task.Key, "id", one.task.ID)
	}
	if counts && one.task.LimitKey == "" && one.task.limit() != nil {
		r.log.Warn("the task has no limit key, so Hold and Pace do nothing: its queue had no limit_by at its insert",
			"queue", one.task.Queue, "key", one.task.Key, "id", one.task.ID)
	}
	what.addLimit(one.task)
	r.w.count(func(stats *Stats) { stats.Running-- })

	r.mu.Lock()
	defer r.mu.Unlock()
	r.running--
	// Meanwhile its lease may have been lost.
	if one.state == isRunning {
		r.report(one, what)
		var said *Rejection
		if errors.As(err, &said) && said.Throttles {
			r.throttle(min(said.Delay, longestDelay))
		}
	}
	r.begin()
	r.notify()
}

// overtime ends a handler that took too long. It keeps its place until it returns.
func (r *run) overtime(one *held) {
	err := fmt.Errorf("%w: longer than %s", ErrTimeLimit, r.options.TimeLimit)
	r.mu.Lock()
	counts := one.state == isRunning
	if counts {
		// From here on what the handler returns counts for nothing.
		one.state = isReported
	}
	r.mu.Unlock()
	if !counts {
		return
	}
	logFailure(r.log, one.task, err)
	one.cancel(ErrTimeLimit)
	r.mu.Lock()
	defer r.mu.Unlock()
	what := outcome{rejection: reject(one.leased, err)}
	what.addLimit(one.task)
	r.report(one, what)
	r.notify()
}

// insertSurplus inserts the discovered tasks that a completion has no room for. A task that is inserted twice is a
// duplicate, so an attempt that fails later loses nothing. It goes on while taskd is away and the lease lives.
func (r *run) insertSurplus(ctx context.Context, task *Task, surplus []*taskdpb.NewTask) error {
	var pauses pauses
	for {
		inserted, err := r.w.client.insertMessages(ctx, surplus)
		if err == nil {
			for _, one := range inserted {
				if one.Status == Rejected {
					r.log.Warn("a discovered task is not stored: "+one.Note, "queue", task.Queue, "key", task.Key, "id", task.ID)
				}
			}
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !isAway(err) {
			return Reject(fmt.Errorf("it discovered more tasks than a completion has, and taskd takes no insert of them: %w", err))
		}
		r.away(err)
		// The client may have little patience.
		sleep(ctx, pauses.next())
	}
}

// lose takes a task out of the worker's hands because nobody waits for its report. A report has an answer of its own.
func (r *run) lose(one *held, result *taskdpb.ItemResult) {
	r.mu.Lock()
	if one.state == isReported || one.state == isGone {
		r.mu.Unlock()
		return
	}
	if one.state == isWaiting {
		for n, waiting := range r.waiting {
			if waiting == one {
				r.waiting = append(r.waiting[:n:n], r.waiting[n+1:]...)
				break
			}
		}
	}
	one.state = isGone
	delete(r.held, leaseOf(one.leased))
	r.notify()
	r.mu.Unlock()
	r.lost(one, result)
	if one.cancel != nil {
		one.cancel(fmt.Errorf("%w: %s", ErrLeaseLost, statusOf(result)))
	}
}

func (r *run) lost(one *held, result *taskdpb.ItemResult) {
	r.w.count(func(stats *Stats) { stats.Lost++ })
	r.log.Warn("the task is lost: "+statusOf(result), "queue", one.task.Queue, "key", one.task.Key, "id", one.task.ID)
}

// loseAll hears of leases that ended, by the ids of their tasks. If a worker still has an earlier lease of the task, it is
// the last one that ended now.
func (r *run) loseAll(results []*taskdpb.ItemResult) {
	for _, result := range results {
		r.mu.Lock()
		var found *held
		for _, one := range r.held {
			if one.leased.Id == result.Id && (found == nil || one.number > found.number) {
				found = one
			}
		}
		r.mu.Unlock()
		if found != nil {
			r.lose(found, result)
		}
	}
}

func statusOf(result *taskdpb.ItemResult) string {
	name := result.Status.String()[len("ITEM_STATUS_"):]
	if result.Error == "" {
		return name
	}
	return name + ": " + result.Error
}

// The stop.

func (r *run) beginStop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.isStopping = true
	r.giveBackWaiting(stopped)
	r.notify()
	if r.running > 0 {
		r.log.Info("the worker stops when its tasks are done", "tasks", r.running)
	}
}

// giveBackWaiting gives back the tasks that have not begun. The caller holds the lock.
func (r *run) giveBackWaiting(why string) {
	for _, one := range r.waiting {
		r.report(one, outcome{rejection: giveBack(one.leased, why)})
	}
	r.waiting = nil
}

// endHandlers ends the contexts of the handlers.
func (r *run) endHandlers() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.held {
		if one.state == isRunning {
			one.cancel(ErrStopped)
		}
	}
}

// rejectRest rejects the tasks of handlers that did not return.
func (r *run) rejectRest() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.held {
		if one.state != isRunning {
			continue
		}
		rejection := reject(one.leased, errors.New("the worker stopped"))
		rejection.Delay = durationpb.New(0)
		r.report(one, outcome{rejection: rejection})
	}
	r.notify()
}

// Reports.

// report puts the outcome of a task among those to deliver. The caller holds the lock.
func (r *run) report(one *held, what outcome) {
	one.state = isReported
	to := &r.completions
	if what.completion == nil {
		to = &r.rejections
	}
	to.waiting = append(to.waiting, &report{held: one, outcome: what})
}

func (r *run) deliverAll(from *lane) {
	for {
		r.mu.Lock()
		batch := from.take(min(mostReports, r.session.mostItems))
		changed := r.changed
		r.mu.Unlock()
		if len(batch) > 0 {
			r.deliver(from, batch, false)
			continue
		}
		select {
		case <-changed:
		case <-r.calls.Done():
			return
		}
	}
}

func (l *lane) take(most int) []*report {
	count := 0
	bytes := 0
	for count < len(l.waiting) && count < most {
		bytes += l.waiting[count].size()
		if count > 0 && bytes > mostReportBytes {
			break
		}
		count++
	}
	batch := l.waiting[:count:count]
	l.waiting = l.waiting[count:]
	return batch
}

// deliver sends reports, and sorts their answers. A report that arrives twice counts once, so what has no answer is
// sent again. After a refusal its halves go by calls, because a stream would end with each frame that taskd refuses.
func (r *run) deliver(from *lane, batch []*report, byCalls bool) {
	results, err := r.send(batch, byCalls)
	switch {
	case err == nil:
		r.answered(from, batch, results)
	case r.calls.Err() != nil:
	case isOfItems(err) && len(batch) > 1:
		// One of them is to blame, or taskd takes fewer.
		half := len(batch) / 2
		r.deliver(from, batch[:half], true)
		r.deliver(from, batch[half:], true)
	case isOfItems(err):
		invalid := &taskdpb.ItemResult{Status: taskdpb.ItemStatus_ITEM_STATUS_INVALID, Error: err.Error()}
		r.answered(from, batch, []*taskdpb.ItemResult{invalid})
	default:
		if isAway(err) {
			r.away(err)
		} else {
			r.fail(err)
		}
		pause := from.later.next()
		r.mu.Lock()
		// A new array: that of the batch may have the reports of its other half.
		from.waiting = slices.Concat(batch, from.waiting)
		r.mu.Unlock()
		sleep(r.calls, pause)
	}
}

// send sends reports by the stream if one is open, and otherwise by a call, which any process takes.
func (r *run) send(batch []*report, byCall bool) ([]*taskdpb.ItemResult, error) {
	what := &parcel{}
	for _, one := range batch {
		if one.completion != nil {
			what.completions = append(what.completions, one.completion)
		} else {
			what.rejections = append(what.rejections, one.rejection)
		}
	}
	if !byCall {
		if results, err := r.session.send(what, callTimeout); err == nil {
			return results, nil
		}
	}
	var results []*taskdpb.ItemResult
	err := r.servers.once(r.calls, 0, func(ctx context.Context, conn *grpc.ClientConn) error {
		tasks := taskdpb.NewTasksClient(conn)
		if len(what.completions) > 0 {
			answer, err := tasks.CompleteTasks(ctx, &taskdpb.CompleteTasksRequest{Worker: r.options.Name, Completions: what.completions})
			results = answer.GetResults()
			return err
		}
		answer, err := tasks.RejectTasks(ctx, &taskdpb.RejectTasksRequest{Worker: r.options.Name, Rejections: what.rejections})
		results = answer.GetResults()
		return err
	})
	return results, err
}

func (r *run) answered(from *lane, batch []*report, results []*taskdpb.ItemResult) {
	var later []*report
	for n, one := range batch {
		result := &taskdpb.ItemResult{}
		if n < len(results) {
			result = results[n]
		}
		switch result.Status {
		case taskdpb.ItemStatus_ITEM_STATUS_UNSPECIFIED, taskdpb.ItemStatus_ITEM_STATUS_TRY_LATER:
			later = append(later, one)
		case taskdpb.ItemStatus_ITEM_STATUS_OK:
			r.w.count(func(stats *Stats) {
				switch {
				case one.completion != nil:
					stats.Completed++
				case one.rejection.NotStarted:
					stats.GivenBack++
				default:
					stats.Rejected++
				}
			})
			if result.Error != "" {
				task := one.held.task
				r.log.Warn("discovered tasks are not stored: "+result.Error, "queue", task.Queue, "key", task.Key, "id", task.ID)
			}
			r.release(one.held)
		case taskdpb.ItemStatus_ITEM_STATUS_INVALID:
			if one.completion == nil {
				r.lost(one.held, result)
				r.release(one.held)
				continue
			}
			err := fmt.Errorf("taskd refused the completion: %s", result.Error)
			logFailure(r.log, one.held.task, err)
			r.mu.Lock()
			r.report(one.held, outcome{rejection: reject(one.held.leased, err)})
			r.notify()
			r.mu.Unlock()
		default:
			r.lost(one.held, result)
			r.release(one.held)
		}
	}
	if len(later) == 0 {
		from.later.reset()
		return
	}
	// A shard that is away does not hold up the reports of others.
	time.AfterFunc(from.later.next(), func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		from.waiting = append(from.waiting, later...)
		r.notify()
	})
}

func (r *run) release(one *held) {
	r.mu.Lock()
	defer r.mu.Unlock()
	one.state = isGone
	delete(r.held, leaseOf(one.leased))
	r.notify()
}

// Leases.

// sayWhatRuns logs a line for each handler that has run for half of a lease, and again when it has run twice as long.
func (r *run) sayWhatRuns() {
	type long struct {
		task *Task
		runs time.Duration
	}
	var all []long
	r.mu.Lock()
	for _, one := range r.held {
		runs := time.Since(one.began)
		if one.state == isRunning && runs >= r.options.Lease/2<<one.said {
			one.said++
			all = append(all, long{one.task, runs})
		}
	}
	r.mu.Unlock()
	for _, one := range all {
		r.log.Info("the handler still runs", "queue", one.task.Queue, "key", one.task.Key, "id", one.task.ID,
			"for", one.runs.Round(time.Millisecond))
	}
}

// extendLeases extends all leases before they end, also those of tasks that wait and of unanswered reports.
func (r *run) extendLeases() {
	every := r.options.Lease / 3
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-r.extendNow:
		case <-r.calls.Done():
			return
		}
		r.sayWhatRuns()
		began := time.Now()
		r.extendAll(began.Add(every))
		// A round that took long has not seen the tasks that came meanwhile.
		timer.Reset(max(every-time.Since(began), shortestPause))
	}
}

// extendWithin is how long a call that extends leases may take: after one without an answer there is time for another
// one, which goes to the next process.
func extendWithin(lease time.Duration) time.Duration {
	return min(max(lease/4, 500*time.Millisecond), callTimeout)
}

// extendAll extends the leases of all tasks in hand. While taskd is away it tries again until the next round is due.
func (r *run) extendAll(end time.Time) {
	r.mu.Lock()
	all := make([]*held, 0, len(r.held))
	for _, one := range r.held {
		all = append(all, one)
	}
	r.mu.Unlock()
	var pauses pauses
	for len(all) > 0 {
		count := min(len(all), r.extensions)
		results, err := r.extend(all[:count])
		switch {
		case err == nil:
			for n, result := range results {
				if n < count && isLost(result.Status) {
					r.lose(all[n], result)
				}
			}
			all = all[count:]
		case r.calls.Err() != nil:
			return
		case isOfItems(err) && count > 1:
			// taskd's setting max_items is lower.
			r.extensions = count / 2
		case isAway(err):
			r.away(err)
			if time.Now().After(end) || !sleep(r.calls, pauses.next()) {
				// The next round comes soon.
				return
			}
		default:
			r.fail(err)
			return
		}
	}
}

func (r *run) extend(some []*held) ([]*taskdpb.ItemResult, error) {
	by := durationpb.New(r.options.Lease)
	what := &parcel{}
	for _, one := range some {
		what.extensions = append(what.extensions, &taskdpb.Extension{Id: one.leased.Id, LeaseToken: one.leased.LeaseToken, By: by})
	}
	limit := extendWithin(r.options.Lease)
	// Two calls, the second one to another process, come after this while the leases live.
	if results, err := r.session.send(what, limit/2); err == nil {
		return results, nil
	}
	var results []*taskdpb.ItemResult
	err := r.servers.once(r.calls, limit-callTimeout, func(ctx context.Context, conn *grpc.ClientConn) error {
		answer, err := taskdpb.NewTasksClient(conn).ExtendTasks(ctx, &taskdpb.ExtendTasksRequest{Worker: r.options.Name, Extensions: what.extensions})
		results = answer.GetResults()
		return err
	})
	return results, err
}

// isLost tells whether nobody waits for a report of the task any more.
func isLost(status taskdpb.ItemStatus) bool {
	switch status {
	case taskdpb.ItemStatus_ITEM_STATUS_LEASE_LOST, taskdpb.ItemStatus_ITEM_STATUS_ALREADY_COMPLETED,
		taskdpb.ItemStatus_ITEM_STATUS_UNKNOWN_TASK, taskdpb.ItemStatus_ITEM_STATUS_CANCELLED:
		return true
	default:
		return false
	}
}

// Polls.

// poll asks for tasks until the worker stops.
func (r *run) poll(ctx context.Context) {
	r.mu.Lock()
	r.session.isPolling = true
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.session.isPolling = false
		r.notify()
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		r.waitUnless(nil, nil, func() bool { return r.isStopping || r.fatal != nil || ctx.Err() != nil })
		// An answer that is on its way comes soon, and taskd takes back one that it has not written.
		sleep(ctx, answerComes)
		cancel()
	}()
	var pauses pauses
	most := mostTasks
	for ctx.Err() == nil {
		r.mu.Lock()
		room := min(r.room(), most)
		isOver := r.isStopping || r.fatal != nil
		changed := r.changed
		wait := r.options.Wait
		if !r.isGreeted {
			// The answer says that taskd is there.
			wait = 0
		}
		r.mu.Unlock()
		if isOver {
			return
		}
		if room == 0 {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		began := time.Now()
		chosen := r.servers.pick()
		request := &taskdpb.GetTasksRequest{
			Worker:        r.options.Name,
			Queues:        r.options.Queues,
			Weights:       r.options.Weights,
			MaxTasks:      uint32(room),
			Wait:          durationpb.New(wait),
			LeaseDuration: durationpb.New(r.options.Lease),
		}
		var answer *taskdpb.GetTasksResponse
		err := r.servers.once(ctx, wait, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
			answer, err = taskdpb.NewTasksClient(conn).GetTasks(ctx, request)
			return err
		})
		switch {
		case err == nil:
			pauses.reset()
			r.back(chosen.address)
			r.mu.Lock()
			r.accept(answer.Tasks)
			r.mu.Unlock()
			// A taskd that is about to stop does not wait.
			if rest := shortestRound - time.Since(began); len(answer.Tasks) == 0 && rest > 0 {
				sleep(ctx, rest)
			}
		case ctx.Err() != nil:
		case isOfItems(err) && room > 1:
			// taskd's setting max_items is lower. If it is something else, the smallest call fails, too.
			most = room / 2
		case isAway(err):
			r.away(err)
			sleep(ctx, pauses.next())
		default:
			r.fail(err)
		}
	}
}
