package taskd

import (
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

const (
	// largestAnswer bounds the bytes of an answer: a single task has up to 8 MiB.
	largestAnswer = 16 << 20
	connectWithin = 5 * time.Second
	// callTimeout is how long a call may take, apart from the time for which it asked taskd to wait.
	callTimeout = 30 * time.Second
	// pingEvery and pingTimeout find a connection that is dead while calls or streams use it.
	pingEvery    = 20 * time.Second
	pingTimeout  = 10 * time.Second
	shortestWait = 50 * time.Millisecond
	longestWait  = 2 * time.Second
)

// servers holds the connections to the processes of an installation. Callers go to one of them until it is away.
type servers struct {
	options []grpc.DialOption

	mu        sync.Mutex
	addresses []string
	secure    []bool
	conns     []*grpc.ClientConn
	isClosed  bool
	at        int
	plain     credentials.TransportCredentials
	tls       credentials.TransportCredentials
}

// server is the choice of a process for one call.
type server struct {
	conn    *grpc.ClientConn
	address string
	place   int
}

func newServers(addresses []string, token string, config *tls.Config) (*servers, error) {
	if len(addresses) == 0 {
		addresses = []string{DefaultAddress}
	}
	s := &servers{plain: insecure.NewCredentials(), tls: credentials.NewTLS(config)}
	s.options = []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(largestAnswer)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: longestWait},
			MinConnectTimeout: connectWithin,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingEvery, Timeout: pingTimeout}),
	}
	if token = strings.TrimSpace(token); token != "" {
		if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
			return nil, fmt.Errorf("the token is not one of taskd: it has spaces or special characters")
		}
		s.options = append(s.options, grpc.WithPerRPCCredentials(bearer(token)))
	}
	for _, address := range addresses {
		target, isSecure, err := readAddress(address, config != nil)
		if err != nil {
			return nil, err
		}
		conn, err := s.connect(target, isSecure)
		if err != nil {
			return nil, fmt.Errorf("address %q: %w", address, err)
		}
		s.addresses = append(s.addresses, target)
		s.secure = append(s.secure, isSecure)
		s.conns = append(s.conns, conn)
	}
	return s, nil
}

// readAddress takes host:port, http://host:port and https://host:port.
func readAddress(address string, isSecure bool) (string, bool, error) {
	target := strings.TrimSpace(address)
	if strings.Contains(target, "://") {
		parsed, err := url.Parse(target)
		if err != nil {
			return "", false, fmt.Errorf("address %q: %w", address, err)
		}
		if parsed.Scheme != "http" && parsed.Scheme != "https" {
			return "", false, fmt.Errorf("address %q: write host:port, http://host:port or https://host:port", address)
		}
		if strings.Trim(parsed.Path, "/") != "" {
			return "", false, fmt.Errorf("address %q: gRPC has no path; leave out %q", address, parsed.Path)
		}
		isSecure = parsed.Scheme == "https"
		target = parsed.Host
	}
	if !strings.Contains(target, ":") {
		return "", false, fmt.Errorf("address %q: the port of taskd's gRPC is missing; it is 7601 by default", address)
	}
	return target, isSecure, nil
}

func (s *servers) connect(target string, isSecure bool) (*grpc.ClientConn, error) {
	transport := s.plain
	if isSecure {
		transport = s.tls
	}
	options := append([]grpc.DialOption{grpc.WithTransportCredentials(transport)}, s.options...)
	return grpc.NewClient(target, options...)
}

func (s *servers) pick() server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return server{conn: s.conns[s.at], address: s.addresses[s.at], place: s.at}
}

// leave makes the next call go to the next process, unless another caller has left this one already.
func (s *servers) leave(from server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == from.place {
		s.at = (s.at + 1) % len(s.conns)
	}
}

// abandon replaces a connection that may be dead, so that the next call does not wait for it.
func (s *servers) abandon(from server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isClosed || s.conns[from.place] != from.conn {
		return
	}
	conn, err := s.connect(s.addresses[from.place], s.secure[from.place])
	if err != nil {
		return
	}
	s.conns[from.place] = conn
	from.conn.Close()
}

func (s *servers) count() int { return len(s.addresses) }

func (s *servers) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isClosed {
		return nil
	}
	s.isClosed = true
	var first error
	for _, conn := range s.conns {
		if err := conn.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// callError sorts the error of a call to a server. Those of a closed client are final.
func (s *servers) callError(ctx context.Context, err error, at server) error {
	err = callError(ctx, err, at.address)
	if !isAway(err) {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isClosed {
		return ErrClosed
	}
	return err
}

// once makes one call, which may take callTimeout and this much longer, or less if it is negative.
func (s *servers) once(ctx context.Context, longer time.Duration, call func(context.Context, *grpc.ClientConn) error) error {
	chosen := s.pick()
	limited, cancel := context.WithTimeout(ctx, callTimeout+longer)
	defer cancel()
	err := s.callError(ctx, call(limited, chosen.conn), chosen)
	if isAway(err) {
		if limited.Err() != nil {
			s.abandon(chosen)
		}
		s.leave(chosen)
	}
	return err
}

// pauses are the waits between tries.
type pauses struct{ last time.Duration }

func (p *pauses) next() time.Duration {
	p.last = min(max(2*p.last, shortestWait), longestWait)
	return p.last/2 + rand.N(p.last/2+1)
}

func (p *pauses) reset() { p.last = 0 }

// sleep returns false if the context ends first.
func sleep(ctx context.Context, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// bearer is an access token.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity is false because a taskd on the same machine needs no TLS.
func (b bearer) RequireTransportSecurity() bool { return false }
