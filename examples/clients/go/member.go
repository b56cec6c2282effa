// Member joins a run of Rallypoint and runs one command as its worker, round after round, until the run is over;
// `watch` prints a line for each round of a run. docs/protocol.md has the rules that this program follows.
//
// One goroutine, in (*member).run, owns all state. Each other one waits for one source (the stream, the worker, a signal)
// and sends its events. After each event, `act` compares the running worker with the last update: an update is a complete
// state, so earlier updates do not matter.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	pb "rallypoint/rendezvous/v1"
)

const (
	stopTimeout  = 10 * time.Second       // from SIGTERM to SIGKILL of a worker
	leaveTimeout = 10 * time.Second       // for the service to confirm that the node left
	tick         = 100 * time.Millisecond // interval of the check of all deadlines: one timer instead of five
)

// codec is for Debian's grpc 1.33 and its older protobuf, which crash on messages of today's protoc-gen-go. Leave it out
// with a grpc from 1.34.
type codec struct{}

func (codec) Marshal(v any) ([]byte, error)      { return proto.Marshal(v.(proto.Message)) }
func (codec) Unmarshal(data []byte, v any) error { return proto.Unmarshal(data, v.(proto.Message)) }
func (codec) Name() string                       { return "proto" }

// failure is the end of a stream: the gRPC code, Rallypoint's reason and metadata, the minimum delay of the next attempt.
type failure struct {
	err      error
	code     codes.Code
	reason   string
	metadata map[string]string
	delay    time.Duration
}

func describe(err error) failure {
	s, _ := status.FromError(err)
	f := failure{err: err, code: s.Code()}
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			f.reason, f.metadata = d.Reason, d.Metadata
		case *errdetails.RetryInfo:
			f.delay = time.Duration(d.RetryDelay.GetSeconds())*time.Second + time.Duration(d.RetryDelay.GetNanos())
		}
	}
	return f
}

// retryable is true if a client that is not a member of the run yet may try again.
func (f failure) retryable() bool {
	switch f.code {
	case codes.Unavailable, codes.Canceled, codes.Internal, codes.Unknown, codes.DeadlineExceeded, codes.Aborted,
		codes.ResourceExhausted:
		return true
	}
	return false
}

// route chooses the replica to call next, and when.
type route struct {
	credentials grpc.DialOption
	addresses   []string
	next        int
	owner       string // the replica that a redirect named
	redirects   int    // followed in a row
	bound       time.Duration
	patience    time.Duration // for the first reply
}

func newRoute(o *options) *route {
	return &route{credentials: o.credentials(), addresses: strings.Split(o.rendezvous, ","), bound: 100 * time.Millisecond,
		patience: 4 * time.Second}
}

// open opens a channel of its own for a stream: a failed one would wait for gRPC's back-off before it connects
// again, instead of ours. gRPC's retries are off for the reason in docs/protocol.md.
func (r *route) open() (*grpc.ClientConn, error) {
	address := r.owner
	if address == "" {
		address = r.addresses[r.next%len(r.addresses)]
	}
	ping := keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}
	return grpc.Dial("passthrough:///"+address, r.credentials, grpc.WithKeepaliveParams(ping), grpc.WithDisableRetry())
}

// reached resets the delays to the shortest, after a reply.
func (r *route) reached() {
	r.redirects, r.bound, r.patience = 0, 100*time.Millisecond, 4*time.Second
}

// after returns the delay before the next attempt. The delay is random, so that the nodes of a large run do not come
// back in step.
func (r *route) after(f failure) time.Duration {
	r.owner = f.metadata["owner_address"]
	if r.owner != "" && r.redirects < 4 {
		r.redirects++
		return 0
	}
	r.owner, r.redirects = "", 0
	r.next++
	delay := time.Duration(rand.Int63n(int64(r.bound)))
	if r.bound *= 2; r.bound > time.Second {
		r.bound = time.Second
	}
	if delay < f.delay {
		delay = f.delay
	}
	return delay
}

// silent is called when the first reply did not come in time: the next replica gets more time.
func (r *route) silent() {
	if r.patience *= 2; r.patience > 16*time.Second {
		r.patience = 16 * time.Second
	}
}

