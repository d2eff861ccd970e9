package taskd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/taskd/taskd/clients/go/taskdpb"
)

const (
	// openWithin is how long taskd may take to open a stream, the connection included.
	openWithin = 10 * time.Second
	// The bounds of a session's time-out that taskd takes.
	shortestTimeout = 2 * time.Second
	longestTimeout  = 10 * time.Minute
	// mostOpen is how many frames may wait for answers. taskd reads no more after 16.
	mostOpen = 8
	// The items of a frame, and their bytes; a single parcel may have more.
	mostItems      = 1000
	mostFrameBytes = 4 << 20
	// wantAgain is when to want again what taskd did not grant.
	wantAgain = 500 * time.Millisecond
	// goodStream is how long a stream must live to be no failure.
	goodStream = 2 * time.Second
)

var (
	errNoStream = errors.New("no stream is open")
	errSilent   = errors.New("nothing came")
)

// parcel holds reports of one kind that go in one frame.
type parcel struct {
	completions []*taskdpb.Completion
	rejections  []*taskdpb.Rejection
	extensions  []*taskdpb.Extension
	answer      chan parcelAnswer
	isOver      bool
}

type parcelAnswer struct {
	results []*taskdpb.ItemResult
	err     error
}

func (p *parcel) items() int { return len(p.completions) + len(p.rejections) + len(p.extensions) }

func (p *parcel) size() int {
	bytes := 0
	for _, one := range p.completions {
		bytes += proto.Size(one)
	}
	for _, one := range p.rejections {
		bytes += proto.Size(one)
	}
	return bytes
}

// sentFrame is a frame that taskd has not answered.
type sentFrame struct {
	parcels     []*parcel
	want        int
	surrendered bool
	// drains means that it surrendered because the worker stops: no task comes after its answer.
	drains bool
}

// session is the worker's session, on one stream after the other. The lock of the run guards it.
type session struct {
	r     *run
	wakes chan struct{}
	id    string
	// takeover is true until the first stream is open.
	takeover bool
	// isPolling means that a poll may be under way.
	isPolling bool
	// isOpen means that reports go by the stream.
	isOpen bool
	// isOpening means that taskd may send tasks on a stream that it has not answered.
	isOpening bool
	// isConnected lasts from the opening of the stream to its end.
	isConnected bool
	// isLeaving means that taskd ends this stream.
	isLeaving bool
	isClosing bool
	isClosed  bool
	// demand is how many tasks taskd may still send, as its last frame said.
	demand     int
	wantAfter  time.Time
	lastNumber uint64
	sent       map[uint64]*sentFrame
	parcels    []*parcel
	// newlyStarted are the tasks that begin; telling are those whose frame is being sent.
	newlyStarted   []*held
	telling        []*held
	hasSurrendered bool
	isSurrendered  bool
	// mostItems is how many items a frame may have: taskd's setting max_items, as far as it is known.
	mostItems int
	// refusedItems is how many items the largest frame had that the last stream left without an answer.
	refusedItems int
}

func newSession(r *run) *session {
	return &session{
		r:         r,
		wakes:     make(chan struct{}, 1),
		takeover:  r.options.Takeover,
		sent:      map[uint64]*sentFrame{},
		mostItems: mostItems,
	}
}

func (s *session) wake() {
	select {
	case s.wakes <- struct{}{}:
	default:
	}
}

// isDrained tells whether no task is on its way any more. The caller holds the lock.
func (s *session) isDrained() bool {
	return !s.isPolling && !s.isOpening && (!s.isConnected || s.isSurrendered)
}

// started notes that a handler begins, as soon as taskd was told: a task that has not begun costs no attempt when the
// session ends. Without a stream it begins at once, and the next stream tells. The caller holds the lock.
func (s *session) started(one *held) {
	if s.isOpen {
		s.newlyStarted = append(s.newlyStarted, one)
	} else {
		tell([]*held{one})
	}
}

// tell lets handlers begin. The caller holds the lock.
func tell(all []*held) {
	for _, one := range all {
		if !one.isTold {
			one.isTold = true
			close(one.told)
		}
	}
}

// send sends reports, and returns their answers.
func (s *session) send(what *parcel, within time.Duration) ([]*taskdpb.ItemResult, error) {
	what.answer = make(chan parcelAnswer, 1)
	s.r.mu.Lock()
	if !s.isOpen || what.items() > s.mostItems || what.size() > mostFrameBytes {
		s.r.mu.Unlock()
		return nil, errNoStream
	}
	s.parcels = append(s.parcels, what)
	s.wake()
	s.r.mu.Unlock()
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case answer := <-what.answer:
		return answer.results, answer.err
	case <-timer.C:
		s.r.mu.Lock()
		what.isOver = true
		s.r.mu.Unlock()
		return nil, errNoStream
	case <-s.r.calls.Done():
		return nil, errNoStream
	}
}

