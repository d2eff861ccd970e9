package taskd_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	taskd "github.com/taskd/taskd/clients/go"
	"github.com/taskd/taskd/clients/go/taskdpb"
)

// process is a taskd with a folder and ports of its own.
type process struct {
	t       *testing.T
	binary  string
	folder  string
	http    string
	address string
	command *exec.Cmd
}

// newProcess starts the taskd that TASKD_BIN names; scripts/check-go sets it.
func newProcess(t *testing.T, config string) *process {
	t.Helper()
	binary := os.Getenv("TASKD_BIN")
	if binary == "" {
		t.Skip("TASKD_BIN names no taskd")
	}
	// A short name: the socket of the embedded Redis is in it.
	folder, err := os.MkdirTemp("/tmp", "taskd-go-")
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, binary: binary, folder: folder, http: freePort(t), address: freePort(t)}
	if err := os.WriteFile(filepath.Join(folder, "taskd.toml"), []byte(strings.ReplaceAll(config, "FOLDER", folder)), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.end(syscall.SIGTERM)
		if !t.Failed() {
			_ = os.RemoveAll(folder)
		}
	})
	return p
}

func freePort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

func (p *process) start() *process {
	p.t.Helper()
	log, err := os.OpenFile(filepath.Join(p.folder, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	p.command = exec.Command(p.binary, "--pipelines", "all", "--config", filepath.Join(p.folder, "taskd.toml"),
		"--data-dir", filepath.Join(p.folder, "data"), "--http-listen", p.http, "--grpc-listen", p.address)
	p.command.Stdout = log
	p.command.Stderr = log
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "TASKD_") {
			p.command.Env = append(p.command.Env, variable)
		}
	}
	if err := p.command.Start(); err != nil {
		p.t.Fatal(err)
	}
	untrusting := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	until(p.t, "taskd is ready; its log is in "+p.folder, func() bool {
		for _, scheme := range []string{"http", "https"} {
			answer, err := untrusting.Get(scheme + "://" + p.http + "/readyz")
			if err == nil {
				answer.Body.Close()
				if answer.StatusCode == http.StatusOK {
					return true
				}
			}
		}
		return false
	})
	return p
}

func (p *process) end(signal syscall.Signal) {
	if p.command == nil {
		return
	}
	_ = p.command.Process.Signal(signal)
	_ = p.command.Wait()
	p.command = nil
}

func (p *process) run(arguments ...string) string {
	p.t.Helper()
	command := exec.Command(p.binary, append(arguments, "--data-dir", filepath.Join(p.folder, "data"))...)
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "TASKD_") {
			command.Env = append(command.Env, variable)
		}
	}
	var said bytes.Buffer
	command.Stderr = &said
	out, err := command.Output()
	if err != nil {
		p.t.Fatalf("%v: %v\n%s", arguments, err, &said)
	}
	return strings.TrimSpace(string(out))
}

