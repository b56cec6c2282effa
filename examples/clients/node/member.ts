// Member joins a run of Rallypoint and runs one command as its worker, round after round, until the run is over;
// `watch` prints a line for each round of a run. docs/protocol.md has the rules that this program follows.
//
// Every event (a message, the end of a stream or of the worker, a signal, a tick of the clock) changes the state and calls
// `act`, which compares the running worker with the last update: an update is a complete state, so earlier updates do not
// matter.

import { type ChildProcess, spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { createServer, type AddressInfo, type Server } from "node:net";
import { constants, hostname } from "node:os";
import { parseArgs } from "node:util";
import { create, type DescMessage, fromBinary, type MessageInitShape, type MessageShape, toBinary } from "@bufbuild/protobuf";
import { anyUnpack, durationFromMs, durationMs, timestampFromMs } from "@bufbuild/protobuf/wkt";
import * as grpc from "@grpc/grpc-js";
import { ErrorInfoSchema, RetryInfoSchema, StatusSchema } from "./gen/errors_pb.js";
import {
  type Assignment, FailureKind, JoinRequestSchema, type JoinResponse, JoinResponseSchema, type Lease, type NodeUpdate,
  Outcome, Phase, RendezvousService, WatchRunRequestSchema, WatchRunResponseSchema, WorkerFailureSchema,
} from "./gen/rallypoint/rendezvous/v1/rendezvous_service_pb.js";

const STOP_TIMEOUT = 10_000; // ms from SIGTERM to SIGKILL of a worker
const LEAVE_TIMEOUT = 10_000; // ms for the service to confirm that the node left
const TICK = 100; // ms; interval of the check of all deadlines: one timer instead of five

const { values: flags, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    rendezvous: { type: "string", default: "127.0.0.1:29400" }, // HOST:PORT[,HOST:PORT...]
    run: { type: "string", default: "" },
    node: { type: "string", default: hostname() }, // unique in the run
    nnodes: { type: "string", default: "1" }, // N or MIN:MAX
    address: { type: "string", default: hostname() }, // at which the other nodes reach this one
    "max-restarts": { type: "string", default: "0" },
    "last-call-timeout": { type: "string", default: "30" }, // seconds
    "tls-ca": { type: "string" }, // without it the connection is plaintext
    "tls-cert": { type: "string" },
    "tls-key": { type: "string" },
  },
});
const [mode, ...command] = positionals;

const log = (text: string) => console.error(`${flags.node}: ${text}`);
const now = () => performance.now(); // monotonic, ms

/** The end of a stream: the code for any client, the reason and metadata of Rallypoint, the least delay in ms. */
interface Failure {
  code: grpc.status;
  text: string;
  reason: string;
  metadata: { [key: string]: string };
  delay: number;
}

function describe(status: grpc.StatusObject): Failure {
  const failure: Failure = { code: status.code, text: status.details, reason: "", metadata: {}, delay: 0 };
  const [encoded] = status.metadata.get("grpc-status-details-bin");
  if (encoded instanceof Buffer) {
    for (const detail of fromBinary(StatusSchema, encoded).details) {
      const info = anyUnpack(detail, ErrorInfoSchema);
      const retry = anyUnpack(detail, RetryInfoSchema);
      if (info) Object.assign(failure, { reason: info.reason, metadata: info.metadata });
      if (retry?.retryDelay) failure.delay = durationMs(retry.retryDelay);
    }
  }
  return failure;
}

/** True if a client that is not a member of the run yet may try again. */
const retryable = ({ code }: Failure) =>
  [grpc.status.UNAVAILABLE, grpc.status.CANCELLED, grpc.status.INTERNAL, grpc.status.UNKNOWN, grpc.status.DEADLINE_EXCEEDED,
    grpc.status.ABORTED, grpc.status.RESOURCE_EXHAUSTED].includes(code);

/** Chooses the replica to call next, and when. */
class Route {
  patience = 4000; // ms for the first reply
  private readonly addresses = flags.rendezvous.split(",");
  private next = 0;
  private owner = ""; // the replica that a redirect named
  private redirects = 0; // followed in a row
  private bound = 100; // ms