// close ends the session: what is left in hand goes back.
func (s *session) close() {
	s.r.mu.Lock()
	s.isClosing = true
	s.wake()
	s.r.mu.Unlock()
	s.r.waitFor(closeWithin, func() bool { return !s.isOpening && !s.isConnected })
}

// run holds a stream, one after the other.
func (s *session) run(ctx context.Context) {
	var pauses pauses
	without := 0
	for ctx.Err() == nil {
		s.r.mu.Lock()
		isOver := s.isClosing || s.r.fatal != nil
		s.r.mu.Unlock()
		if isOver {
			return
		}
		chosen := s.r.servers.pick()
		began := time.Now()
		wasOpen, hasMoved, err := s.serve(ctx, chosen)
		if wasOpen {
			without = 0
		}
		if time.Since(began) >= goodStream {
			pauses.reset()
		}
		switch {
		case ctx.Err() != nil:
			return
		case hasMoved:
			// The process stops, and another one goes on with what is in hand.
			s.r.servers.leave(chosen)
			if s.r.servers.count() > 1 {
				continue
			}
		case err == nil:
			return
		case hasCode(err, codes.Unimplemented) && !wasOpen:
			// In a rolling update another process may have streams.
			without++
			s.r.servers.leave(chosen)
			if without >= s.r.servers.count() {
				s.r.log.Info("taskd has no streams; asking by long polls")
				s.r.poll(ctx)
				return
			}
			continue
		case isOfItems(err) && wasOpen:
			// The reports of the stream go by calls, which say which of them is wrong.
			s.r.log.Warn("taskd refused a frame, opening another stream: " + err.Error())
			s.refused()
		case isAway(err):
			s.r.servers.leave(chosen)
			s.r.away(err)
		default:
			s.r.fail(err)
			return
		}
		sleep(ctx, pauses.next())
	}
}

// serve holds one stream until its end. hasMoved means that taskd asked to go on elsewhere; no error means that the
// worker closed the session.
func (s *session) serve(ctx context.Context, at server) (wasOpen, hasMoved bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	patience := openWithin
	watchdog := time.AfterFunc(patience, func() { cancel(errSilent) })
	defer watchdog.Stop()
	ended := func(err error) error {
		if errors.Is(context.Cause(ctx), errSilent) {
			// The connection may be dead, and the next stream must not wait for it.
			s.r.servers.abandon(at)
			return &AwayError{Address: at.address, Message: fmt.Sprintf("nothing came for %s", patience)}
		}
		return s.r.servers.callError(ctx, err, at)
	}

	stream, err := taskdpb.NewTasksClient(at.conn).StreamTasks(ctx)
	if err != nil {
		return false, false, ended(err)
	}
	s.r.mu.Lock()
	opening := s.opening()
	s.isOpening = opening.Open.Want > 0
	s.r.mu.Unlock()
	defer s.endOpening()
	// If it cannot be sent, Recv says why.
	_ = stream.Send(opening)
	first, err := stream.Recv()
	if err != nil {
		return false, false, ended(err)
	}
	if first.Opened == nil {
		return false, false, &AwayError{Address: at.address, Message: "the first frame does not say opened"}
	}
	heartbeat := orDefault(first.Opened.Heartbeat, 5*time.Second) * 4 / 5
	// Less than the session's time-out, which taskd counts from the last frame that it heard.
	patience = orDefault(first.Opened.Timeout, 15*time.Second) * 3 / 5
	watchdog.Reset(patience)
	s.r.back(at.address)
	s.r.mu.Lock()
	s.opened(opening, first)
	s.r.mu.Unlock()

	done := make(chan struct{})
	var readError error
	go func() {
		defer close(done)
		frame := first
		for {
			s.hear(frame)
			frame, readError = stream.Recv()
			if readError != nil {
				return
			}
			watchdog.Reset(patience)
		}
	}()
	s.write(stream, heartbeat, done)
	<-done

	s.r.mu.Lock()
	hasMoved = s.isLeaving && !s.isClosing
	isClosed := s.isClosing
	s.broke()
	s.r.mu.Unlock()
	if isClosed || hasMoved {
		return true, hasMoved, nil
	}
	if errors.Is(readError, io.EOF) {
		return true, false, &AwayError{Address: at.address, Message: "it ended the stream"}
	}
	return true, false, ended(readError)
}

// refused makes the next frames smaller, because taskd's setting max_items may be lower.
func (s *session) refused() {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if s.refusedItems > 1 {
		s.mostItems = min(s.mostItems, s.refusedItems/2)
	}
}

