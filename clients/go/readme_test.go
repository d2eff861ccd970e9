package taskd_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	taskd "github.com/taskd/taskd/clients/go"
	"github.com/taskd/taskd/clients/go/taskdtest"
)

// The programs of README.md are those of internal/readme, which are compiled and, as a test, run; tests/it/docs.rs runs
// the worker. One is a part of a function below.
func TestProgramsOfReadmeAreThoseThatAreCompiled(t *testing.T) {
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(page), "\n```go\n")[1:]
	files := []string{"worker/main.go", "", "insert/main.go", "worker/main_test.go"}
	if len(parts) != len(files) {
		t.Fatalf("%d programs", len(parts))
	}
	for n, file := range files {
		program, _, _ := strings.Cut(parts[n], "```\n")
		if file == "" {
			here, err := os.ReadFile("readme_test.go")
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.TrimSuffix(program, "\n"), "\n")
			if !strings.Contains(string(here), "\n\t"+strings.Join(lines, "\n\t")+"\n") {
				t.Errorf("readme_test.go lacks this part of README.md:\n%s", program)
			}
			continue
		}
		own, err := os.ReadFile(filepath.Join("internal/readme", file))
		if err != nil {
			t.Fatal(err)
		}
		if string(own) != program {
			t.Errorf("internal/readme/%s is not the program of README.md", file)
		}
	}
}

// runUntilDrained is that part.
func runUntilDrained(client *taskd.Client, worker *taskd.Worker) (drainedError, runError error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	drained := make(chan error, 1)
	go func() {
		drained <- client.WaitDrained(ctx, "demo") // An error if the queue never had a task.
		worker.Stop()
	}()
	runError = worker.Run(ctx)
	return <-drained, runError
}

func endsWhenDrained(t *testing.T, client *taskd.Client) {
	t.Helper()
	options := taskd.WorkerOptions{Queues: []string{"demo"}}
	drainedError, runError := runUntilDrained(client, taskd.NewWorker(client, options, crawl))
	if !taskd.IsNotFound(drainedError) || runError != nil {
		t.Errorf("a queue without tasks: %v, %v", drainedError, runError)
	}
	insert(t, client, taskd.NewTask{Queue: "demo", Key: "root", Payload: map[string]int{"depth": 3}},
		taskd.NewTask{Queue: "demo", Key: "late", Delay: 300 * time.Millisecond})
	worker := taskd.NewWorker(client, options, crawl)
	drainedError, runError = runUntilDrained(client, worker)
	if drainedError != nil || runError != nil {
		t.Errorf("%v, %v", drainedError, runError)
	}
	if stats := worker.Stats(); stats.Completed != 16 || stats.GivenBack != 0 {
		t.Errorf("%+v", stats)
	}
	// Nobody works at this one.
	insert(t, client, taskd.NewTask{Queue: "demo", Key: "open"})
	ctx, cancel := context.WithCancelCause(context.Background())
	cancelled := fmt.Errorf("no longer")
	time.AfterFunc(200*time.Millisecond, func() { cancel(cancelled) })
	if err := client.WaitDrained(ctx, "demo"); err != cancelled {
		t.Errorf("a queue that is not drained: %v", err)
	}
}

func TestWorkerEndsWhenItsQueueIsDrained(t *testing.T) {
	endsWhenDrained(t, newProcess(t, "").start().client(taskd.ClientOptions{}))
}

func TestTaskdtestKnowsWhetherAQueueIsDrained(t *testing.T) {
	endsWhenDrained(t, taskdtest.NewServer(t).Client(t))
}