// stream is one Join call. Its goroutine sends the first message; all others are sent by the member's.
type stream struct {
	call    pb.RendezvousService_JoinClient
	close   func()
	replyBy time.Time
	leased  bool
}

type message struct {
	stream   *stream
	response *pb.JoinResponse
	err      error
}

// worker is the process of one round, the leader of a process group of its own.
type worker struct {
	command    *exec.Cmd
	assignment *pb.Assignment
	stopping   bool
	killAt     time.Time
}

type workerEnd struct {
	worker *worker
	time   time.Time
	code   int32 // negative: minus the signal
}

type member struct {
	o        *options
	route    *route
	stream   *stream
	openAt   time.Time
	messages chan message
	ends     chan workerEnd

	lease    *pb.Lease
	former   string // the incarnation of the last lease that was lost
	admitted bool   // had a lease at any time
	revision int64
	beatAt   time.Time
	update   *pb.NodeUpdate // nil: none since the join

	worker    *worker
	started   int32 // the last round of which the worker was started
	confirmed int32
	port      net.Listener // reserves the master port until the worker starts

	// To be sent again on a new stream, because the service acknowledges nothing.
	failed    *pb.WorkerFailure
	failedAt  time.Time
	succeeded int32
	last      *pb.JoinRequest // the last of confirm, depart and leave

	leaving bool      // by SIGTERM, or because the exit barrier is over
	leaveBy time.Time // set once `leave` was sent
	over    bool      // the membership is over: end when the worker has ended
	exit    int
}

func (m *member) run() int {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	ticker := time.NewTicker(tick)
	for {
		m.act()
		if m.worker == nil && m.over {
			if m.stream != nil {
				m.stream.close()
			}
			return m.exit
		}
		select {
		case event := <-m.messages:
			if event.stream != m.stream {
				break // a stream that was closed before
			}
			if event.err != nil {
				m.streamEnded(event.err)
			} else {
				m.received(event.response)
			}
		case end := <-m.ends:
			m.workerEnded(end)
		case number := <-signals:
			m.leave(128+int(number.(syscall.Signal)), "got "+number.String())
		case <-ticker.C:
			m.checkDeadlines(time.Now())
		}
	}
}

// act takes the next step that the last update requires; it is harmless to call it at any time.
func (m *member) act() {
	phase, a := m.update.GetPhase(), m.update.GetAssignment()
	final := phase == pb.Phase_PHASE_FINAL && a != nil
	if m.worker != nil {
		if m.over || m.leaving || !final || m.worker.assignment.Round != a.Round {
			m.stopWorker()
		}
		return // act is called again when it has ended
	}
	switch {
	case m.over:
	case m.leaving:
		if m.leaveBy.IsZero() {
			m.leaveBy = time.Now().Add(leaveTimeout)
			m.last = &pb.JoinRequest{Message: &pb.JoinRequest_Leave{Leave: &pb.LeaveRun{Reason: "left in good order"}}}
			m.send(m.last)
		}
		if m.lease == nil { // there is no membership to leave
			m.over = true
		}
	case phase == pb.Phase_PHASE_FROZEN && a != nil && m.confirmed != a.Round:
		m.confirm(a)
	case final && m.started != a.Round && m.confirmed == a.Round:
		m.startWorker(a)
	case m.update.GetExitBarrierPassed() && m.succeeded != 0 && m.succeeded == m.started:
		m.leave(0, "the exit barrier is over")
	}
}

func (m *member) received(response *pb.JoinResponse) {
	m.route.reached()
	if lease := response.Lease; lease != nil {
		m.stream.leased = true
		resumed := m.lease != nil
		m.lease, m.admitted = lease, true
		if lease.Revision > m.revision {
			m.revision = lease.Revision
		}
		log.Printf("lease %d, resumed: %v", lease.Number, resumed)
		m.repeat()
	}
	if response.Draining != nil {
		log.Print("the server is shutting down") // the end of the stream follows, and is handled as any other
	}
	if u := response.Update; u != nil {
		m.update = u
		if u.Revision > m.revision {
			m.revision = u.Revision
		}
		if u.Settling { // the service waits for a message of each node before it decides
			m.heartbeat()
		}
		if u.Phase == pb.Phase_PHASE_CLOSED {
			log.Printf("run closed: %v, %s", u.RunEnd.GetOutcome(), u.RunEnd.GetDetail())
			m.finish(1)
			if u.RunEnd.GetOutcome() == pb.Outcome_OUTCOME_SUCCEEDED {
				m.exit = 0
			}
		}
	}
}