func orDefault(said *durationpb.Duration, otherwise time.Duration) time.Duration {
	if said.AsDuration() <= 0 {
		return otherwise
	}
	return said.AsDuration()
}

// endOpening notes that a stream is open, or that it failed.
func (s *session) endOpening() {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if s.isOpening {
		s.isOpening = false
		s.r.notify()
	}
}

// opening is the first frame: it goes on with the session, if there is one, with all that is in hand.
func (s *session) opening() *taskdpb.WorkerFrame {
	open := &taskdpb.OpenSession{
		Worker:        s.r.options.Name,
		Queues:        s.r.options.Queues,
		Weights:       s.r.options.Weights,
		Want:          uint32(s.r.room()),
		Session:       s.id,
		Takeover:      s.takeover,
		TellsStarted:  true,
		Timeout:       durationpb.New(min(max(s.r.options.Lease/2, shortestTimeout), longestTimeout)),
		LeaseDuration: durationpb.New(s.r.options.Lease),
	}
	frame := &taskdpb.WorkerFrame{Open: open}
	for _, one := range s.r.held {
		open.Holding = append(open.Holding, one.leased.Id)
		if one.state == isRunning || one.state == isReported {
			frame.Started = append(frame.Started, one.leased.Id)
		}
	}
	return frame
}

func (s *session) opened(opening *taskdpb.WorkerFrame, first *taskdpb.TaskdFrame) {
	s.id = first.Opened.Session
	s.takeover = false
	s.isOpening = false
	s.isOpen = true
	s.isConnected = true
	s.demand = int(first.Demand)
	// No task comes if none is wanted.
	s.isSurrendered = s.r.isStopping && first.Demand == 0
	s.hasSurrendered = s.isSurrendered
	if first.Opened.Granted < opening.Open.Want {
		s.wantAfter = time.Now().Add(wantAgain)
	}
	told := map[string]bool{}
	for _, id := range opening.Started {
		told[id] = true
	}
	// Those that began since the first frame.
	for _, one := range s.r.held {
		if one.state == isRunning && !told[one.leased.Id] {
			s.newlyStarted = append(s.newlyStarted, one)
		}
	}
	if !first.Opened.Resumed && len(s.r.held) > 0 {
		// Extensions bring what is in hand into the new session.
		select {
		case s.r.extendNow <- struct{}{}:
		default:
		}
	}
	s.r.notify()
}

// broke notes the end of the stream. Its reports go by calls, or by the next one.
func (s *session) broke() {
	s.refusedItems = 0
	for _, frame := range s.sent {
		items := 0
		for _, one := range frame.parcels {
			items += one.items()
		}
		s.refusedItems = max(s.refusedItems, items)
		s.parcels = append(s.parcels, frame.parcels...)
	}
	for _, one := range s.parcels {
		one.answer <- parcelAnswer{err: errNoStream}
	}
	s.sent = map[uint64]*sentFrame{}
	s.parcels = nil
	tell(s.telling)
	tell(s.newlyStarted)
	s.telling = nil
	s.newlyStarted = nil
	s.demand = 0
	s.wantAfter = time.Time{}
	s.isOpen = false
	s.isConnected = false
	s.isLeaving = false
	s.hasSurrendered = false
	s.isSurrendered = false
	s.r.notify()
}

// hear takes a frame of taskd.
func (s *session) hear(frame *taskdpb.TaskdFrame) {
	s.r.mu.Lock()
	s.demand = int(frame.Demand)
	if frame.Answer != nil {
		s.answered(frame.Answer)
	}
	if frame.Closing != nil {
		s.isLeaving = true
		s.wake()
	}
	s.r.accept(frame.Tasks)
	s.r.mu.Unlock()
	s.r.loseAll(frame.Ended)
}

func (s *session) answered(answer *taskdpb.FrameAnswer) {
	frame := s.sent[answer.Number]
	if frame == nil {
		return
	}
	delete(s.sent, answer.Number)
	if int(answer.Granted) < frame.want {
		s.wantAfter = time.Now().Add(wantAgain)
	} else if len(frame.parcels) > 0 {
		// They have made room.
		s.wantAfter = time.Time{}
	}
	for _, one := range frame.parcels {
		switch {
		case one.completions != nil:
			one.answer <- parcelAnswer{results: answer.Completions}
		case one.rejections != nil:
			one.answer <- parcelAnswer{results: answer.Rejections}
		default:
			one.answer <- parcelAnswer{results: answer.Extensions}
		}
	}
	if frame.drains {
		s.isSurrendered = true
	}
	s.r.notify()
}

