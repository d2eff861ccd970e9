package taskd

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/taskd/taskd/clients/go/taskdpb"
)

// sendFunc is a stream whose frames a test reads.
type sendFunc func(*taskdpb.WorkerFrame)

func (s sendFunc) Send(frame *taskdpb.WorkerFrame) error {
	s(frame)
	return nil
}

func (s sendFunc) CloseSend() error { return nil }

func testRun(t *testing.T, handler Handler) *run {
	t.Helper()
	client, err := NewClient(ClientOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	r := newRun(context.Background(), NewWorker(client, WorkerOptions{Queues: []string{"q"}, Concurrency: 20}, handler))
	t.Cleanup(r.end)
	return r
}

func TestHandlersBeginAfterTaskdWasTold(t *testing.T) {
	began := make(chan struct{})
	r := testRun(t, func(context.Context, *Task) (any, error) {
		close(began)
		return nil, nil
	})
	sent := make(chan struct{})
	done := make(chan struct{})
	defer close(done)
	stream := sendFunc(func(frame *taskdpb.WorkerFrame) {
		if len(frame.Started) == 0 {
			return
		}
		if fmt.Sprint(frame.Started) != "[a]" || frame.Number != 0 {
			t.Errorf("the frame is %v", frame)
		}
		select {
		case <-began:
			t.Error("the handler began before the frame was sent")
		case <-time.After(100 * time.Millisecond):
		}
		close(sent)
	})
	r.mu.Lock()
	r.session.opened(&taskdpb.WorkerFrame{Open: &taskdpb.OpenSession{}}, &taskdpb.TaskdFrame{Opened: &taskdpb.SessionOpened{}})
	for n := range uint64(mostOpen) {
		// It does not wait for the answers to other frames.
		r.session.sent[n] = &sentFrame{want: 10}
	}
	r.accept([]*taskdpb.LeasedTask{{Id: "a", LeaseToken: "1"}})
	r.mu.Unlock()
	go r.session.write(stream, time.Hour, done)
	<-sent
	<-began

	// Without a stream it begins at once.
	began = make(chan struct{})
	r.mu.Lock()
	r.session.broke()
	r.accept([]*taskdpb.LeasedTask{{Id: "b", LeaseToken: "2"}})
	r.mu.Unlock()
	<-began
}

func TestEndedLeaseIsTheLastOne(t *testing.T) {
	ended := make(chan string, 40)
	goOn := make(chan struct{})
	r := testRun(t, func(ctx context.Context, task *Task) (any, error) {
		select {
		case <-ctx.Done():
			ended <- string(task.Payload)
		case <-goOn:
		}
		return nil, nil
	})
	defer close(goOn)
	for n := range 10 {
		id := fmt.Sprint(n)
		r.mu.Lock()
		r.accept([]*taskdpb.LeasedTask{{Id: id, LeaseToken: "1", Payload: []byte("first")}})
		r.accept([]*taskdpb.LeasedTask{{Id: id, LeaseToken: "2", Payload: []byte("last")}})
		r.mu.Unlock()
		r.loseAll([]*taskdpb.ItemResult{{Id: id, Status: taskdpb.ItemStatus_ITEM_STATUS_CANCELLED}})
		if which := <-ended; which != "last" {
			t.Fatalf("the %s lease of two ended", which)
		}
	}
}
