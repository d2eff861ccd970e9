package main

import (
	"testing"

	taskd "github.com/taskd/taskd/clients/go"
	"github.com/taskd/taskd/clients/go/taskdtest"
)

func TestWorkDiscoversTwo(t *testing.T) {
	outcome := taskdtest.Run(t, taskd.JSON(work), taskd.NewTask{Key: "root", Payload: page{Depth: 1}})
	if string(outcome.Result) != "done" || len(outcome.Discovered) != 2 {
		t.Errorf("%+v", outcome)
	}
}