  /** A channel of its own for a stream: one that failed would wait before it connects again, by rules of gRPC. */
  open(): grpc.Client {
    const file = (path?: string) => (path ? readFileSync(path) : null);
    const credentials = flags["tls-ca"]
      ? grpc.credentials.createSsl(file(flags["tls-ca"]), file(flags["tls-key"]), file(flags["tls-cert"]))
      : grpc.credentials.createInsecure();
    return new grpc.Client(this.owner || this.addresses[this.next % this.addresses.length]!, credentials, {
      "grpc.keepalive_time_ms": 10_000,
      "grpc.keepalive_timeout_ms": 5000,
      "grpc.keepalive_permit_without_calls": 1,
      "grpc.enable_retries": 0,
      "grpc.use_local_subchannel_pool": 1,
    });
  }

  /** Begins with short delays again, after a reply. */
  reached() {
    [this.redirects, this.bound, this.patience] = [0, 100, 4000];
  }

  /** The ms until the next attempt: random, so that the nodes of a large run do not come back in step. */
  after(failure: Failure): number {
    this.owner = failure.metadata["owner_address"] ?? "";
    if (this.owner && this.redirects < 4) {
      this.redirects += 1;
      return 0;
    }
    [this.owner, this.redirects] = ["", 0];
    this.next += 1;
    const delay = Math.random() * this.bound;
    this.bound = Math.min(2 * this.bound, 1000);
    return Math.max(delay, failure.delay);
  }

  /** The first reply did not come in time: the next replica gets longer. */
  silent() {
    this.patience = Math.min(2 * this.patience, 16_000);
  }
}

const path = (method: string) => `/${RendezvousService.typeName}/${method}`;
const encoder = <T extends DescMessage>(schema: T) => (message: MessageShape<T>) => Buffer.from(toBinary(schema, message));
const decoder = <T extends DescMessage>(schema: T) => (bytes: Buffer) => fromBinary(schema, bytes);
type Message = MessageInitShape<typeof JoinRequestSchema>["message"];

interface Stream {
  call: grpc.ClientDuplexStream<MessageShape<typeof JoinRequestSchema>, JoinResponse>;
  client: grpc.Client;
  replyBy: number;
  leased: boolean;
}

interface Worker {
  process: ChildProcess;
  assignment: Assignment;
  killAt?: number; // set once SIGTERM was sent
}

class Member {
  private readonly route = new Route();
  private stream?: Stream;
  private openAt = 0;
  private lease?: Lease;
  private admitted = false; // had a lease at any time
  private revision = 0n;
  private beatAt = 0;
  private update?: NodeUpdate; // none since the join

  private worker?: Worker;
  private started = 0; // the last round of which the worker was started
  private confirmed = 0;
  private former = ""; // the incarnation of the last lease that was lost
  private port?: Server; // reserves the master port until the worker starts

  // To be sent again on a new stream, because the service acknowledges nothing.
  private failed?: { report: MessageInitShape<typeof WorkerFailureSchema>; at: number };
  private succeeded = 0;
  private last?: Message; // the last of confirm, depart and leave

  private leaving = false; // by SIGTERM, or because the exit barrier is over
  private leaveBy = 0; // set once `leave` was sent
  private over = false; // the membership is over: end when the worker has ended
  private exit = 1;

  run() {
    for (const name of ["SIGTERM", "SIGINT"] as const) {
      process.on(name, () => this.step(() => this.leave(128 + constants.signals[name], `got ${name}`)));
    }
    setInterval(() => this.step(() => this.checkDeadlines()), TICK);
  }

  private step(event: () => void) {
    event();
    this.act();
    if (this.over && !this.worker) {
      this.stream?.client.close();
      process.exit(this.exit);
    }
  }

  /** Does the next thing that the last update requires; it is harmless to call it at any time. */
  private act() {
    const { phase, assignment: a } = this.update ?? {};
    if (this.worker) {
      const wanted = phase === Phase.FINAL && a?.round === this.worker.assignment.round;
      if (this.over || this.leaving || !wanted) this.stopWorker(this.worker);
      return; // act is called again when it has ended
    }
    if (this.over) return;
    if (this.leaving) {
      if (!this.leaveBy) {
        this.leaveBy = now() + LEAVE_TIMEOUT;
        this.send((this.last = { case: "leave", value: { reason: "left in good order" } }));
      }
      if (!this.lease) this.over = true; // there is no membership to leave
    } else if (phase === Phase.FROZEN && a && this.confirmed !== a.round) {
      this.confirm(a.round);
    } else if (phase === Phase.FINAL && a && this.started !== a.round && this.confirmed === a.round) {
      this.startWorker(a);
    } else if (this.update?.exitBarrierPassed && this.succeeded && this.succeeded === this.started) {
      this.leave(0, "the exit barrier is over");
    }
  }

