package main

import (
	"context"
	"fmt"
	"log"
	"time"

	taskd "github.com/taskd/taskd/clients/go"
)

func main() {
	client, err := taskd.NewClient(taskd.ClientOptions{Addresses: []string{"127.0.0.1:7601"}})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx := context.Background()
	task := taskd.NewTask{Queue: "thumbs", Key: "a.png", Payload: "/images/a.png", FinishWithin: time.Hour, IdempotencyKey: "upload-7"}
	inserted, err := client.Insert(ctx, task)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(inserted.Status, inserted.ID)
	// The status and the results at the end of the task, or of the wait.
	inserted, err = client.InsertAndWait(ctx, task, time.Second)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(inserted.TaskStatus, len(inserted.Results))
}
