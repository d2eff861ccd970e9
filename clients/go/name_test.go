package taskd_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	taskd "github.com/taskd/taskd/clients/go"
	"github.com/taskd/taskd/clients/go/taskdtest"
)

// TestMain gives the workers of these tests a name that no other program of this machine has.
func TestMain(m *testing.M) {
	if err := os.Setenv("TASKD_WORKER", fmt.Sprintf("go-test-%d", os.Getpid())); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

func TestDefaultNameIsTakenOnceForAQueue(t *testing.T) {
	name := os.Getenv("TASKD_WORKER")
	// Nobody is there: a worker takes its name before it calls taskd.
	client, err := taskd.NewClient(taskd.ClientOptions{Addresses: []string{"127.0.0.1:9"}})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var first journal
	worker, stop := start(t, client, taskd.WorkerOptions{Queues: []string{"a", "b", "a"}, Logger: first.logger()}, crawl)
	if worker.Name() != name {
		t.Errorf("its name is %s", worker.Name())
	}
	until(t, "the first one runs", func() bool { return strings.Contains(first.String(), "taskd is away") })

	var log journal
	err = taskd.NewWorker(client, taskd.WorkerOptions{Queues: []string{"c", "b"}, Logger: log.logger()}, crawl).Run(context.Background())
	said := fmt.Sprintf("a worker %s of queue b runs on this machine already, and taskd would take both for one: "+
		"give this one a name of its own, as in WorkerOptions{Name: %q} or TASKD_WORKER=%s-2", name, name+"-2", name)
	if err == nil || err.Error() != said {
		t.Errorf("the error is %v", err)
	}
	if log.String() != "" {
		t.Errorf("it says %s", log.String())
	}

	// A name that was given is not checked, and other queues are free.
	for _, options := range []taskd.WorkerOptions{{Queues: []string{"b"}, Name: name}, {Queues: []string{"c"}}} {
		options.Logger = (&journal{}).logger()
		_, stopOther := start(t, client, options, crawl)
		if err := stopOther(); err != nil {
			t.Errorf("%+v: %v", options, err)
		}
	}
	// It is free again at the end.
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	_, stop = start(t, client, taskd.WorkerOptions{Queues: []string{"a"}, Logger: log.logger()}, crawl)
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestWorkersOfTaskdtestShareADefaultName(t *testing.T) {
	first := taskdtest.NewServer(t)
	second := taskdtest.NewServer(t)
	one, _ := start(t, first.Client(t), taskd.WorkerOptions{Queues: []string{"q"}}, crawl)
	other, _ := start(t, second.Client(t), taskd.WorkerOptions{Queues: []string{"q"}}, crawl)
	insert(t, first.Client(t), taskd.NewTask{Queue: "q", Key: "a"})
	insert(t, second.Client(t), taskd.NewTask{Queue: "q", Key: "a"})
	until(t, "both work", func() bool { return one.Stats().Completed == 1 && other.Stats().Completed == 1 })
}

func TestTaskdWorkSeesTheNameOfAWorkerInGo(t *testing.T) {
	taskdProcess := newProcess(t, "").start()
	client := taskdProcess.client(taskd.ClientOptions{})
	worker, _ := start(t, client, taskd.WorkerOptions{Queues: []string{"q"}}, crawl)
	insert(t, client, taskd.NewTask{Queue: "q", Key: "a"})
	until(t, "it works", func() bool { return worker.Stats().Completed == 1 })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, taskdProcess.binary, "work", "q", "--server", "http://"+taskdProcess.http, "--", "true")
	said, err := command.CombinedOutput()
	if err == nil || !strings.Contains(string(said), fmt.Sprintf("a worker %s of queue q runs on this machine already", worker.Name())) {
		t.Errorf("%v: %s", err, said)
	}
}
