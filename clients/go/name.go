package taskd

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unicode"

	"github.com/taskd/taskd/clients/go/internal/inmemory"
)

// mostHostName is how many characters of the host's name are the name of a worker.
const mostHostName = 80

// defaultName is that of the variable TASKD_WORKER, or of the host.
func defaultName() string {
	if name := os.Getenv("TASKD_WORKER"); name != "" {
		return name
	}
	host, err := os.Hostname()
	if err != nil || host == "" {
		return "worker"
	}
	name := []rune(strings.ToValidUTF8(host, "-"))
	for n, one := range name {
		if !unicode.IsPrint(one) {
			name[n] = '-'
		}
	}
	return string(name[:min(len(name), mostHostName)])
}

// takeName takes a default name for a worker of these queues, until the returned function is called. It returns an error
// if another worker has it: taskd would take both for one. The kernel gives the name back however the process ends.
// `taskd work` and the packages for Python and TypeScript take names in the same way.
func takeName(name string, queues []string) (func(), error) {
	if runtime.GOOS != "linux" {
		return nil, errors.New("give the worker a name (WorkerOptions.Name): only Linux tells whether another one has the host's")
	}
	var taken []net.Listener
	giveBack := func() {
		for _, one := range taken {
			_ = one.Close()
		}
	}
	queues = slices.Clone(queues)
	slices.Sort(queues)
	for _, queue := range slices.Compact(queues) {
		digest := sha256.Sum256([]byte(name + "\n" + queue))
		// An address in Linux's abstract namespace.
		listener, err := net.Listen("unix", fmt.Sprintf("@taskd-worker/%x", digest[:16]))
		if err == nil {
			taken = append(taken, listener)
			continue
		}
		giveBack()
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("cannot find out whether another worker has the name %s: %w", name, err)
		}
		return nil, fmt.Errorf("a worker %s of queue %s runs on this machine already, and taskd would take both for one: "+
			"give this one a name of its own, as in WorkerOptions{Name: %q} or TASKD_WORKER=%s-2", name, queue, name+"-2", name)
	}
	return giveBack, nil
}

// isInMemory tells whether the client calls only servers of package taskdtest, each of which has workers of its own.
func (c *Client) isInMemory() bool {
	for _, address := range c.servers.addresses {
		if !inmemory.Has(address) {
			return false
		}
	}
	return true
}
