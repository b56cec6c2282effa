// A worker's timers, progress and store for Node.js, without a package: docs/timer-socket.md, docs/store-socket.md.

import { Buffer } from "node:buffer";
import { connect } from "node:net";

const FIRST_PAUSE = 100, LONGEST_PAUSE = 5000; // ms between two attempts to connect
const LIVED = 1000; // ms of a connection after which its end is no failure
const MOST_UNSENT = 64 * 1024; // bytes that may wait in this process for an agent that does not read
const GRACE = 10_000; // ms: the agent replies at most 5 s after the timeout; one that is silent for longer hangs
const MOST_BYTES = 4 * 1024 * 1024;
const SCOPE_BYTES = 256, MOST_TIMERS = 1024;

/** The frame of both sockets: two lengths, a header (or a message of the timer socket) and a body. */
function frame(header, body = Buffer.alloc(0)) {
  const sizes = Buffer.alloc(8);
  sizes.writeUInt32BE(header.length, 0);
  sizes.writeUInt32BE(body.length, 4);
  return Buffer.concat([sizes, header, body]);
}

/** A message of the timer socket: kind, version, signal, flags, and numbers of 64 bits. */
function message(kind, flags, ...numbers) {
  const bytes = Buffer.alloc(8 + 8 * numbers.length);
  bytes.set([kind, 1, 0, flags]);
  numbers.forEach((number, index) => bytes.writeBigUInt64LE(BigInt(number), 8 + 8 * index));
  return bytes;
}

const now = () => process.hrtime.bigint(); // CLOCK_MONOTONIC on Linux, ns

/** Timers and progress of this process. Nothing here throws: without an agent the program runs on, unguarded. */
export class Timers {
  #path = process.env.RALLYPOINT_TIMER_STREAM_SOCKET;
  #held = new Map(); // token to message: sent again on a new connection
  #tokens = 0n;
  #socket;
  #openedAt = 0;
  #pause = 0;
  #retryAt = 0;

