package taskd

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// These are the causes of the end of a handler's context, for [context.Cause].
var (
	// ErrLeaseLost means that nobody waits for the task's report any more: it was cancelled, its lease ended, or others
	// have completed it.
	ErrLeaseLost = errors.New("the lease is lost")
	// ErrTimeLimit means that the handler took longer than [WorkerOptions.TimeLimit].
	ErrTimeLimit = errors.New("the handler took too long")
	// ErrStopped means that the worker stops, and does not wait for the handler any longer.
	ErrStopped = errors.New("the worker stops")
)

// ErrClosed is the error of calls after [Client.Close].
var ErrClosed = errors.New("the client is closed")

// RefusedError is the error of a call that taskd refused. It would refuse the same call again.
type RefusedError struct {
	Code    codes.Code
	Message string
}

func (e *RefusedError) Error() string { return e.Message }

// AwayError is the error of a call that taskd did not answer, or asked to try later.
type AwayError struct {
	// Address is that of the process that was asked last.
	Address string
	Message string
	// isNotGRPC means that something else than gRPC answers there.
	isNotGRPC bool
}

func (e *AwayError) Error() string {
	return fmt.Sprintf("taskd at %s: %s", e.Address, e.Message)
}

// RejectedError is the error of an insert whose task is invalid.
type RejectedError struct {
	Queue  string
	Key    string
	Reason string
}

func (e *RejectedError) Error() string {
	return fmt.Sprintf("task %q of queue %q is rejected: %s", e.Key, e.Queue, e.Reason)
}

// callError sorts the error of a call. The end of the caller's own context stays what it is.
func callError(ctx context.Context, err error, address string) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	said := status.Convert(err)
	switch said.Code() {
	case codes.InvalidArgument, codes.Unimplemented, codes.OutOfRange, codes.NotFound,
		codes.PermissionDenied, codes.Unauthenticated:
		return &RefusedError{Code: said.Code(), Message: said.Message()}
	default:
		// A connection that breaks shows as one of several codes.
		away := &AwayError{Address: address, Message: said.Message()}
		if isNotGRPC(said.Message()) {
			away.isNotGRPC = true
			away.Message = "it does not answer as gRPC: taskd's gRPC port is 7601 by default, 7600 is HTTP; " +
				"if it has TLS, write https:// before the address"
		}
		return away
	}
}

// isNotGRPC tells whether the error of a connection is that of a server that takes connections and ends those of gRPC, or
// answers in another protocol. A reset may also come from a taskd that is killed.
func isNotGRPC(said string) bool {
	_, why, isPreface := strings.Cut(said, "error reading server preface: ")
	if !isPreface {
		return false
	}
	return strings.HasPrefix(why, "EOF") || strings.HasPrefix(why, "unexpected EOF") || strings.HasPrefix(why, "http2: ")
}

func isAway(err error) bool {
	var away *AwayError
	return errors.As(err, &away)
}

func hasCode(err error, wanted ...codes.Code) bool {
	var refused *RefusedError
	if !errors.As(err, &refused) {
		return false
	}
	for _, code := range wanted {
		if refused.Code == code {
			return true
		}
	}
	return false
}

// isOfItems tells whether the items of the call are the reason for its failure, not its caller.
func isOfItems(err error) bool {
	return hasCode(err, codes.InvalidArgument, codes.OutOfRange)
}
