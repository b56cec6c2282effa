// Member joins a run of Rallypoint and runs one command as its worker, round after round, until the run is over;
// `watch` prints a line for each round of a run. docs/protocol.md has the rules that this program follows.
//
// The main thread owns all state. Each other thread waits for one source (the stream, the worker, a signal) and queues its
// events. After each event, `Act` compares the running worker with the last update: an update is a complete state, so
// earlier updates do not matter.

#include <arpa/inet.h>
#include <getopt.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "errors.pb.h"
#include "rallypoint/rendezvous/v1/rendezvous_service.grpc.pb.h"

extern char** environ;

namespace pb = rallypoint::rendezvous::v1;
using Clock = std::chrono::steady_clock;  // monotonic
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kStopTimeout{10};   // from SIGTERM to SIGKILL of a worker
constexpr seconds kLeaveTimeout{10};  // for the service to confirm that the node left
constexpr milliseconds kTick{100};    // interval of the check of all deadlines: one timer instead of five

struct Options {
  std::string rendezvous = "127.0.0.1:29400", run, node, nnodes = "1", address, ca, certificate, key;
  int max_restarts = 0;
  double last_call_timeout = 30;  // seconds
  std::vector<std::string> command;
} options;

void Log(const std::string& text) { std::cerr << options.node + ": " + text + "\n"; }

milliseconds ToMilliseconds(const google::protobuf::Duration& d) {
  return milliseconds(d.seconds() * 1000 + d.nanos() / 1'000'000);
}

void SetSeconds(google::protobuf::Duration* duration, double value) {
  duration->set_seconds(static_cast<int64_t>(value));
  duration->set_nanos(static_cast<int>((value - duration->seconds()) * 1e9));
}

// Events from other threads, in the order of their arrival.
class Queue {
 public:
  void Push(std::function<void()> event) {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    arrived_.notify_one();
  }

  // Runs the next event; waits for it no longer than a tick.
  void RunNext() {
    std::unique_lock lock(mutex_);
    if (!arrived_.wait_for(lock, kTick, [this] { return !events_.empty(); })) return;
    auto event = std::move(events_.front());
    events_.pop_front();
    lock.unlock();
    event();
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::function<void()>> events_;
};

// The end of a stream: the gRPC code, Rallypoint's reason and metadata, the minimum delay of the next attempt.
struct Failure {
  explicit Failure(const grpc::Status& status) : code(status.error_code()), text(status.error_message()) {
    google::rpc::Status details;
    details.ParseFromString(status.error_details());  // the trailer grpc-status-details-bin
    for (const auto& detail : details.details()) {
      google::rpc::RetryInfo retry;
      if (detail.UnpackTo(&retry)) delay = ToMilliseconds(retry.retry_delay());
      detail.UnpackTo(&info);  // only if it is one
    }
  }

  // True if a client that is not a member of the run yet may try again.
  bool Retryable() const {
    return std::set{grpc::UNAVAILABLE, grpc::CANCELLED, grpc::INTERNAL, grpc::UNKNOWN, grpc::DEADLINE_EXCEEDED, grpc::ABORTED,
                    grpc::RESOURCE_EXHAUSTED}
        .count(code);
  }

  std::string Metadata(const std::string& name) const {
    auto found = info.metadata().find(name);
    return found == info.metadata().end() ? "" : found->second;
  }

  grpc::StatusCode code;
  std::string text;
  google::rpc::ErrorInfo info;
  milliseconds delay{0};
};

std::string Content(const std::string& path) {
  std::ostringstream content;
  content << std::ifstream(path).rdbuf();
  return content.str();
}

// Chooses the replica to call next, and when.
class Route {
 public:
  milliseconds patience{4000};  // for the first reply

  Route() {
    std::istringstream list(options.rendezvous);
    for (std::string address; std::getline(list, address, ',');) addresses_.push_back(address);
  }

  // A channel of its own for a stream: a failed one would wait for gRPC's back-off before it connects again.
  std::unique_ptr<pb::RendezvousService::Stub> Open() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    auto credentials = grpc::InsecureChannelCredentials();
    if (!options.ca.empty())
      credentials = grpc::SslCredentials({Content(options.ca), Content(options.key), Content(options.certificate)});
    const std::string& address = owner_.empty() ? addresses_[next_ % addresses_.size()] : owner_;
    return pb::RendezvousService::NewStub(grpc::CreateCustomChannel(address, credentials, arguments));
  }