// streamEnded ends or continues the membership. The worker runs on unless the lease is lost.
func (m *member) streamEnded(err error) {
	m.stream.close()
	m.stream = nil
	f := describe(err)
	lost := f.reason == "LEASE_LOST" || f.reason == "LEASE_NOT_PROVEN" || f.reason == "RUN_NOT_FOUND" || f.reason == "REVISION_AHEAD"
	switch {
	case err == io.EOF && !m.leaveBy.IsZero(): // confirmed
		m.over = true
		return
	case f.reason == "RUN_CLOSED":
		log.Print(err)
		m.finish(1)
		if f.metadata["outcome"] == "SUCCEEDED" {
			m.exit = 0
		}
		return
	case f.reason == "SETTINGS_DIFFER", f.reason == "NODE_EVICTED", f.reason == "JOIN_TIMED_OUT", f.metadata["superseded_by"] != "",
		!m.admitted && !f.retryable():
		log.Print(err)
		m.finish(1)
		return
	case lost && m.leaving:
		m.over = true
		return
	case lost && m.admitted:
		// Join again as a newcomer. Without an update `act` stops the worker; numbers of rounds may begin again.
		if m.lease != nil {
			m.former = m.lease.Incarnation
		}
		m.lease, m.update, m.revision = nil, nil, 0
		m.started, m.confirmed, m.succeeded, m.failed, m.last = 0, 0, 0, nil, nil
	}
	delay := m.route.after(f)
	m.openAt = time.Now().Add(delay)
	log.Printf("stream ended (%v); next attempt in %v", err, delay)
}

func (m *member) open() {
	join := m.o.join()
	join.FormerIncarnation = m.former
	first := &pb.JoinRequest{Message: &pb.JoinRequest_Join{Join: join}}
	if m.lease != nil {
		first.Message = &pb.JoinRequest_Resume{Resume: &pb.ResumeRun{RunId: m.o.run, NodeId: m.o.node,
			Lease: m.lease.Number, Token: m.lease.Token, AfterRevision: m.revision}}
	}
	connection, err := m.route.open()
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &stream{close: cancel, replyBy: time.Now().Add(m.route.patience)}
	m.stream = s
	go func() {
		err := m.receive(ctx, connection, s, first)
		cancel()
		connection.Close()
		m.messages <- message{stream: s, err: err}
	}()
}

func (m *member) receive(ctx context.Context, connection *grpc.ClientConn, s *stream, first *pb.JoinRequest) (err error) {
	if s.call, err = pb.NewRendezvousServiceClient(connection).Join(ctx); err != nil {
		return err
	}
	_ = s.call.Send(first) // after an error of Send, Recv returns the reason
	for {
		response, err := s.call.Recv()
		if err != nil {
			return err
		}
		m.messages <- message{stream: s, response: response}
	}
}

// send sends a message if there is a stream. Otherwise `repeat` sends it on the next one.
func (m *member) send(request *pb.JoinRequest) {
	if m.stream != nil && m.stream.leased {
		_ = m.stream.call.Send(request) // an error is also the end of the stream, which arrives as an event
		m.beatAt = time.Now().Add(m.lease.KeepAliveInterval.AsDuration())
	}
}

func (m *member) heartbeat() {
	m.send(&pb.JoinRequest{Message: &pb.JoinRequest_Heartbeat{Heartbeat: &pb.Heartbeat{WatchdogTrouble: "the Go example has no watchdog"}}})
}

// repeat sends again all that the service may not have received, in the order of docs/protocol.md; it accepts duplicates.
func (m *member) repeat() {
	m.heartbeat()
	m.reportFailure()
	if m.succeeded != 0 {
		m.send(&pb.JoinRequest{Message: &pb.JoinRequest_Succeeded{Succeeded: &pb.ReportSuccess{Round: m.succeeded}}})
	}
	if m.last != nil {
		m.send(m.last)
	}
}