func (p *process) client(options taskd.ClientOptions) *taskd.Client {
	p.t.Helper()
	options.Addresses = []string{p.address}
	client, err := taskd.NewClient(options)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestCrawlIsDoneOnceByEachWorker(t *testing.T) {
	taskdProcess := newProcess(t, "").start()
	client := taskdProcess.client(taskd.ClientOptions{})
	for _, poll := range []bool{false, true} {
		queue := fmt.Sprintf("crawl-%t", poll)
		var mu sync.Mutex
		runs := map[string]int{}
		work := func(ctx context.Context, task *taskd.Task) (any, error) {
			mu.Lock()
			runs[task.Worker+" "+task.Key]++
			mu.Unlock()
			if task.Priority != taskd.Medium || task.Replicas < 1 {
				return nil, taskd.Reject(fmt.Errorf("priority %v, replicas %d", task.Priority, task.Replicas))
			}
			return crawl(ctx, task)
		}
		stops := []func() error{}
		for _, name := range []string{"go-1", "go-2"} {
			_, stop := start(t, client, taskd.WorkerOptions{Name: name, Queues: []string{queue}, Poll: poll}, work)
			stops = append(stops, stop)
		}
		root := taskd.NewTask{Queue: queue, Key: "root", Payload: map[string]int{"depth": 4}, Replicas: 2}
		if _, err := client.InsertAndWait(context.Background(), root, time.Minute); err != nil {
			t.Fatal(err)
		}
		until(t, "31 tasks are completed", func() bool {
			count := 0
			filter := &taskdpb.TaskFilter{Queue: queue, Statuses: []taskdpb.TaskStatus{completed}}
			for _, err := range client.List(context.Background(), filter) {
				if err != nil {
					t.Fatal(err)
				}
				count++
			}
			return count == 31
		})
		for _, stop := range stops {
			if err := stop(); err != nil {
				t.Fatal(err)
			}
		}
		// The discovered ones need one worker each.
		if len(runs) != 32 || runs["go-1 root"] != 1 || runs["go-2 root"] != 1 {
			t.Errorf("%s: %v", queue, runs)
		}
		for run, count := range runs {
			if count != 1 {
				t.Errorf("%s: %s ran %d times", queue, run, count)
			}
		}
	}
}

func TestWorkSurvivesKillsOfTaskd(t *testing.T) {
	taskdProcess := newProcess(t, "").start()
	client := taskdProcess.client(taskd.ClientOptions{})
	var log journal
	options := taskd.WorkerOptions{Name: "go-1", Queues: []string{"q"}, Lease: 5 * time.Second, Concurrency: 20, Prefetch: 20, Logger: log.logger()}
	worker, stop := start(t, client, options, func(ctx context.Context, task *taskd.Task) (any, error) {
		select {
		case <-time.After(5 * time.Millisecond):
			return task.Key, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
	var tasks []taskd.NewTask
	for n := range 2000 {
		tasks = append(tasks, taskd.NewTask{Queue: "q", Key: fmt.Sprint(n)})
	}
	ids := map[string]bool{}
	for _, one := range insert(t, client, tasks...) {
		ids[one.ID] = true
	}
	if len(ids) != len(tasks) {
		t.Fatalf("%d ids", len(ids))
	}
	for n := range 2 {
		until(t, "some are done", func() bool { return worker.Stats().Completed > 300*(n+1) })
		taskdProcess.end(syscall.SIGKILL)
		taskdProcess.start()
	}
	until(t, "all are completed", func() bool {
		count := 0
		filter := &taskdpb.TaskFilter{Queue: "q", Statuses: []taskdpb.TaskStatus{completed}}
		for _, err := range client.List(context.Background(), filter) {
			if err != nil {
				return false
			}
			count++
		}
		return count == len(tasks)
	})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(log.String(), "taskd is away, trying again") || !strings.Contains(log.String(), "taskd is back") {
		t.Errorf("the log: %s", log.String())
	}
	if stats := worker.Stats(); stats.Rejected != 0 || stats.Running != 0 {
		t.Errorf("%+v", stats)
	}
}

func TestTaskdReadsTheWeightsOfQueues(t *testing.T) {
	client := newProcess(t, "").start().client(taskd.ClientOptions{})
	for _, polls := range []bool{false, true} {
		weights := map[string]uint32{"other": 3}
		weighed := taskd.WorkerOptions{Name: "go-1", Queues: []string{"q"}, Weights: weights, Poll: polls}
		err := taskd.NewWorker(client, weighed, crawl).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), `weights names "other"`) {
			t.Errorf("poll=%t: %v", polls, err)
		}
	}
}

func TestThrottledWorkerTakesNothing(t *testing.T) {
	const pause = 1500 * time.Millisecond
	client := newProcess(t, "[queues.default]\nmax_attempts = 1\n").start().client(taskd.ClientOptions{})
	for _, polls := range []bool{false, true} {
		queue := fmt.Sprintf("throttled-%t", polls)
		var mu sync.Mutex
		var began []time.Time
		options := taskd.WorkerOptions{Name: "go-1", Queues: []string{queue}, Concurrency: 1, Prefetch: 1, Poll: polls}
		worker, stop := start(t, client, options, func(_ context.Context, _ *taskd.Task) (any, error) {
			mu.Lock()
			defer mu.Unlock()
			began = append(began, time.Now())
			if len(began) == 1 {
				return nil, taskd.Throttle(pause, "the service is away")
			}
			return "done", nil
		})
		for _, key := range []string{"a", "b", "c"} {
			insert(t, client, taskd.NewTask{Queue: queue, Key: key})
		}
		until(t, "all are completed", func() bool { return worker.Stats().Completed == 3 })
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if wait := began[1].Sub(began[0]); len(began) != 4 || wait < pause {
			t.Errorf("%d attempts, the second one %s after the first", len(began), wait)
		}
	}
}

func TestHandlersHoldAndSlowTheirLimitKey(t *testing.T) {
	config := "[queues.limited]\nlimit_by = \"given\"\nlimit_at_a_time = 1\nmax_attempts = 1\n"
	client := newProcess(t, config).start().client(taskd.ClientOptions{})
	type visit struct {
		name  string
		began time.Time
		ended time.Time
	}
	var mu sync.Mutex
	var visits []visit
	var log journal
	options := taskd.WorkerOptions{Name: "go-1", Queues: []string{"limited", "plain"}, Logger: log.logger()}
	worker, stop := start(t, client, options, func(_ context.Context, task *taskd.Task) (any, error) {
		began := time.Now()
		mu.Lock()
		defer mu.Unlock()
		before := len(visits)
		if task.Queue == "limited" {
			defer func() { visits = append(visits, visit{task.LimitKey + " " + task.Key, began, time.Now()}) }()
		}
		switch {
		case task.Key == "root":
			task.Discover(taskd.NewTask{Key: "a", LimitKey: "site"}, taskd.NewTask{Key: "b", LimitKey: "site"})
			task.Hold(time.Second)
		case task.Key == "a" && before == 1:
			task.Hold(1500 * time.Millisecond)
			return nil, taskd.PutOff(0, "the site answers 429")
		case task.Key == "a":
			task.Pace(time.Second)
		case task.Key == "plain":
			task.Hold(time.Hour)
		}
		return "done", nil
	})
	insert(t, client, taskd.NewTask{Queue: "plain", Key: "plain"}, taskd.NewTask{Queue: "limited", Key: "root", LimitKey: "site"})
	until(t, "all are completed", func() bool { return worker.Stats().Completed == 4 })
	started := map[string]time.Time{}
	until(t, "the attempts are stored", func() bool {
		for listed, err := range client.List(context.Background(), &taskdpb.TaskFilter{Queue: "limited"}) {
			if err != nil {
				t.Fatal(err)
			}
			task, err := client.Get(context.Background(), listed.Id)
			if err != nil {
				t.Fatal(err)
			}
			for _, attempt := range task.History {
				started[string(task.Key)] = attempt.From.AsTime()
			}
		}
		return len(started) == 3
	})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, one := range visits {
		names = append(names, one.name)
	}
	if got := strings.Join(names, ", "); got != "site root, site a, site a, site b" {
		t.Fatalf("the visits: %s", got)
	}
	if wait := visits[1].began.Sub(visits[0].ended); wait < time.Second {
		t.Errorf("a began %s after a hold of a second", wait)
	}
	if wait := visits[2].began.Sub(visits[1].ended); wait < 1500*time.Millisecond {
		t.Errorf("a began %s after a hold of 1.5 s", wait)
	}
	if apart := started["b"].Sub(started["a"]); apart < time.Second {
		t.Errorf("a and b began %s apart, at a pace of a second", apart)
	}
	if stats := worker.Stats(); stats.Rejected != 0 || stats.GivenBack != 1 {
		t.Errorf("%+v", stats)
	}
	if !strings.Contains(log.String(), "the task has no limit key, so Hold and Pace do nothing") {
		t.Errorf("the log: %s", log.String())
	}
}

func TestWorkerTakesFewItemsIfTaskdDoes(t *testing.T) {
	client := newProcess(t, "max_items = 5\n").start().client(taskd.ClientOptions{})
	const atOnce = 60
	const waves = 8
	for _, poll := range []bool{false, true} {
		queue := fmt.Sprintf("poll-%t", poll)
		goOn := make(chan struct{})
		var log journal
		options := taskd.WorkerOptions{Queues: []string{queue}, Poll: poll, Concurrency: atOnce, Lease: 3 * time.Second, Logger: log.logger()}
		worker, stop := start(t, client, options, func(ctx context.Context, _ *taskd.Task) (any, error) {
			select {
			case <-goOn:
			case <-ctx.Done():
			}
			return nil, nil
		})
		for wave := range waves {
			var tasks []taskd.NewTask
			for n := range atOnce {
				tasks = append(tasks, taskd.NewTask{Queue: queue, Key: fmt.Sprint(wave, "-", n)})
			}
			insert(t, client, tasks...)
			until(t, "all of a wave run", func() bool { return worker.Stats().Running == atOnce })
			for range atOnce {
				goOn <- struct{}{}
			}
			until(t, "a wave is completed", func() bool { return worker.Stats().Completed == (wave+1)*atOnce })
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if stats := worker.Stats(); stats.Lost != 0 || stats.Rejected != 0 {
			t.Errorf("%s: %+v", queue, stats)
		}
		// Each refusal halves what a frame has, from at most 120 items.
		if count := strings.Count(log.String(), "taskd refused a frame"); count > 5 {
			t.Errorf("%s: taskd refused %d frames: %s", queue, count, log.String())
		}
	}
}

func TestLeasesAreExtendedAndCancelsEndHandlers(t *testing.T) {
	client := newProcess(t, "").start().client(taskd.ClientOptions{})
	ctx := context.Background()
	goOn := make(chan struct{})
	causes := make(chan error, 1)
	options := taskd.WorkerOptions{Queues: []string{"q"}, Lease: 600 * time.Millisecond}
	_, stop := start(t, client, options, func(ctx context.Context, task *taskd.Task) (any, error) {
		if task.Key == "long" {
			<-goOn
			return "ok", nil
		}
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return nil, ctx.Err()
	})
	inserted := insert(t, client, taskd.NewTask{Queue: "q", Key: "long"}, taskd.NewTask{Queue: "q", Key: "cancelled"})
	assigned := func(id string) bool {
		explained, err := client.Explain(ctx, &taskdpb.ExplainTaskRequest{Id: id})
		return err == nil && len(explained.Leases) == 1
	}
	until(t, "both are assigned", func() bool { return assigned(inserted[0].ID) && assigned(inserted[1].ID) })
	results, err := client.Cancel(ctx, inserted[1].ID)
	if err != nil || results[0].Status != taskdpb.ItemStatus_ITEM_STATUS_OK {
		t.Fatal(results, err)
	}
	if cause := <-causes; !errors.Is(cause, taskd.ErrLeaseLost) {
		t.Errorf("the cause is %v", cause)
	}
	// Longer than three leases.
	time.Sleep(2 * time.Second)
	close(goOn)
	task, err := client.Wait(ctx, inserted[0].ID)
	if err != nil || task.Status != completed || task.Attempts != 0 {
		t.Errorf("%v, %v", task, err)
	}
	if task, err = client.Wait(ctx, inserted[1].ID); err != nil || task.Status != taskdpb.TaskStatus_TASK_STATUS_CANCELLED {
		t.Errorf("%v, %v", task, err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

func TestRestartTakesOverAndStopGivesBack(t *testing.T) {
	client := newProcess(t, "").start().client(taskd.ClientOptions{})
	ctx := context.Background()
	insert(t, client, taskd.NewTask{Queue: "q", Key: "a"}, taskd.NewTask{Queue: "q", Key: "b"}, taskd.NewTask{Queue: "q", Key: "c"})
	block := func(ctx context.Context, _ *taskd.Task) (any, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	old, _ := start(t, client, taskd.WorkerOptions{Name: "go-1", Queues: []string{"q"}, Concurrency: 1, Prefetch: 2}, block)
	until(t, "it has all", func() bool { return old.Stats().Taken == 3 })
	options := taskd.WorkerOptions{Name: "go-1", Queues: []string{"q"}, Takeover: true, Concurrency: 1, Prefetch: 2}
	next, _ := start(t, client, options, block)
	until(t, "the next one has two", func() bool { return next.Stats().Taken >= 2 })
	next.Stop()
	next.Stop()
	until(t, "it has given back one", func() bool { return next.Stats().GivenBack >= 1 })
	old.Stop()
	old.Stop()
	_, stop := start(t, client, taskd.WorkerOptions{Name: "go-2", Queues: []string{"q"}}, crawl)
	until(t, "all are done", func() bool {
		books, err := taskdpb.NewOperatorClient(client.Conn()).GetBooks(ctx, &taskdpb.GetBooksRequest{Queue: "q"})
		return err == nil && len(books.Queues) == 1 && books.Queues[0].Completed == 3
	})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

func TestPublish(t *testing.T) {
	ctx := t.Context()
	client := newProcess(t, "").start().client(taskd.ClientOptions{})
	topics := taskdpb.NewTopicsClient(client.Conn())
	records := []taskd.Record{
		{Value: map[string]int{"n": 1}, Key: "a", Attributes: map[string][]string{"lang": {"en", "de"}}, ID: "1"},
		{Value: []byte{0xff}, Key: "a"},
		{Key: strings.Repeat("k", 4097)},
	}
	if _, err := client.Publish(ctx, "orders", records); !taskd.IsNotFound(err) {
		t.Fatal(err)
	}
	if _, err := topics.PutTopic(ctx, &taskdpb.PutTopicRequest{Topic: "orders"}); err != nil {
		t.Fatal(err)
	}
	published, err := client.Publish(ctx, "orders", records)
	if err != nil || len(published) != 3 {
		t.Fatal(published, err)
	}
	if published[0].Status != taskd.Stored || published[1].Status != taskd.Stored || published[2].Status != taskd.RecordRejected {
		t.Errorf("published: %v", published)
	}
	page, err := topics.ReadTopic(ctx, &taskdpb.ReadTopicRequest{Topic: "orders"})
	if err != nil || len(page.Records) != 2 {
		t.Fatal(page, err)
	}
	first, second := page.Records[0], page.Records[1]
	if string(first.Value) != `{"n":1}` || len(first.Attributes) != 2 || first.Id != "1" || first.Offset != published[0].Offset {
		t.Errorf("read: %v", first)
	}
	if !bytes.Equal(second.Value, []byte{0xff}) {
		t.Errorf("read: %v", second)
	}
}

func TestTokensAndCertificates(t *testing.T) {
	taskdProcess := newProcess(t, "auth = \"tokens\"\ntls_cert_file = \"FOLDER/cert.pem\"\ntls_key_file = \"FOLDER/key.pem\"\n")
	certificate := makeCertificate(t, taskdProcess.folder)
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(certificate)
	secure := &tls.Config{RootCAs: trusted}
	taskdProcess.start()
	words := strings.Fields(taskdProcess.run("token", "create", "all", "--roles", "insert,read,work"))

	client := taskdProcess.client(taskd.ClientOptions{Token: words[len(words)-1], TLS: secure})
	until(t, "taskd knows the token", func() bool {
		_, err := client.Get(context.Background(), "01a226ec-78b4-7000-9977-149d8f513d81")
		return taskd.IsNotFound(err)
	})
	_, stop := start(t, client, taskd.WorkerOptions{Queues: []string{"q"}}, func(context.Context, *taskd.Task) (any, error) {
		return "ok", nil
	})
	inserted, err := client.InsertAndWait(context.Background(), taskd.NewTask{Queue: "q", Key: "a"}, time.Minute)
	if err != nil || inserted.IsOpen() || string(inserted.Results[0].Result) != "ok" {
		t.Errorf("%+v, %v", inserted, err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	stranger := taskdProcess.client(taskd.ClientOptions{Token: "taskd_nobody", TLS: secure})
	for _, poll := range []bool{false, true} {
		err := taskd.NewWorker(stranger, taskd.WorkerOptions{Queues: []string{"q"}, Poll: poll}, crawl).Run(context.Background())
		var refused *taskd.RefusedError
		if !errors.As(err, &refused) || refused.Code != codes.Unauthenticated {
			t.Errorf("poll=%t: %v", poll, err)
		}
	}
}

func makeCertificate(t *testing.T, folder string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "taskd"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		IsCA:         true,
		KeyUsage:     x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,

		BasicConstraintsValid: true,
	}
	written, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: written})
	files := map[string][]byte{
		"cert.pem": certificate,
		"key.pem":  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(folder, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certificate
}