  /** Starts a timer: this process is killed after so many seconds, unless `release` comes first. 0: learned.
   *  Returns the token for `release`. A program that may block its event loop at once awaits `ready` before. */
  acquire(seconds, scope, token = ++this.#tokens) {
    if (this.#held.size >= MOST_TIMERS && !this.#held.has(token)) return token; // not guarded
    const after = BigInt(Math.round(seconds * 1e9));
    // `encodeInto` writes whole characters only.
    const text = new Uint8Array(SCOPE_BYTES);
    const { written } = new TextEncoder().encodeInto(scope, text);
    const start = Buffer.concat([message(1, after ? 0 : 1, token, now(), after), text.subarray(0, written)]);
    this.#held.set(token, start);
    this.#change(start);
    return token;
  }

  release(token) {
    if (this.#held.delete(token)) this.#change(message(2, 0, token));
  }

  progress(step) {
    this.#open();
    this.#change(message(4, 0, step, now()));
  }

  /** Resolves once there is a connection to the agent; at the first failure to connect, too. */
  async ready() {
    this.#open();
    const socket = this.#socket;
    if (socket?.connecting) await new Promise((resolve) => socket.once("connect", resolve).once("close", resolve));
  }

  #change(bytes) {
    if (this.#open()) return; // a new connection has got all timers
    if (!this.#socket) return;
    if (this.#socket.writableLength > MOST_UNSENT) this.#lost(this.#socket);
    else this.#socket.write(frame(bytes));
  }

  /** Opens a connection if there is none, and it is time to; returns true if it did. */
  #open() {
    if (this.#socket || !this.#path || performance.now() < this.#retryAt) return false;
    const socket = connect(this.#path);
    this.#socket = socket;
    this.#openedAt = performance.now();
    socket.on("error", () => {}); // "close" follows
    socket.on("close", () => this.#lost(socket));
    socket.unref(); // does not keep the program alive
    for (const start of this.#held.values()) socket.write(frame(start));
    return true;
  }

  #lost(socket) {
    socket.destroy();
    if (socket !== this.#socket) return;
    this.#socket = undefined;
    if (performance.now() - this.#openedAt > LIVED) this.#pause = 0;
    this.#retryAt = performance.now() + this.#pause;
    this.#pause = Math.min(2 * this.#pause || FIRST_PAUSE, LONGEST_PAUSE);
  }
}

/** A call to the store failed. `kind`: "timeout"; "round-over": the worker should end; "unavailable": whether a write took
 *  effect is unknown; "refused". */
export class StoreError extends Error {
  constructor(kind, message, reason = "") {
    super(message);
    Object.assign(this, { name: "StoreError", kind, reason });
  }
}

function failure({ code, reason, message: text }) {
  if (reason === "KEY_WAIT_TIMED_OUT") return new StoreError("timeout", text, reason);
  if (reason === "ROUND_OVER" || reason === "LEASE_LOST") return new StoreError("round-over", text, reason);
  return new StoreError(code === "UNAVAILABLE" ? "unavailable" : "refused", text, reason);
}

/** Parses JSON; integers that a double may not hold become strings. */
const parse = (text) => JSON.parse(text.replace(
  /"(?:[^"\\]|\\.)*"|(?<![\d.])-?\d{16,}(?![\d.eE])/g, (part) => (part.startsWith('"') ? part : `"${part}"`),
));

/** The store of the worker's round. Values are Buffers; seconds are numbers. Concurrent calls have a connection each. */
export class Store {
  #path = process.env.RALLYPOINT_STORE_SOCKET;
  #round = Number(process.env.RALLYPOINT_ROUND);
  #idle = [];
  #timeout;

  /** `timeout`: seconds for calls without a timeout of their own; long enough for a restart of the service. */
  constructor(timeout = 300) {
    this.#timeout = timeout;
  }

  async set(key, value) {
    await this.#call({ op: "set", key }, value);
  }

  async get(key, timeout = this.#timeout) {
    return (await this.#call({ op: "get", key, timeout })).body;
  }

  /** `amount` and the sum: bigint. */
  async add(key, amount) {
    return BigInt((await this.#call({ op: "add", key, amount: BigInt(amount) })).header.value);
  }

  /** The value afterwards; undefined if there is none. */
  async compareSet(key, expected, desired) {
    const { header, body } = await this.#call(
      { op: "compare_set", key, expected_length: expected.length }, Buffer.concat([expected, desired]),
    );
    return header.exists ? body : undefined;
  }

  async wait(keys, timeout = this.#timeout) {
    await this.#call({ op: "wait", keys, timeout });
  }

  async check(keys) {
    return (await this.#call({ op: "check", keys })).header.present;
  }

  async delete(key) {
    return (await this.#call({ op: "delete", key })).header.deleted;
  }

  async keys(prefix = "") {
    const found = [];
    let page = "";
    do {
      const { header, body } = await this.#call({ op: "keys", prefix, page });
      found.push(...JSON.parse(body.toString()));
      page = header.next_page;
    } while (page);
    return found;
  }

  /** Closes the idle connections. */
  close() {
    for (const socket of this.#idle.splice(0)) socket.destroy();
  }

  async #call(fields, body) {
    const call = { timeout: this.#timeout, ...fields, round: this.#round, writer_round: this.#round };
    const socket = this.#idle.pop() ?? connect(this.#path ?? "/nonexistent");
    socket.ref();
    let reply;
    try {
      reply = await exchange(socket, frame(Buffer.from(encode(call)), body), 1000 * call.timeout + GRACE);
    } catch (error) {
      socket.destroy(); // a late reply may follow
      throw new StoreError("unavailable", `${error.message}; whether a write took effect is unknown`);
    }
    if (reply.header.last) socket.destroy();
    else {
      socket.unref();
      socket.once("close", () => (this.#idle = this.#idle.filter((each) => each !== socket)));
      this.#idle.push(socket);
    }
    if (reply.header.error) throw failure(reply.header.error);
    return reply;
  }
}

/** JSON with bigint. */
function encode(call) {
  const fields = Object.entries(call).map(
    ([name, value]) => `${JSON.stringify(name)}:${typeof value === "bigint" ? value : JSON.stringify(value)}`,
  );
  return `{${fields.join(",")}}`;
}

/** Sends a call and returns its reply. */
function exchange(socket, call, timeout) {
  return new Promise((resolve, reject) => {
    let received = [], size = 0, wanted = 8;
    const end = (settle, value) => {
      clearTimeout(timer);
      socket.off("data", onData).off("error", onError).off("close", onClose);
      socket.on("error", () => {});
      settle(value);
    };
    const onError = (error) => end(reject, error);
    const onClose = () => end(reject, new Error("the agent closed the connection"));
    const onData = (part) => {
      received.push(part);
      size += part.length;
      if (size < wanted) return;
      const bytes = Buffer.concat(received);
      received = [bytes];
      const [header, body] = [bytes.readUInt32BE(0), bytes.readUInt32BE(4)];
      if (Math.max(header, body) > MOST_BYTES) return onError(new Error("a frame that is too long"));
      wanted = 8 + header + body;
      if (size < wanted) return;
      try {
        end(resolve, { header: parse(bytes.toString("utf8", 8, 8 + header)), body: bytes.subarray(8 + header) });
      } catch (error) {
        onError(error);
      }
    };
    const timer = setTimeout(() => onError(new Error("the agent gave no answer in time")), timeout);
    socket.on("data", onData).on("error", onError).on("close", onClose);
    socket.write(call);
  });
}