  private received({ lease, update, draining }: JoinResponse) {
    this.route.reached();
    if (lease) {
      log(`lease ${lease.number}, resumed: ${this.lease !== undefined}`);
      this.stream!.leased = this.admitted = true;
      this.lease = lease;
      if (lease.revision > this.revision) this.revision = lease.revision;
      this.repeat();
    }
    if (draining) log("the server is shutting down"); // the end of the stream follows, and is handled as any other
    if (update) {
      this.update = update;
      if (update.revision > this.revision) this.revision = update.revision;
      if (update.settling) this.heartbeat(); // the service waits for a message of each node before it decides
      if (update.phase === Phase.CLOSED) {
        log(`run closed: ${Outcome[update.runEnd?.outcome ?? 0]}, ${update.runEnd?.detail}`);
        this.finish(update.runEnd?.outcome === Outcome.SUCCEEDED ? 0 : 1);
      }
    }
  }

  /** Decides whether the membership goes on. The worker runs on unless the lease is lost. */
  private streamEnded(f: Failure) {
    this.stream?.client.close();
    this.stream = undefined;
    const lost = ["LEASE_LOST", "LEASE_NOT_PROVEN", "RUN_NOT_FOUND", "REVISION_AHEAD"].includes(f.reason);
    const refused = ["RUN_CLOSED", "SETTINGS_DIFFER", "NODE_EVICTED", "JOIN_TIMED_OUT"].includes(f.reason);
    if (refused || "superseded_by" in f.metadata || (!this.admitted && !retryable(f))) {
      log(f.text);
      this.finish(f.reason === "RUN_CLOSED" && f.metadata["outcome"] === "SUCCEEDED" ? 0 : 1);
      return;
    }
    if (this.leaveBy && (f.code === grpc.status.OK || lost)) {
      this.over = true;
      return;
    }
    if (lost && this.admitted) {
      // Join again as a newcomer. Without an update `act` stops the worker; numbers of rounds may begin again.
      this.former = this.lease?.incarnation ?? this.former;
      this.lease = this.update = this.failed = this.last = undefined;
      this.revision = 0n;
      this.started = this.confirmed = this.succeeded = 0;
    }
    const delay = this.route.after(f);
    this.openAt = now() + delay;
    log(`stream ended (${grpc.status[f.code]}: ${f.text}); next attempt in ${delay.toFixed()} ms`);
  }

  private open() {
    const client = this.route.open();
    const call = client.makeBidiStreamRequest(path("Join"), encoder(JoinRequestSchema), decoder(JoinResponseSchema));
    const stream: Stream = { client, call, replyBy: now() + this.route.patience, leased: false };
    this.stream = stream;
    const ifCurrent = (event: () => void) => this.stream === stream && this.step(event);
    call.on("data", (response: JoinResponse) => ifCurrent(() => this.received(response)));
    call.on("error", () => {}); // `status` has it
    call.on("status", (status) => ifCurrent(() => this.streamEnded(describe(status))));
    const name = { runId: flags.run, nodeId: flags.node };
    const message: Message = this.lease
      ? { case: "resume", value: { ...name, lease: this.lease.number, token: this.lease.token, afterRevision: this.revision } }
      : { case: "join", value: { ...name, ...joinSettings(), address: flags.address, localWorldSize: 1, role: "default",
        formerIncarnation: this.former } };
    call.write(create(JoinRequestSchema, { message }));
  }

  /** Sends a message if there is a stream. Otherwise `repeat` sends it on the next one. */
  private send(message: Message) {
    if (!this.stream?.leased) return;
    this.stream.call.write(create(JoinRequestSchema, { message }));
    this.beatAt = now() + durationMs(this.lease!.keepAliveInterval!);
  }

  private heartbeat() {
    this.send({ case: "heartbeat", value: { watchdogTrouble: "the Node.js example has no watchdog" } });
  }

  /** Sends what the service may have missed, in the order of docs/protocol.md; it accepts each twice. */
  private repeat() {
    this.heartbeat();
    this.reportFailure();
    if (this.succeeded) this.send({ case: "succeeded", value: { round: this.succeeded } });
    if (this.last) this.send(this.last);
  }

