package taskd

import (
	"errors"
	"log/slog"
	"sync"
	"time"
)

// remindAfter is how often a worker or a client says that taskd is still away.
const remindAfter = 30 * time.Second

// outage says that taskd is away: once, and from time to time.
type outage struct {
	log *slog.Logger

	mu     sync.Mutex
	isAway bool
	said   time.Time
	// saidPort means that it has said that the port is not one of gRPC.
	saidPort bool
}

func (o *outage) away(err error) {
	var away *AwayError
	isPort := errors.As(err, &away) && away.isNotGRPC
	o.mu.Lock()
	isNew := !o.isAway || time.Since(o.said) >= remindAfter || isPort && !o.saidPort
	o.isAway = true
	if isNew {
		o.said = time.Now()
		o.saidPort = o.saidPort || isPort
	}
	o.mu.Unlock()
	if isNew {
		o.log.Warn("taskd is away, trying again: " + err.Error())
	}
}

// over tells whether taskd was away.
func (o *outage) over() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	wasAway := o.isAway
	o.isAway = false
	o.saidPort = false
	return wasAway
}
