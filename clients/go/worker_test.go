package taskd_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	taskd "github.com/taskd/taskd/clients/go"
	"github.com/taskd/taskd/clients/go/taskdpb"
	"github.com/taskd/taskd/clients/go/taskdtest"
)

const (
	completed = taskdpb.TaskStatus_TASK_STATUS_COMPLETED
	dead      = taskdpb.TaskStatus_TASK_STATUS_DEAD
	queued    = taskdpb.TaskStatus_TASK_STATUS_QUEUED
)

// journal is a logger whose lines a test reads.
type journal struct {
	mu    sync.Mutex
	lines bytes.Buffer
}

func (j *journal) Write(line []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.lines.Write(line)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.lines.String()
}

func (j *journal) logger() *slog.Logger { return slog.New(slog.NewTextHandler(j, nil)) }

func until(t *testing.T, what string, isTrue func() bool) {
	t.Helper()
	end := time.Now().Add(time.Minute)
	for !isTrue() {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// start runs a worker until the end of the test or the returned function.
func start(t *testing.T, client *taskd.Client, options taskd.WorkerOptions, handler taskd.Handler) (*taskd.Worker, func() error) {
	t.Helper()
	worker := taskd.NewWorker(client, options, handler)
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(context.Background()) }()
	stop := sync.OnceValue(func() error {
		worker.Stop()
		return <-ended
	})
	t.Cleanup(func() { _ = stop() })
	return worker, stop
}

func insert(t *testing.T, client *taskd.Client, tasks ...taskd.NewTask) []taskd.Inserted {
	t.Helper()
	inserted, err := client.InsertBatch(context.Background(), tasks)
	if err != nil {
		t.Fatal(err)
	}
	return inserted
}

// explosive is a result and an error that panics.
type explosive struct{}

func (explosive) MarshalJSON() ([]byte, error) { panic("it exploded") }

func (explosive) Error() string { panic("it exploded") }

func TestOutcomesOfHandlers(t *testing.T) {
	type page struct{ Depth int }
	wrong := errors.New("no such page")
	cases := []struct {
		name    string
		payload any
		handler taskd.Handler
		want    taskdtest.Outcome
	}{
		{"nothing", nil, func(context.Context, *taskd.Task) (any, error) { return nil, nil },
			taskdtest.Outcome{Status: completed}},
		{"text", nil, func(context.Context, *taskd.Task) (any, error) { return "done", nil },
			taskdtest.Outcome{Status: completed, Result: []byte("done"), Encoding: taskdpb.Encoding_ENCODING_TEXT}},
		{"bytes", nil, func(context.Context, *taskd.Task) (any, error) { return []byte{0xff}, nil },
			taskdtest.Outcome{Status: completed, Result: []byte{0xff}, Encoding: taskdpb.Encoding_ENCODING_BYTES}},
		{"JSON", page{Depth: 2}, taskd.JSON(func(_ context.Context, _ *taskd.Task, page page) (any, error) {
			return map[string]int{"depth": page.Depth}, nil
		}), taskdtest.Outcome{Status: completed, Result: []byte(`{"depth":2}`), Encoding: taskdpb.Encoding_ENCODING_JSON}},
		{"text as a string", "words", taskd.JSON(func(_ context.Context, _ *taskd.Task, words string) (any, error) {
			return words, nil
		}), taskdtest.Outcome{Status: completed, Result: []byte("words"), Encoding: taskdpb.Encoding_ENCODING_TEXT}},
		{"no payload", nil, taskd.JSON(func(_ context.Context, _ *taskd.Task, page page) (any, error) {
			return page.Depth, nil
		}), taskdtest.Outcome{Status: completed, Result: []byte("0"), Encoding: taskdpb.Encoding_ENCODING_JSON}},
		{"text for a struct", "words", taskd.JSON(func(_ context.Context, _ *taskd.Task, page page) (any, error) {
			return page.Depth, nil
		}), taskdtest.Outcome{Status: dead, Attempts: 1, Reason: "the payload is text, not JSON: "}},
		{"bytes for a struct", []byte("words"), taskd.JSON(func(_ context.Context, _ *taskd.Task, page page) (any, error) {
			return page.Depth, nil
		}), taskdtest.Outcome{Status: dead, Attempts: 1, Reason: "the payload is not JSON: "}},
		{"JSON of another type", []int{1}, taskd.JSON(func(_ context.Context, _ *taskd.Task, page page) (any, error) {
			return page.Depth, nil
		}), taskdtest.Outcome{Status: dead, Attempts: 1, Reason: "the payload is not as expected: json: cannot unmarshal array "}},
		{"an error", nil, func(context.Context, *taskd.Task) (any, error) { return nil, wrong },
			taskdtest.Outcome{Status: dead, Attempts: 3, Reason: "no such page"}},
		{"an error for good", nil, func(context.Context, *taskd.Task) (any, error) {
			return nil, fmt.Errorf("wrapped: %w", taskd.Reject(wrong))
		}, taskdtest.Outcome{Status: dead, Attempts: 1, Reason: "wrapped: no such page"}},
		{"a panic", nil, func(context.Context, *taskd.Task) (any, error) { panic("it broke") },
			taskdtest.Outcome{Status: dead, Attempts: 3, Reason: "the handler panicked: it broke"}},
		{"a panic of its result", nil, func(context.Context, *taskd.Task) (any, error) { return explosive{}, nil },
			taskdtest.Outcome{Status: dead, Attempts: 3, Reason: "the handler panicked: it exploded"}},
		{"a panic of its error", nil, func(context.Context, *taskd.Task) (any, error) { return nil, explosive{} },
			taskdtest.Outcome{Status: dead, Attempts: 3, Reason: "the handler panicked: it exploded"}},
		{"an error that is nil", nil, func(context.Context, *taskd.Task) (any, error) {
			var none *taskd.Rejection
			return nil, none
		}, taskdtest.Outcome{Status: dead, Attempts: 3, Reason: "the handler panicked: runtime error: "}},
		{"the end of its goroutine", nil, func(context.Context, *taskd.Task) (any, error) {
			runtime.Goexit()
			return nil, nil
		}, taskdtest.Outcome{Status: dead, Attempts: 3, Reason: "the handler panicked: it ended its goroutine"}},
		{"a result that JSON has not", nil, func(context.Context, *taskd.Task) (any, error) { return make(chan int), nil },
			taskdtest.Outcome{Status: dead, Attempts: 3, Reason: "the result cannot be sent: "}},
		{"a long reason", nil, func(context.Context, *taskd.Task) (any, error) {
			return nil, errors.New("a" + strings.Repeat("ä", 5000))
		}, taskdtest.Outcome{Status: dead, Attempts: 3, Reason: "a" + strings.Repeat("ä", 1999) + " …"}},
	}
	for _, one := range cases {
		t.Run(one.name, func(t *testing.T) {
			outcome := taskdtest.Run(t, one.handler, taskd.NewTask{Payload: one.payload, MaxAttempts: 3})
			if !strings.HasPrefix(outcome.Reason, one.want.Reason) || one.want.Reason == "" && outcome.Reason != "" {
				t.Errorf("the reason is %q", outcome.Reason)
			}
			outcome.Reason = one.want.Reason
			if fmt.Sprint(outcome) != fmt.Sprint(one.want) {
				t.Errorf("got %v, want %v", outcome, one.want)
			}
		})
	}
}

func TestRetriesAndPutOffs(t *testing.T) {
	var attempts []int
	outcome := taskdtest.Run(t, func(_ context.Context, task *taskd.Task) (any, error) {
		if task.Priority != taskd.Medium {
			t.Errorf("the priority is %s", task.Priority)
		}
		attempts = append(attempts, task.Attempt)
		switch len(attempts) {
		case 1:
			return nil, taskd.PutOff(time.Second, "the site is busy")
		case 2:
			return nil, taskd.RetryAfter(time.Second, errors.New("try again"))
		}
		return "ok", nil
	}, taskd.NewTask{})
	if fmt.Sprint(attempts) != "[1 1 2]" || outcome.PutOff != 1 || outcome.Attempts != 1 || outcome.Status != completed {
		t.Errorf("attempts %v, %+v", attempts, outcome)
	}
}

func TestHandlerTellsOfItsLimitKey(t *testing.T) {
	visits := 0
	outcome := taskdtest.Run(t, func(_ context.Context, task *taskd.Task) (any, error) {
		visits++
		if visits == 1 {
			task.Hold(2 * time.Hour)
			return nil, taskd.PutOff(0, "the site is busy")
		}
		task.Pace(time.Second)
		task.Discover(taskd.NewTask{Key: "found", LimitKey: task.LimitKey}, taskd.NewTask{Key: "found", Port: "link"})
		return nil, nil
	}, taskd.NewTask{LimitKey: "site"})
	if outcome.Hold != time.Hour || outcome.Pace != time.Second || outcome.Attempts != 0 || outcome.Status != completed {
		t.Errorf("%+v", outcome)
	}
	if len(outcome.Discovered) != 2 || outcome.Discovered[0].LimitKey != "site" {
		t.Fatalf("it discovered %v", outcome.Discovered)
	}
	if output := outcome.Discovered[1]; output.Queue != "" || output.Port != "link" {
		t.Errorf("an output goes to its port alone: %v", output)
	}
}

// crawl discovers two tasks for each that has a depth.
func crawl(_ context.Context, task *taskd.Task) (any, error) {
	var page struct{ Depth int }
	if err := task.Decode(&page); err != nil {
		return nil, err
	}
	for n := 0; n < 2 && page.Depth > 0; n++ {
		task.Discover(taskd.NewTask{Key: fmt.Sprintf("%s/%d", task.Key, n), Payload: map[string]int{"depth": page.Depth - 1}})
	}
	return "done", nil
}

func TestWorkGrowsOnStreamsAndPolls(t *testing.T) {
	for _, way := range []string{"stream", "poll", "no streams"} {
		t.Run(way, func(t *testing.T) {
			server := taskdtest.NewServer(t)
			if way == "no streams" {
				server.WithoutStreams()
			}
			root := taskd.NewTask{Queue: "pages", Key: "root", Payload: map[string]int{"depth": 6}}
			options := taskd.WorkerOptions{Queues: []string{"pages"}, Poll: way == "poll", Prefetch: 5}
			stats := server.Work(t, crawl, options, root)
			if stats.Completed != 127 || stats.Taken != 127 || stats.Running != 0 {
				t.Errorf("%+v", stats)
			}
			if outcome := server.Outcome("pages", "root/0/1/0/1/0/1"); outcome.Status != completed {
				t.Errorf("the last task: %+v", outcome)
			}
		})
	}
}

func TestReportsSurviveBrokenStreams(t *testing.T) {
	for name, breakThem := range map[string]func(*taskdtest.Server){
		"cut":    (*taskdtest.Server).CutStreams,
		"close":  (*taskdtest.Server).CloseStreams,
		"forget": (*taskdtest.Server).Forget,
	} {
		t.Run(name, func(t *testing.T) {
			server := taskdtest.NewServer(t)
			client := server.Client(t)
			var runs atomic.Int32
			goOn := make(chan struct{})
			handler := func(context.Context, *taskd.Task) (any, error) {
				runs.Add(1)
				<-goOn
				return "ok", nil
			}
			insert(t, client, taskd.NewTask{Queue: "q", Key: "a"}, taskd.NewTask{Queue: "q", Key: "b"})
			worker, stop := start(t, client, taskd.WorkerOptions{Queues: []string{"q"}}, handler)
			until(t, "both run", func() bool { return runs.Load() == 2 && server.Started("q", "a") && server.Started("q", "b") })
			breakThem(server)
			// The next stream is there when it brings a task.
			insert(t, client, taskd.NewTask{Queue: "q", Key: "c"})
			until(t, "the third runs", func() bool { return runs.Load() == 3 && server.Started("q", "c") })
			close(goOn)
			until(t, "all are done", func() bool { return worker.Stats().Completed == 3 })
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			if runs.Load() != 3 {
				t.Errorf("%d runs of three tasks", runs.Load())
			}
		})
	}
}

func TestStopGivesBackWhatHasNotBegun(t *testing.T) {
	for _, poll := range []bool{false, true} {
		t.Run(fmt.Sprintf("poll=%t", poll), func(t *testing.T) {
			server := taskdtest.NewServer(t)
			client := server.Client(t)
			goOn := make(chan struct{})
			insert(t, client, taskd.NewTask{Queue: "q", Key: "a"}, taskd.NewTask{Queue: "q", Key: "b"}, taskd.NewTask{Queue: "q", Key: "c"})
			options := taskd.WorkerOptions{Queues: []string{"q"}, Concurrency: 1, Prefetch: 2, Poll: poll}
			worker, stop := start(t, client, options, func(context.Context, *taskd.Task) (any, error) {
				<-goOn
				return nil, nil
			})
			until(t, "all are in hand", func() bool { return worker.Stats().Taken == 3 })
			worker.Stop()
			until(t, "two are back", func() bool { return worker.Stats().GivenBack == 2 })
			insert(t, client, taskd.NewTask{Queue: "q", Key: "d"})
			close(goOn)
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			if stats := worker.Stats(); stats.Completed != 1 || stats.Taken != 3 || stats.Rejected != 0 {
				t.Errorf("%+v", stats)
			}
			for _, key := range []string{"b", "c", "d"} {
				if outcome := server.Outcome("q", key); outcome.Status != queued || outcome.Attempts != 0 {
					t.Errorf("%s: %+v", key, outcome)
				}
			}
		})
	}
}

func TestSecondStopEndsHandlers(t *testing.T) {
	server := taskdtest.NewServer(t)
	client := server.Client(t)
	insert(t, client, taskd.NewTask{Queue: "q", Key: "a"})
	causes := make(chan error, 1)
	worker, stop := start(t, client, taskd.WorkerOptions{Queues: []string{"q"}, Grace: time.Hour}, func(ctx context.Context, _ *taskd.Task) (any, error) {
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return nil, ctx.Err()
	})
	until(t, "it runs", func() bool { return worker.Stats().Running == 1 })
	worker.Stop()
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if cause := <-causes; !errors.Is(cause, taskd.ErrStopped) {
		t.Errorf("the cause is %v", cause)
	}
	if outcome := server.Outcome("q", "a"); outcome.Status != queued || outcome.Attempts != 1 {
		t.Errorf("%+v", outcome)
	}
}

func TestLostLeasesEndTheContext(t *testing.T) {
	for _, poll := range []bool{false, true} {
		t.Run(fmt.Sprintf("poll=%t", poll), func(t *testing.T) {
			server := taskdtest.NewServer(t)
			client := server.Client(t)
			insert(t, client, taskd.NewTask{Queue: "q", Key: "a"})
			causes := make(chan error, 1)
			// A worker that polls hears of it when it extends the lease.
			options := taskd.WorkerOptions{Queues: []string{"q"}, Poll: poll, Lease: 300 * time.Millisecond}
			worker, _ := start(t, client, options, func(ctx context.Context, _ *taskd.Task) (any, error) {
				<-ctx.Done()
				causes <- context.Cause(ctx)
				return "late", nil
			})
			until(t, "it runs", func() bool { return worker.Stats().Running == 1 })
			server.EndLease("q", "a", taskdpb.ItemStatus_ITEM_STATUS_CANCELLED)
			if cause := <-causes; !errors.Is(cause, taskd.ErrLeaseLost) {
				t.Errorf("the cause is %v", cause)
			}
			until(t, "it is over", func() bool { return worker.Stats().Running == 0 })
			if stats := worker.Stats(); stats.Lost != 1 || stats.Completed != 0 {
				t.Errorf("%+v", stats)
			}
		})
	}
}

func TestTimeLimit(t *testing.T) {
	server := taskdtest.NewServer(t)
	var log journal
	options := taskd.WorkerOptions{Queues: []string{"q"}, TimeLimit: 20 * time.Millisecond, Logger: log.logger()}
	stats := server.Work(t, func(ctx context.Context, _ *taskd.Task) (any, error) {
		<-ctx.Done()
		return nil, nil
	}, options, taskd.NewTask{Queue: "q", Key: "a", MaxAttempts: 1})
	outcome := server.Outcome("q", "a")
	if outcome.Status != dead || outcome.Reason != "the handler took too long: longer than 20ms" || stats.Rejected != 1 {
		t.Errorf("%+v, %+v", outcome, stats)
	}
}

func TestNothingIsSilent(t *testing.T) {
	server := taskdtest.NewServer(t)
	var log journal
	options := taskd.WorkerOptions{Queues: []string{"q"}, Name: "w", Lease: 300 * time.Millisecond, Logger: log.logger()}
	server.Work(t, func(_ context.Context, task *taskd.Task) (any, error) {
		switch task.Key {
		case "panics":
			panic("it broke")
		case "fails":
			return nil, errors.New("no such page")
		case "runs":
			until(t, "two lines say that it runs", func() bool { return strings.Count(log.String(), "the handler still runs") >= 2 })
			return "done", nil
		}
		return nil, taskd.Reject(errors.New("never"))
	}, options, taskd.NewTask{Queue: "q", Key: "panics", MaxAttempts: 1},
		taskd.NewTask{Queue: "q", Key: "fails", MaxAttempts: 1}, taskd.NewTask{Queue: "q", Key: "rejects"},
		taskd.NewTask{Queue: "q", Key: "runs", MaxAttempts: 1})
	for _, said := range []string{
		"worker w takes tasks of q from " + server.Address(),
		"level=ERROR msg=\"the handler panicked: it broke\" queue=q key=panics", "worker_test.go",
		"level=WARN msg=\"the attempt failed: no such page\" queue=q key=fails",
		"level=WARN msg=\"the task is rejected for good: never\" queue=q key=rejects",
		"level=INFO msg=\"the handler still runs\" queue=q key=runs",
	} {
		if !strings.Contains(log.String(), said) {
			t.Errorf("it does not say %q:\n%s", said, log.String())
		}
	}
}

func TestAwayIsSaidOnce(t *testing.T) {
	client, err := taskd.NewClient(taskd.ClientOptions{Addresses: []string{"127.0.0.1:9"}})
	if err != nil {
		t.Fatal(err)
	}
	var log journal
	_, stop := start(t, client, taskd.WorkerOptions{Queues: []string{"q"}, Logger: log.logger()}, crawl)
	until(t, "it says so", func() bool {
		return strings.Contains(log.String(), "taskd is away, trying again: taskd at 127.0.0.1:9")
	})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if count := strings.Count(log.String(), "is away"); count != 1 {
		t.Errorf("%d times:\n%s", count, log.String())
	}
}

func TestMiddleware(t *testing.T) {
	server := taskdtest.NewServer(t)
	var mu sync.Mutex
	var order []string
	around := func(name string) taskd.Middleware {
		return func(next taskd.Handler) taskd.Handler {
			return func(ctx context.Context, task *taskd.Task) (any, error) {
				mu.Lock()
				order = append(order, name+" before")
				mu.Unlock()
				result, err := next(ctx, task)
				mu.Lock()
				order = append(order, name+" after")
				mu.Unlock()
				return result, err
			}
		}
	}
	options := taskd.WorkerOptions{Queues: []string{"q"}, Middleware: []taskd.Middleware{around("outer"), around("inner")}}
	server.Work(t, crawl, options, taskd.NewTask{Queue: "q", Key: "a"})
	if got := strings.Join(order, ", "); got != "outer before, inner before, inner after, outer after" {
		t.Error(got)
	}
}

func TestInsertsAnswerEachTask(t *testing.T) {
	server := taskdtest.NewServer(t)
	client := server.Client(t)
	ctx := context.Background()
	inserted := insert(t, client, taskd.NewTask{Queue: "q", Key: "a"}, taskd.NewTask{Key: "b"}, taskd.NewTask{Queue: "q", Key: "a"})
	if inserted[0].Status != taskd.Created || inserted[1].Status != taskd.Rejected || inserted[2].Status != taskd.Duplicate {
		t.Errorf("%+v", inserted)
	}
	var rejected *taskd.RejectedError
	if _, err := client.Insert(ctx, taskd.NewTask{Key: "b"}); !errors.As(err, &rejected) {
		t.Errorf("the error is %v", err)
	}
	count := 0
	for one, err := range client.InsertSeq(ctx, func(yield func(taskd.NewTask) bool) {
		for n := 0; n < 1234 && yield(taskd.NewTask{Queue: "many", Key: fmt.Sprint(n)}); n++ {
		}
	}) {
		if err != nil || one.Status != taskd.Created {
			t.Fatal(one, err)
		}
		count++
	}
	if count != 1234 {
		t.Errorf("%d answers", count)
	}
	if _, err := client.Get(ctx, "nobody"); !taskd.IsNotFound(err) {
		t.Errorf("the error is %v", err)
	}
}

func TestInsertAndWaitBringsTheResult(t *testing.T) {
	server := taskdtest.NewServer(t)
	client := server.Client(t)
	start(t, client, taskd.WorkerOptions{Queues: []string{"q"}}, func(_ context.Context, task *taskd.Task) (any, error) {
		return strings.ToUpper(task.Key), nil
	})
	inserted, err := client.InsertAndWait(context.Background(), taskd.NewTask{Queue: "q", Key: "abc"}, time.Minute)
	if err != nil || inserted.IsOpen() || string(inserted.Results[0].Result) != "ABC" {
		t.Errorf("%+v, %v", inserted, err)
	}
}

func TestCloseEndsCallsAndWorkers(t *testing.T) {
	ctx := context.Background()
	for _, poll := range []bool{false, true} {
		server := taskdtest.NewServer(t)
		client, err := taskd.NewClient(taskd.ClientOptions{Addresses: []string{server.Address()}, Patience: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		stopped := make(chan error, 1)
		worker := taskd.NewWorker(client, taskd.WorkerOptions{Queues: []string{"q"}, Poll: poll}, crawl)
		go func() { stopped <- worker.Run(ctx) }()
		insert(t, client, taskd.NewTask{Queue: "q", Key: "a"})
		until(t, "it works", func() bool { return worker.Stats().Completed == 1 })
		waited := make(chan error, 1)
		go func() {
			_, err := client.InsertAndWait(ctx, taskd.NewTask{Queue: "nobody", Key: "b"}, time.Hour)
			waited <- err
		}()
		until(t, "the call waits", func() bool { return server.Outcome("nobody", "b").Status == queued })
		if err := client.Close(); err != nil {
			t.Error(err)
		}
		if err := <-waited; !errors.Is(err, taskd.ErrClosed) {
			t.Errorf("the call: %v", err)
		}
		if err := <-stopped; !errors.Is(err, taskd.ErrClosed) {
			t.Errorf("poll=%t: %v", poll, err)
		}
		if _, err := client.Get(ctx, "b"); !errors.Is(err, taskd.ErrClosed) {
			t.Errorf("the next call: %v", err)
		}
		if err := client.Close(); err != nil {
			t.Errorf("the second close: %v", err)
		}
	}
}

func TestMistakes(t *testing.T) {
	for address, said := range map[string]string{
		"http://h:1/v1": "gRPC has no path",
		"localhost":     "the port of taskd's gRPC is missing; it is 7601 by default",
		"ftp://h:1":     "write host:port",
	} {
		if _, err := taskd.NewClient(taskd.ClientOptions{Addresses: []string{address}}); err == nil || !strings.Contains(err.Error(), said) {
			t.Errorf("%s: %v", address, err)
		}
	}
	if _, err := taskd.NewClient(taskd.ClientOptions{Token: "a b"}); err == nil {
		t.Error("a token with a space is taken")
	}
	client := taskdtest.NewServer(t).Client(t)
	if err := taskd.NewWorker(client, taskd.WorkerOptions{}, crawl).Run(context.Background()); err == nil {
		t.Error("a worker without a queue runs")
	}
	if _, err := client.Insert(context.Background(), taskd.NewTask{Queue: "q", Payload: "\xff"}); err == nil {
		t.Error("a text that is not UTF-8 is sent")
	}
}
