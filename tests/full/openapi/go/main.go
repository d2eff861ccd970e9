// Completes a task of a running taskd with the client that oapi-codegen generated from its /openapi.json, and nothing
// but that: `generated URL TOKEN`. scripts/check-openapi generates it beside this file and starts it.
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: generated URL TOKEN")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client, err := NewClientWithResponses(os.Args[1], WithRequestEditorFn(func(_ context.Context, request *http.Request) error {
		if os.Args[2] != "" {
			request.Header.Set("Authorization", "Bearer "+os.Args[2])
		}
		return nil
	}))
	check(err)

	queue := fmt.Sprintf("oapi-codegen-%d", time.Now().UnixNano())
	key := "a"
	var body OneOrMore
	check(body.FromNewTask(NewTask{Queue: queue, Key: &key, Payload: map[string]int{"depth": 2}}))
	inserted, err := client.InsertTasksWithResponse(ctx, &InsertTasksParams{}, body)
	check(err)
	if inserted.JSON200 == nil || len(inserted.JSON200.Results) != 1 {
		log.Fatalf("insert: %s", inserted.Body)
	}

	worker := "oapi"
	wait := "10s"
	var leased []LeasedTask
	for len(leased) == 0 {
		got, err := client.GetTasksWithResponse(ctx, GetTasks{Worker: &worker, Queues: []string{queue}, Wait: &wait})
		check(err)
		if got.JSON200 == nil {
			log.Fatalf("get: %s", got.Body)
		}
		leased = got.JSON200.Tasks
	}
	if leased[0].Key != key || leased[0].Payload.(map[string]any)["depth"] != 2.0 {
		log.Fatalf("another task: %+v", leased[0])
	}

	completion := Completion{Id: leased[0].Id.String(), LeaseToken: leased[0].LeaseToken, Result: "done"}
	completed, err := client.CompleteTasksWithResponse(ctx, CompleteTasks{Worker: &worker, Completions: []Completion{completion}})
	check(err)
	if completed.JSON200 == nil || completed.JSON200.Results[0].Status != "OK" {
		log.Fatalf("complete: %s", completed.Body)
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