func (m *member) reportFailure() {
	if m.failed != nil {
		m.failed.Age = durationpb.New(time.Since(m.failedAt)) // the difference of two monotonic times
		m.send(&pb.JoinRequest{Message: &pb.JoinRequest_WorkerFailed{WorkerFailed: m.failed}})
	}
}

func (m *member) confirm(a *pb.Assignment) {
	m.releasePort()
	listener, err := net.Listen("tcp", ":0")
	if err != nil {
		log.Fatal(err) // without a port there is no round; the node is lost, and another one takes its place
	}
	m.port, m.confirmed = listener, a.Round
	port := int32(listener.Addr().(*net.TCPAddr).Port)
	m.last = &pb.JoinRequest{Message: &pb.JoinRequest_Confirm{Confirm: &pb.ConfirmRound{Round: a.Round, MasterPort: port}}}
	m.send(m.last)
}

func (m *member) releasePort() {
	if m.port != nil {
		m.port.Close()
		m.port = nil
	}
}

func (m *member) startWorker(a *pb.Assignment) {
	m.releasePort() // at the last moment, so that no other program takes it
	m.started, m.succeeded, m.failed = a.Round, 0, nil
	w := &worker{command: exec.Command(m.o.command[0], m.o.command[1:]...), assignment: a}
	w.command.Stdout, w.command.Stderr, w.command.Env = os.Stdout, os.Stderr, m.environment(a)
	// A group of its own: a signal to the group reaches the grandchildren too. If this program is killed, the kernel
	// kills the worker (see LockOSThread in main): a node that joins again must not find it alive.
	w.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := w.command.Start(); err != nil {
		m.fail(a, time.Now(), &pb.WorkerFailure{Message: err.Error(), Kind: pb.FailureKind_FAILURE_KIND_NOT_STARTED})
		return
	}
	log.Printf("round %d: rank %d of %d, pid %d", a.Round, a.GetBaseRank(), a.WorldSize, w.command.Process.Pid)
	m.worker = w
	go func() {
		_ = w.command.Wait() // the state has the exit code
		end := workerEnd{worker: w, time: time.Now(), code: int32(w.command.ProcessState.ExitCode())}
		if state := w.command.ProcessState.Sys().(syscall.WaitStatus); state.Signaled() {
			end.code = -int32(state.Signal())
		}
		// "No worker is alive" includes its children. A zombie that no process reaps is harmless: hence the limit.
		group := -w.command.Process.Pid
		for limit := time.Now().Add(5 * time.Second); syscall.Kill(group, syscall.SIGKILL) == nil && time.Now().Before(limit); {
			time.Sleep(10 * time.Millisecond)
		}
		m.ends <- end
	}()
}

func (m *member) stopWorker() {
	if !m.worker.stopping {
		m.worker.stopping, m.worker.killAt = true, time.Now().Add(stopTimeout)
		_ = syscall.Kill(-m.worker.command.Process.Pid, syscall.SIGTERM)
	}
}

func (m *member) workerEnded(end workerEnd) {
	m.worker = nil
	a, pid := end.worker.assignment, int64(end.worker.command.Process.Pid)
	log.Printf("worker of round %d ended with %d", a.Round, end.code)
	switch {
	case end.worker.stopping: // this program ended it
	case end.code == 0:
		m.succeeded = a.Round
		m.send(&pb.JoinRequest{Message: &pb.JoinRequest_Succeeded{Succeeded: &pb.ReportSuccess{Round: a.Round}}})
	case end.code < 0:
		m.fail(a, end.time, &pb.WorkerFailure{Message: fmt.Sprintf("killed by signal %d", -end.code), Pid: pid,
			Kind: pb.FailureKind_FAILURE_KIND_SIGNAL, ExitCode: &end.code})
	default:
		m.fail(a, end.time, &pb.WorkerFailure{Message: fmt.Sprintf("exited with code %d", end.code), Pid: pid,
			Kind: pb.FailureKind_FAILURE_KIND_EXIT_CODE, ExitCode: &end.code})
	}
}

func (m *member) fail(a *pb.Assignment, at time.Time, report *pb.WorkerFailure) {
	report.Round, report.Rank, report.LocalRank, report.Role = a.Round, a.BaseRank, new(int32), "default"
	report.Host, report.Time = hostName(), timestamppb.New(at)
	m.failed, m.failedAt = report, at
	m.reportFailure()
}