  private reportFailure() {
    if (!this.failed) return;
    const { report, at } = this.failed;
    this.send({ case: "workerFailed", value: { ...report, age: durationFromMs(Math.round(now() - at)) } });
  }

  private confirm(round: number) {
    this.releasePort();
    this.confirmed = round;
    const port = createServer().listen(0);
    this.port = port;
    port.on("listening", () => {
      if (this.confirmed !== round || this.leaving) return;
      this.last = { case: "confirm", value: { round, masterPort: (port.address() as AddressInfo).port } };
      this.send(this.last);
    });
  }

  private releasePort() {
    this.port?.close();
    this.port = undefined;
  }

  private startWorker(a: Assignment) {
    this.releasePort(); // at the last moment, so that no other program takes it
    [this.started, this.succeeded, this.failed] = [a.round, 0, undefined];
    // Detached: a process group of its own, so that a signal reaches the grandchildren too. With setpriv the kernel kills
    // the worker if this program is killed: a node that joins again must not find it alive.
    const arguments_ = ["--pdeathsig", "KILL", "--", ...command];
    const child = spawn("setpriv", arguments_, { detached: true, stdio: "inherit", env: this.environment(a) });
    const worker: Worker = { process: child, assignment: a };
    this.worker = worker;
    log(`round ${a.round}: rank ${a.baseRank} of ${a.worldSize}, pid ${child.pid}`);
    child.on("error", (error) => {
      if (child.pid) return; // a signal was not delivered: it has ended
      this.step(() => {
        this.worker = undefined;
        this.fail(a, now(), { message: String(error), kind: FailureKind.NOT_STARTED });
      });
    });
    child.on("exit", (code, signal) => {
      const at = now();
      const ended = () => this.step(() => this.workerEnded(worker, code ?? -constants.signals[signal!], at));
      // "No worker is alive" includes its children. A zombie that no process reaps is harmless: hence the limit.
      const cleanUp = () => (signalGroup(worker, "SIGKILL") && now() < at + 5000 ? setTimeout(cleanUp, 10) : ended());
      cleanUp();
    });
  }

  private stopWorker(worker: Worker) {
    if (worker.killAt !== undefined) return;
    worker.killAt = now() + STOP_TIMEOUT;
    signalGroup(worker, "SIGTERM");
  }

  private workerEnded({ process: { pid }, assignment: a, killAt }: Worker, exitCode: number, at: number) {
    this.worker = undefined;
    log(`worker of round ${a.round} ended with ${exitCode}`);
    if (killAt !== undefined) return; // this program ended it
    if (exitCode === 0) {
      this.succeeded = a.round;
      this.send({ case: "succeeded", value: { round: a.round } });
    } else {
      const message = exitCode < 0 ? `killed by signal ${-exitCode}` : `exited with code ${exitCode}`;
      const kind = exitCode < 0 ? FailureKind.SIGNAL : FailureKind.EXIT_CODE;
      this.fail(a, at, { pid: BigInt(pid!), exitCode, message, kind });
    }
  }

  private fail(a: Assignment, at: number, report: MessageInitShape<typeof WorkerFailureSchema>) {
    const place = { round: a.round, rank: a.baseRank, localRank: 0, role: "default", host: hostname() };
    this.failed = { at, report: { ...place, time: timestampFromMs(Date.now()), ...report } };
    this.reportFailure();
  }

  /** Announces the end to the others, who would otherwise learn of it when their connections break. */
  private leave(exit: number, why: string) {
    if (this.leaving) return;
    log(`leaving: ${why}`);
    [this.leaving, this.exit] = [true, exit];
    if (this.worker) this.send((this.last = { case: "depart", value: { reason: why } }));
  }

  private finish(exit: number) {
    this.over = true;
    if (!this.leaving) this.exit = exit;
  }

  private checkDeadlines() {
    if (!this.stream) {
      if (now() >= this.openAt && !this.over) this.open();
    } else if (this.stream.leased) {
      if (now() >= this.beatAt) this.heartbeat();
    } else if (now() >= this.stream.replyBy) {
      this.route.silent();
      this.streamEnded({ code: grpc.status.DEADLINE_EXCEEDED, text: "no reply", reason: "", metadata: {}, delay: 0 });
    }
    if (this.worker?.killAt && now() >= this.worker.killAt) signalGroup(this.worker, "SIGKILL");
    if (this.leaveBy && now() >= this.leaveBy) {
      log("the service did not confirm the leave");
      this.over = true;
    }
  }

