package main

import (
	"context"
	"fmt"
	"log"
	"os/signal"
	"syscall"

	taskd "github.com/taskd/taskd/clients/go"
)

type page struct {
	Depth int `json:"depth"`
}

func work(ctx context.Context, task *taskd.Task, payload page) (any, error) {
	for n := 0; n < 2 && payload.Depth > 0; n++ {
		task.Discover(taskd.NewTask{Key: fmt.Sprintf("%s/%d", task.Key, n), Payload: page{payload.Depth - 1}})
	}
	fmt.Println(task.Key)
	return "done", nil
}

func main() {
	client, err := taskd.NewClient(taskd.ClientOptions{Addresses: []string{"127.0.0.1:7601"}})
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	options := taskd.WorkerOptions{Queues: []string{"demo"}}
	if err := taskd.NewWorker(client, options, taskd.JSON(work)).Run(ctx); err != nil {
		log.Fatal(err)
	}
}