// leave announces the end to the other nodes, which would otherwise detect it when their connections break.
func (m *member) leave(exit int, why string) {
	if m.leaving {
		return
	}
	log.Printf("leaving: %s", why)
	m.leaving, m.exit = true, exit
	if m.worker != nil {
		m.last = &pb.JoinRequest{Message: &pb.JoinRequest_Depart{Depart: &pb.DepartRun{Reason: why}}}
		m.send(m.last)
	}
}

func (m *member) finish(exit int) {
	m.over = true
	if !m.leaving {
		m.exit = exit
	}
}

func (m *member) checkDeadlines(now time.Time) {
	switch {
	case m.stream == nil && !m.over && now.After(m.openAt):
		m.open()
	case m.stream != nil && !m.stream.leased && now.After(m.stream.replyBy):
		m.route.silent()
		m.streamEnded(status.Error(codes.DeadlineExceeded, "no reply"))
	case m.stream != nil && m.stream.leased && now.After(m.beatAt):
		m.heartbeat()
	}
	if m.worker != nil && m.worker.stopping && now.After(m.worker.killAt) {
		_ = syscall.Kill(-m.worker.command.Process.Pid, syscall.SIGKILL)
	}
	if !m.leaveBy.IsZero() && now.After(m.leaveBy) {
		log.Print("the service did not confirm the leave")
		m.over = true
	}
}

func (m *member) environment(a *pb.Assignment) []string {
	var env []string
	for _, pair := range os.Environ() { // without the agent's secrets
		if !strings.HasPrefix(pair, "RALLYPOINT_RUN_SECRET") && !strings.HasPrefix(pair, "RALLYPOINT_TLS_") &&
			!strings.HasPrefix(pair, "RALLYPOINT_TOKEN_") {
			env = append(env, pair)
		}
	}
	number := func(n int32) string { return strconv.Itoa(int(n)) }
	return append(env,
		"RANK="+number(a.GetBaseRank()), "LOCAL_RANK=0", "ROLE_RANK="+number(a.GetBaseRoleRank()), "GROUP_RANK="+number(a.GetGroupRank()),
		"WORLD_SIZE="+number(a.WorldSize), "LOCAL_WORLD_SIZE=1", "ROLE_WORLD_SIZE="+number(a.RoleWorldSize),
		"GROUP_WORLD_SIZE="+number(a.GroupWorldSize), "ROLE_NAME=default",
		"MASTER_ADDR="+a.MasterAddress, "MASTER_PORT="+number(a.MasterPort),
		"TORCHELASTIC_RESTART_COUNT="+number(m.update.GetRestartCount()), "TORCHELASTIC_MAX_RESTARTS="+strconv.Itoa(m.o.maxRestarts),
		"TORCHELASTIC_RUN_ID="+m.o.run, "TORCHELASTIC_USE_AGENT_STORE=False",
		"RALLYPOINT_RUN_ID="+m.o.run, "RALLYPOINT_NODE="+m.o.node, "RALLYPOINT_ROUND="+number(a.Round),
		"RALLYPOINT_FENCING_TOKEN="+strconv.FormatInt(a.FencingToken, 10))
}