  private environment(a: Assignment): NodeJS.ProcessEnv {
    const secret = /^RALLYPOINT_(RUN_SECRET|TLS_|TOKEN_)/; // of the agent
    const inherited = Object.entries(process.env).filter(([name]) => !secret.test(name));
    const own = {
      RANK: a.baseRank, LOCAL_RANK: 0, ROLE_RANK: a.baseRoleRank, GROUP_RANK: a.groupRank,
      WORLD_SIZE: a.worldSize, LOCAL_WORLD_SIZE: 1, ROLE_WORLD_SIZE: a.roleWorldSize, GROUP_WORLD_SIZE: a.groupWorldSize,
      ROLE_NAME: "default", MASTER_ADDR: a.masterAddress, MASTER_PORT: a.masterPort,
      TORCHELASTIC_RESTART_COUNT: this.update?.restartCount, TORCHELASTIC_MAX_RESTARTS: flags["max-restarts"],
      TORCHELASTIC_RUN_ID: flags.run, TORCHELASTIC_USE_AGENT_STORE: "False",
      RALLYPOINT_RUN_ID: flags.run, RALLYPOINT_NODE: flags.node, RALLYPOINT_ROUND: a.round,
      RALLYPOINT_FENCING_TOKEN: a.fencingToken,
    };
    return Object.fromEntries([...inherited, ...Object.entries(own).map(([name, value]) => [name, String(value)])]);
  }
}

/** Returns false if no process of the worker's group is left. */
function signalGroup(worker: Worker, signal: NodeJS.Signals): boolean {
  try {
    return process.kill(-worker.process.pid!, signal);
  } catch {
    return false;
  }
}

function joinSettings() {
  const [fewest, most = fewest] = flags.nnodes.split(":");
  const settings = {
    minNodes: Number(fewest), maxNodes: Number(most), maxRestarts: Number(flags["max-restarts"]),
    lastCallTimeout: durationFromMs(1000 * Number(flags["last-call-timeout"])),
  };
  return { settings };
}

/** Prints a line for each round; ends with 0 if the run succeeded. */
function watch(route: Route, revision = 0n, round = 0) {
  const client = route.open();
  const request = create(WatchRunRequestSchema, { runId: flags.run, afterRevision: revision });
  const call = client.makeServerStreamRequest(
    path("WatchRun"), encoder(WatchRunRequestSchema), decoder(WatchRunResponseSchema), request,
  );
  const silence = setTimeout(() => {
    route.silent();
    call.cancel();
  }, route.patience);
  call.on("data", ({ run }: MessageShape<typeof WatchRunResponseSchema>) => {
    clearTimeout(silence);
    route.reached();
    if (!run) return;
    revision = run.revision;
    // A short round may be missing: the stream has the latest state only. WatchEvents has all.
    if (run.phase === Phase.FINAL && run.round !== round) {
      round = run.round!;
      console.log(`round ${round}: ${run.worldSize} workers, restart ${run.restartCount}`);
    }
    if (run.phase === Phase.CLOSED) {
      console.log(`closed: ${Outcome[run.runEnd!.outcome]}, ${run.runEnd!.detail}`);
      process.exit(run.runEnd!.outcome === Outcome.SUCCEEDED ? 0 : 1);
    }
  });
  call.on("error", () => {}); // `status` has it
  call.on("status", (status) => {
    clearTimeout(silence);
    client.close();
    const f = describe(status);
    if (f.reason === "REVISION_AHEAD") revision = 0n; // the service lost its journal, or this is another run of that name
    else if (!retryable(f) && f.code !== grpc.status.OK) {
      log(f.text);
      process.exit(1);
    }
    setTimeout(() => watch(route, revision, round), route.after(f));
  });
}

if (mode === "watch" && flags.run) watch(new Route());
else if (mode === "member" && flags.run && command.length) new Member().run();
else {
  log("usage: member.js member|watch --rendezvous HOST:PORT[,HOST:PORT...] --run ID ... [-- COMMAND ...]");
  process.exit(2);
}