  // Resets the delays to the shortest, after a reply.
  void Reached() {
    redirects_ = 0;
    bound_ = milliseconds(100);
    patience = milliseconds(4000);
  }

  // Returns the delay before the next attempt: random, so that the nodes of a large run do not come back in step.
  milliseconds After(const Failure& failure) {
    owner_ = failure.Metadata("owner_address");
    if (!owner_.empty() && redirects_ < 4) {
      ++redirects_;
      return milliseconds(0);
    }
    owner_.clear();
    redirects_ = 0;
    ++next_;
    milliseconds delay(std::uniform_int_distribution<long>(0, bound_.count())(random_));
    bound_ = std::min(2 * bound_, milliseconds(1000));
    return std::max(delay, failure.delay);
  }

  // The first reply did not come in time: the next replica gets more time.
  void Silent() { patience = std::min(2 * patience, milliseconds(16'000)); }

 private:
  std::vector<std::string> addresses_;
  size_t next_ = 0;
  std::string owner_;   // the replica that a redirect named
  int redirects_ = 0;   // followed in a row
  milliseconds bound_{100};
  std::mt19937 random_{std::random_device()()};
};

// One Join call. Its thread sends the first message and reads; all other messages are sent by the main thread.
struct Stream {
  grpc::ClientContext context;
  std::unique_ptr<pb::RendezvousService::Stub> stub;
  std::unique_ptr<grpc::ClientReaderWriter<pb::JoinRequest, pb::JoinResponse>> call;
  Clock::time_point reply_by;
  bool leased = false;
};

// The process of one round, the leader of a process group of its own.
struct Worker {
  pid_t pid;
  pb::Assignment assignment;
  std::optional<Clock::time_point> kill_at;  // set once SIGTERM was sent
};

class Member {
 public:
  int Run() {
    while (true) {
      CheckDeadlines(Clock::now());
      Act();
      if (over_ && !worker_) return exit_;
      queue_.RunNext();
    }
  }

  // Called by the signal thread.
  void Signalled(int number) {
    queue_.Push([=] { Leave(128 + number, "got signal " + std::to_string(number)); });
  }

 private:
  // Takes the next step that the last update requires; it is harmless to call it at any time.
  void Act() {
    const pb::Assignment* a = update_.has_assignment() ? &update_.assignment() : nullptr;
    if (worker_) {
      bool wanted = update_.phase() == pb::PHASE_FINAL && a && a->round() == worker_->assignment.round();
      if (over_ || leaving_ || !wanted) StopWorker();
      return;  // Act is called again when it has ended
    }
    if (over_) return;
    if (leaving_) {
      if (!leave_by_) {
        leave_by_ = Clock::now() + kLeaveTimeout;
        last_.emplace().mutable_leave()->set_reason("left in good order");
        Send(*last_);
      }
      if (!lease_) over_ = true;  // there is no membership to leave
    } else if (update_.phase() == pb::PHASE_FROZEN && a && confirmed_ != a->round()) {
      Confirm(a->round());
    } else if (update_.phase() == pb::PHASE_FINAL && a && started_ != a->round() && confirmed_ == a->round()) {
      StartWorker(*a);
    } else if (update_.exit_barrier_passed() && succeeded_ && succeeded_ == started_) {
      Leave(0, "the exit barrier is over");
    }
  }

  void Received(const pb::JoinResponse& response) {
    route_.Reached();
    if (response.has_lease()) {
      Log("lease " + std::to_string(response.lease().number()) + ", resumed: " + (lease_ ? "true" : "false"));
      stream_->leased = admitted_ = true;
      lease_ = response.lease();
      revision_ = std::max(revision_, lease_->revision());
      Repeat();
    }
    if (response.has_draining()) Log("the server is shutting down");  // the end of the stream follows, handled as any other
    if (response.has_update()) {
      update_ = response.update();
      revision_ = std::max(revision_, update_.revision());
      if (update_.settling()) Heartbeat();  // the service waits for a message of each node before it decides
      if (update_.phase() == pb::PHASE_CLOSED) {
        Log("run closed: " + pb::Outcome_Name(update_.run_end().outcome()) + ", " + update_.run_end().detail());
        Finish(update_.run_end().outcome() == pb::OUTCOME_SUCCEEDED ? 0 : 1);
      }
    }
  }

  // Ends or continues the membership. The worker runs on unless the lease is lost.
  void StreamEnded(const Failure& f) {
    stream_->context.TryCancel();
    stream_.reset();
    static const std::set<std::string> kLost{"LEASE_LOST", "LEASE_NOT_PROVEN", "RUN_NOT_FOUND", "REVISION_AHEAD"};
    static const std::set<std::string> kRefused{"RUN_CLOSED", "SETTINGS_DIFFER", "NODE_EVICTED", "JOIN_TIMED_OUT"};
    const bool lost = kLost.count(f.info.reason());
    if (kRefused.count(f.info.reason()) || f.info.metadata().count("superseded_by") || (!admitted_ && !f.Retryable())) {
      Log(f.text);
      Finish(f.info.reason() == "RUN_CLOSED" && f.Metadata("outcome") == "SUCCEEDED" ? 0 : 1);
      return;
    }
    if (leave_by_ && (f.code == grpc::OK || lost)) {
      over_ = true;
      return;
    }
    if (lost && admitted_) {
      // Join again as a newcomer. Without an update, Act stops the worker; numbers of rounds may begin again.
      update_.Clear();
      if (lease_) former_ = lease_->incarnation();
      lease_.reset();
      failed_.reset();
      last_.reset();
      revision_ = started_ = confirmed_ = succeeded_ = 0;
    }
    milliseconds delay = route_.After(f);
    open_at_ = Clock::now() + delay;
    Log("stream ended (code " + std::to_string(f.code) + ": " + f.text + "); next attempt in " +
        std::to_string(delay.count()) + " ms");
  }

  void Open() {
    pb::JoinRequest first;
    if (lease_) {
      auto* resume = first.mutable_resume();
      resume->set_run_id(options.run);
      resume->set_node_id(options.node);
      resume->set_lease(lease_->number());
      resume->set_token(lease_->token());
      resume->set_after_revision(revision_);
    } else {
      auto* join = first.mutable_join();
      join->set_run_id(options.run);
      join->set_node_id(options.node);
      join->set_address(options.address);
      join->set_local_world_size(1);
      join->set_role("default");
      join->set_former_incarnation(former_);
      auto* settings = join->mutable_settings();
      settings->set_min_nodes(std::stoi(options.nnodes));
      settings->set_max_nodes(std::stoi(options.nnodes.substr(options.nnodes.find(':') + 1)));  // npos + 1 is 0
      settings->set_max_restarts(options.max_restarts);
      SetSeconds(settings->mutable_last_call_timeout(), options.last_call_timeout);
    }
    auto stream = std::make_shared<Stream>();
    stream->stub = route_.Open();
    stream->reply_by = Clock::now() + route_.patience;
    stream_ = stream;
    std::thread([this, stream, first] {
      auto if_current = [=](std::function<void()> event) {
        queue_.Push([=] {
          if (stream_ == stream) event();
        });
      };
      stream->call = stream->stub->Join(&stream->context);
      stream->call->Write(first);  // after an error, Finish returns the reason
      for (pb::JoinResponse response; stream->call->Read(&response);) if_current([=] { Received(response); });
      Failure failure(stream->call->Finish());
      if_current([=] { StreamEnded(failure); });
    }).detach();
  }

  // Sends a message if there is a stream. Otherwise Repeat sends it on the next one.
  void Send(const pb::JoinRequest& request) {
    if (!stream_ || !stream_->leased) return;
    stream_->call->Write(request);  // an error is also the end of the stream, which arrives as an event
    beat_at_ = Clock::now() + ToMilliseconds(lease_->keep_alive_interval());
  }

  void Heartbeat() {
    pb::JoinRequest request;
    request.mutable_heartbeat()->set_watchdog_trouble("the C++ example has no watchdog");
    Send(request);
  }

  // Sends again all that the service may not have received, in the order of docs/protocol.md; it accepts duplicates.
  void Repeat() {
    Heartbeat();
    ReportFailure();
    ReportSuccess();
    if (last_) Send(*last_);
  }

  void ReportSuccess() {
    if (!succeeded_) return;
    pb::JoinRequest request;
    request.mutable_succeeded()->set_round(succeeded_);
    Send(request);
  }

  void ReportFailure() {
    if (!failed_) return;
    pb::JoinRequest request;
    *request.mutable_worker_failed() = *failed_;
    SetSeconds(request.mutable_worker_failed()->mutable_age(), std::chrono::duration<double>(Clock::now() - failed_at_).count());
    Send(request);
  }

  void Confirm(int round) {
    ReleasePort();
    sockaddr_in6 any{AF_INET6, 0, 0, in6addr_any, 0};  // IPv4 too
    socklen_t size = sizeof any;
    port_ = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(port_, reinterpret_cast<sockaddr*>(&any), size) || getsockname(port_, reinterpret_cast<sockaddr*>(&any), &size)) {
      // Without a port there is no round: the node is lost, and another one takes its place.
      Log("no free port");
      std::_Exit(1);
    }
    confirmed_ = round;
    auto* confirm = last_.emplace().mutable_confirm();
    confirm->set_round(round);
    confirm->set_master_port(ntohs(any.sin6_port));
    Send(*last_);
  }

  void ReleasePort() {
    if (port_ >= 0) close(port_);
    port_ = -1;
  }

  void StartWorker(const pb::Assignment& a) {
    ReleasePort();  // at the last moment, so that no other program takes it
    started_ = a.round();
    succeeded_ = 0;
    failed_.reset();
    // setpriv: the kernel kills the worker if this program is killed, because a node that joins again must not find it
    // alive. The program's signal mask and group are not for the worker: a signal to its group reaches the grandchildren.
    std::vector<std::string> command{"setpriv", "--pdeathsig", "KILL", "--"}, environment = Environment(a);
    command.insert(command.end(), options.command.begin(), options.command.end());
    sigset_t none;
    sigemptyset(&none);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setsigmask(&attributes, &none);
    pid_t pid;
    int error = posix_spawnp(&pid, "setpriv", nullptr, &attributes, Pointers(command).data(), Pointers(environment).data());
    posix_spawnattr_destroy(&attributes);
    if (error) {
      Fail(a, Clock::now(), pb::FAILURE_KIND_NOT_STARTED, std::string("setpriv: ") + strerror(error));
      return;
    }
    Log("round " + std::to_string(a.round()) + ": rank " + std::to_string(a.base_rank()) + " of " +
        std::to_string(a.world_size()) + ", pid " + std::to_string(pid));
    worker_ = Worker{pid, a, {}};
    std::thread([this, pid] {
      int status = 0;
      waitpid(pid, &status, 0);
      auto at = Clock::now();
      // "No worker is alive" includes its children. A zombie that no process reaps is harmless: hence the limit.
      while (kill(-pid, SIGKILL) == 0 && Clock::now() < at + seconds(5)) std::this_thread::sleep_for(milliseconds(10));
      queue_.Push([=] { WorkerEnded(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status), at); });
    }).detach();
  }

  void StopWorker() {
    if (worker_->kill_at) return;
    worker_->kill_at = Clock::now() + kStopTimeout;
    kill(-worker_->pid, SIGTERM);
  }

  void WorkerEnded(int code, Clock::time_point at) {
    Worker worker = *worker_;
    worker_.reset();
    Log("worker of round " + std::to_string(worker.assignment.round()) + " ended with " + std::to_string(code));
    if (worker.kill_at) return;  // this program ended it
    if (code == 0) {
      succeeded_ = worker.assignment.round();
      ReportSuccess();
    } else if (code < 0) {
      Fail(worker.assignment, at, pb::FAILURE_KIND_SIGNAL, "killed by signal " + std::to_string(-code), worker.pid, code);
    } else {
      Fail(worker.assignment, at, pb::FAILURE_KIND_EXIT_CODE, "exited with code " + std::to_string(code), worker.pid, code);
    }
  }

  void Fail(const pb::Assignment& a, Clock::time_point at, pb::FailureKind kind, const std::string& text, pid_t pid = 0,
            std::optional<int> code = {}) {
    failed_.emplace();
    failed_->set_round(a.round());
    failed_->set_rank(a.base_rank());
    failed_->set_local_rank(0);
    failed_->set_role("default");
    failed_->set_host(options.address);
    failed_->mutable_time()->set_seconds(time(nullptr));
    failed_->set_kind(kind);
    failed_->set_message(text);
    failed_->set_pid(pid);
    if (code) failed_->set_exit_code(*code);
    failed_at_ = at;
    ReportFailure();
  }

  // Announces the end to the other nodes, which would otherwise detect it when their connections break.
  void Leave(int exit, const std::string& why) {
    if (leaving_) return;
    Log("leaving: " + why);
    leaving_ = true;
    exit_ = exit;
    if (!worker_) return;
    last_.emplace().mutable_depart()->set_reason(why);
    Send(*last_);
  }

  void Finish(int exit) {
    over_ = true;
    if (!leaving_) exit_ = exit;
  }

  void CheckDeadlines(Clock::time_point now) {
    if (!stream_) {
      if (now >= open_at_ && !over_) Open();
    } else if (stream_->leased) {
      if (now >= beat_at_) Heartbeat();
    } else if (now >= stream_->reply_by) {
      route_.Silent();
      StreamEnded(Failure({grpc::DEADLINE_EXCEEDED, "no reply"}));
    }
    if (worker_ && worker_->kill_at && now >= *worker_->kill_at) kill(-worker_->pid, SIGKILL);
    if (leave_by_ && now >= *leave_by_) {
      Log("the service did not confirm the leave");
      over_ = true;
    }
  }

  std::vector<std::string> Environment(const pb::Assignment& a) const {
    std::vector<std::string> result;
    for (char** pair = environ; *pair; ++pair) {  // without the agent's secrets
      std::string text = *pair;
      if (text.rfind("RALLYPOINT_RUN_SECRET", 0) && text.rfind("RALLYPOINT_TLS_", 0) && text.rfind("RALLYPOINT_TOKEN_", 0))
        result.push_back(text);
    }
    auto set = [&](const std::string& name, const std::string& value) { result.push_back(name + "=" + value); };
    auto number = [&](const std::string& name, int64_t value) { set(name, std::to_string(value)); };
    number("RANK", a.base_rank()), number("LOCAL_RANK", 0);
    number("ROLE_RANK", a.base_role_rank()), number("GROUP_RANK", a.group_rank());
    number("WORLD_SIZE", a.world_size()), number("LOCAL_WORLD_SIZE", 1);
    number("ROLE_WORLD_SIZE", a.role_world_size()), number("GROUP_WORLD_SIZE", a.group_world_size());
    set("ROLE_NAME", "default");
    set("MASTER_ADDR", a.master_address()), number("MASTER_PORT", a.master_port());
    number("TORCHELASTIC_RESTART_COUNT", update_.restart_count());
    number("TORCHELASTIC_MAX_RESTARTS", options.max_restarts);
    set("TORCHELASTIC_RUN_ID", options.run), set("TORCHELASTIC_USE_AGENT_STORE", "False");
    set("RALLYPOINT_RUN_ID", options.run), set("RALLYPOINT_NODE", options.node);
    number("RALLYPOINT_ROUND", a.round()), number("RALLYPOINT_FENCING_TOKEN", a.fencing_token());
    return result;
  }

  static std::vector<char*> Pointers(std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (auto& text : texts) result.push_back(text.data());
    result.push_back(nullptr);
    return result;
  }

  Queue queue_;
  Route route_;
  std::shared_ptr<Stream> stream_;
  Clock::time_point open_at_, beat_at_;
  std::optional<pb::Lease> lease_;
  bool admitted_ = false;  // had a lease at any time
  int64_t revision_ = 0;
  pb::NodeUpdate update_;  // empty: none since the join

  std::optional<Worker> worker_;
  int started_ = 0;  // the last round of which the worker was started
  int confirmed_ = 0;
  std::string former_;  // the incarnation of the last lease that was lost
  int port_ = -1;  // reserves the master port until the worker starts

  // To be sent again on a new stream, because the service acknowledges nothing.
  std::optional<pb::WorkerFailure> failed_;
  Clock::time_point failed_at_;
  int succeeded_ = 0;
  std::optional<pb::JoinRequest> last_;  // the last of confirm, depart and leave

  bool leaving_ = false;                       // by SIGTERM, or because the exit barrier is over
  std::optional<Clock::time_point> leave_by_;  // set once `leave` was sent
  bool over_ = false;                          // the membership is over: end when the worker has ended
  int exit_ = 1;
};

// Prints a line for each round, and returns 0 if the run succeeded.
int Watch() {
  Route route;
  pb::WatchRunRequest request;
  request.set_run_id(options.run);
  for (int round = 0;;) {
    auto stub = route.Open();
    grpc::ClientContext context;
    std::mutex mutex;
    std::condition_variable replied;
    bool silent = true;
    std::thread watchdog([&] {
      std::unique_lock lock(mutex);
      if (!replied.wait_for(lock, route.patience, [&] { return !silent; })) context.TryCancel();
    });
    auto heard = [&] {
      std::lock_guard lock(mutex);
      silent = false;
      replied.notify_one();
    };
    auto call = stub->WatchRun(&context, request);
    std::optional<int> exit;
    for (pb::WatchRunResponse response; !exit && call->Read(&response);) {
      heard();
      route.Reached();
      const pb::Run& run = response.run();
      request.set_after_revision(run.revision());
      // A short round may be missing: the stream has the latest state only. WatchEvents has all.
      if (run.phase() == pb::PHASE_FINAL && run.round() != round) {
        round = run.round();
        std::cout << "round " << round << ": " << run.world_size() << " workers, restart " << run.restart_count() << std::endl;
      }
      if (run.phase() == pb::PHASE_CLOSED) {
        std::cout << "closed: " << pb::Outcome_Name(run.run_end().outcome()) << ", " << run.run_end().detail() << std::endl;
        exit = run.run_end().outcome() == pb::OUTCOME_SUCCEEDED ? 0 : 1;
      }
    }
    if (exit) context.TryCancel();
    Failure failure(call->Finish());
    if (silent) route.Silent();
    heard();
    watchdog.join();
    if (exit) return *exit;
    if (failure.info.reason() == "REVISION_AHEAD") {
      request.clear_after_revision();  // the service lost its journal, or this is another run of that name
    } else if (!failure.Retryable() && failure.code != grpc::OK) {
      Log(failure.text);
      return 1;
    }
    std::this_thread::sleep_for(route.After(failure));
  }
}

int main(int argc, char** argv) {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  options.node = options.address = host;
  const option names[] = {{"rendezvous", 1, nullptr, 'r'},   {"run", 1, nullptr, 'i'},
                          {"node", 1, nullptr, 'n'},         {"nnodes", 1, nullptr, 'N'},
                          {"address", 1, nullptr, 'a'},      {"max-restarts", 1, nullptr, 'm'},
                          {"last-call-timeout", 1, nullptr, 'l'}, {"tls-ca", 1, nullptr, 'A'},
                          {"tls-cert", 1, nullptr, 'C'},     {"tls-key", 1, nullptr, 'K'},
                          {}};
  const std::string mode = argc > 1 ? argv[1] : "";
  for (int flag; argc > 1 && (flag = getopt_long(argc - 1, argv + 1, "+", names, nullptr)) != -1;) {
    switch (flag) {
      case 'r': options.rendezvous = optarg; break;
      case 'i': options.run = optarg; break;
      case 'n': options.node = optarg; break;
      case 'N': options.nnodes = optarg; break;
      case 'a': options.address = optarg; break;
      case 'm': options.max_restarts = std::stoi(optarg); break;
      case 'l': options.last_call_timeout = std::stod(optarg); break;
      case 'A': options.ca = optarg; break;
      case 'C': options.certificate = optarg; break;
      case 'K': options.key = optarg; break;
      default: return 2;
    }
  }
  options.command.assign(argv + std::min(argc, optind + 1), argv + argc);
  if (mode == "watch" && !options.run.empty()) return Watch();
  if (mode != "member" || options.run.empty() || options.command.empty()) {
    Log("usage: member member|watch --rendezvous HOST:PORT[,HOST:PORT...] --run ID ... [-- COMMAND ...]");
    return 2;
  }
  // Block the signals in all threads, so that one of them can wait for them. It must be done before any is started.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  Member member;
  std::thread([&] {
    for (int number; sigwait(&signals, &number) == 0;) member.Signalled(number);
  }).detach();
  std::_Exit(member.Run());  // without the destructors: threads still use the member
}