// watch prints a line for each round, and returns 0 if the run succeeded.
func watch(o *options) int {
	route, revision, round := newRoute(o), int64(0), int32(0)
	for {
		connection, err := route.open()
		if err != nil {
			log.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		silence := time.AfterFunc(route.patience, func() { route.silent(); cancel() })
		call, err := pb.NewRendezvousServiceClient(connection).WatchRun(ctx, &pb.WatchRunRequest{RunId: o.run, AfterRevision: revision})
		for err == nil {
			var response *pb.WatchRunResponse
			if response, err = call.Recv(); err != nil {
				break
			}
			silence.Stop()
			route.reached()
			run := response.Run
			revision = run.Revision
			// A short round may be missing: the stream has the latest state only. WatchEvents has all.
			if run.Phase == pb.Phase_PHASE_FINAL && run.GetRound() != round {
				round = run.GetRound()
				fmt.Printf("round %d: %d workers, restart %d\n", round, run.GetWorldSize(), run.GetRestartCount())
			}
			if run.Phase == pb.Phase_PHASE_CLOSED {
				fmt.Printf("closed: %v, %s\n", run.RunEnd.GetOutcome(), run.RunEnd.GetDetail())
				if run.RunEnd.GetOutcome() == pb.Outcome_OUTCOME_SUCCEEDED {
					return 0
				}
				return 1
			}
		}
		silence.Stop()
		cancel()
		connection.Close()
		f := describe(err)
		if f.reason == "REVISION_AHEAD" {
			revision = 0 // the service lost its journal, or this is another run of that name
		} else if !f.retryable() && err != io.EOF {
			log.Print(err)
			return 1
		}
		time.Sleep(route.after(f))
	}
}

type options struct {
	rendezvous, run, node, nnodes, address, ca, cert, key string
	maxRestarts                                           int
	lastCall                                              float64
	command                                               []string
}

func (o *options) join() *pb.JoinRun {
	fewest, most, _ := strings.Cut(o.nnodes, ":")
	min, err := strconv.Atoi(fewest)
	max := min
	if most != "" && err == nil {
		max, err = strconv.Atoi(most)
	}
	if err != nil {
		log.Fatalf("--nnodes: %v", err)
	}
	return &pb.JoinRun{RunId: o.run, NodeId: o.node, Address: o.address, LocalWorldSize: 1, Role: "default",
		Settings: &pb.RunSettings{MinNodes: int32(min), MaxNodes: int32(max), MaxRestarts: int32(o.maxRestarts),
			LastCallTimeout: durationpb.New(time.Duration(o.lastCall * float64(time.Second)))}}
}

func (o *options) credentials() grpc.DialOption {
	if o.ca == "" {
		return grpc.WithInsecure()
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	pem, err := os.ReadFile(o.ca)
	if err == nil && !config.RootCAs.AppendCertsFromPEM(pem) {
		err = errors.New("no certificate in " + o.ca)
	}
	if err == nil && o.cert != "" {
		config.Certificates = make([]tls.Certificate, 1)
		config.Certificates[0], err = tls.LoadX509KeyPair(o.cert, o.key)
	}
	if err != nil {
		log.Fatal(err)
	}
	return grpc.WithTransportCredentials(credentials.NewTLS(config))
}

func hostName() string {
	name, _ := os.Hostname()
	return name
}

func main() {
	runtime.LockOSThread() // the kernel sends Pdeathsig when the thread that started the worker ends: keep it
	rand.Seed(time.Now().UnixNano())
	encoding.RegisterCodec(codec{})
	o := &options{}
	if len(os.Args) < 2 {
		log.Fatal("usage: member member|watch FLAGS [-- COMMAND ...]")
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	flags.StringVar(&o.rendezvous, "rendezvous", "127.0.0.1:29400", "HOST:PORT[,HOST:PORT...] of the rendezvous service")
	flags.StringVar(&o.run, "run", "", "name of the run")
	flags.StringVar(&o.node, "node", hostName(), "name of this node, unique in the run")
	flags.StringVar(&o.nnodes, "nnodes", "1", "MIN:MAX nodes")
	flags.StringVar(&o.address, "address", hostName(), "address at which the other nodes reach this one")
	flags.IntVar(&o.maxRestarts, "max-restarts", 0, "restarts of failed workers, over the whole run")
	flags.Float64Var(&o.lastCall, "last-call-timeout", 30, "seconds that a round waits for more than MIN nodes")
	flags.StringVar(&o.ca, "tls-ca", "", "file of the certificate authority; without it the connection is plaintext")
	flags.StringVar(&o.cert, "tls-cert", "", "file of this client's certificate")
	flags.StringVar(&o.key, "tls-key", "", "file of its key")
	_ = flags.Parse(os.Args[2:]) // ends the program on an error
	o.command = flags.Args()
	log.SetPrefix(o.node + ": ")
	switch {
	case os.Args[1] == "watch":
		os.Exit(watch(o))
	case os.Args[1] == "member" && len(o.command) > 0:
		m := &member{o: o, route: newRoute(o), messages: make(chan message), ends: make(chan workerEnd)}
		os.Exit(m.run())
	}
	log.Fatal("usage: member member|watch FLAGS [-- COMMAND ...]")
}