// frameStream is the sending side of a stream.
type frameStream interface {
	Send(*taskdpb.WorkerFrame) error
	CloseSend() error
}

// write sends what there is to say until the stream ends.
func (s *session) write(stream frameStream, heartbeat time.Duration, done <-chan struct{}) {
	spoke := time.Now()
	for {
		now := time.Now()
		s.r.mu.Lock()
		frame := s.nextFrame(now)
		isLast := frame == nil && s.isLeaving && !s.isClosing && s.isAnswered()
		if isLast {
			s.isOpen = false
		}
		next := spoke.Add(heartbeat)
		if s.wantAfter.After(now) && s.wantAfter.Before(next) {
			next = s.wantAfter
		}
		s.r.mu.Unlock()
		if isLast {
			_ = stream.CloseSend()
			return
		}
		if frame == nil && now.Sub(spoke) >= heartbeat {
			frame = &taskdpb.WorkerFrame{}
		}
		if frame != nil {
			if stream.Send(frame) != nil {
				// Recv says why.
				return
			}
			spoke = now
			s.r.mu.Lock()
			tell(s.telling)
			s.telling = nil
			s.r.mu.Unlock()
			if frame.Close {
				return
			}
			continue
		}
		timer := time.NewTimer(max(time.Until(next), time.Millisecond))
		select {
		case <-s.wakes:
		case <-timer.C:
		case <-done:
			timer.Stop()
			return
		}
		timer.Stop()
	}
}

func (s *session) isAnswered() bool { return len(s.sent) == 0 && len(s.parcels) == 0 }

// nextFrame is the next thing to say, or nil. The caller holds the lock.
func (s *session) nextFrame(now time.Time) *taskdpb.WorkerFrame {
	if s.isClosing && s.isAnswered() {
		if s.isClosed {
			return nil
		}
		s.isClosed = true
		s.isOpen = false
		return &taskdpb.WorkerFrame{Close: true}
	}
	frame := &taskdpb.WorkerFrame{}
	for _, one := range s.newlyStarted {
		frame.Started = append(frame.Started, one.leased.Id)
	}
	s.telling = s.newlyStarted
	s.newlyStarted = nil
	if len(s.sent) >= mostOpen {
		if len(frame.Started) == 0 {
			return nil
		}
		return frame
	}
	sent := &sentFrame{parcels: s.fill(frame)}
	if !s.isLeaving && !s.isClosing {
		s.ask(frame, now)
	}
	sent.want = int(frame.Want)
	sent.surrendered = frame.Surrender
	sent.drains = frame.Surrender && s.r.isStopping
	if len(sent.parcels) == 0 && frame.Want == 0 && !frame.Surrender {
		if len(frame.Started) == 0 {
			return nil
		}
		return frame
	}
	s.lastNumber++
	frame.Number = s.lastNumber
	s.sent[frame.Number] = sent
	return frame
}

// ask sets the demand of a frame so that taskd sends what the worker has room for.
func (s *session) ask(frame *taskdpb.WorkerFrame, now time.Time) {
	room := s.r.room()
	asked := 0
	isSurrendering := false
	for _, sent := range s.sent {
		asked += sent.want
		isSurrendering = isSurrendering || sent.surrendered
	}
	if s.r.isStopping {
		frame.Surrender = !s.hasSurrendered
		s.hasSurrendered = true
		return
	}
	more := room - s.demand - asked
	switch {
	case s.demand > room && !isSurrendering:
		frame.Surrender = true
		frame.Want = uint32(room)
	case more > 0 && !now.Before(s.wantAfter):
		frame.Want = uint32(more)
	}
}

// fill moves parcels into a frame: one of each kind, because the answers come by kind.
func (s *session) fill(frame *taskdpb.WorkerFrame) []*parcel {
	var moved []*parcel
	items := 0
	bytes := 0
	for len(s.parcels) > 0 {
		one := s.parcels[0]
		if one.isOver {
			s.parcels = s.parcels[1:]
			continue
		}
		isFree := true
		switch {
		case one.completions != nil:
			isFree = frame.Completions == nil
		case one.rejections != nil:
			isFree = frame.Rejections == nil
		default:
			isFree = frame.Extensions == nil
		}
		items += one.items()
		bytes += one.size()
		if !isFree || len(moved) > 0 && (items > s.mostItems || bytes > mostFrameBytes) {
			break
		}
		switch {
		case one.completions != nil:
			frame.Completions = one.completions
		case one.rejections != nil:
			frame.Rejections = one.rejections
		default:
			frame.Extensions = one.extensions
		}
		moved = append(moved, one)
		s.parcels = s.parcels[1:]
	}
	return moved
}
