// A worker that carries out the steps of `rallypoint conformance --worker`, which it reads from its standard input.
import { createInterface } from "node:readline";
import { Store, StoreError, Timers } from "./rallypoint-worker.mjs";

const timers = new Timers();
const store = new Store();
const hex = (text) => Buffer.from(text, "hex");

const steps = {
  acquire: (token, seconds, scope) => void timers.acquire(Number(seconds), scope, BigInt(token)),
  release: (token) => timers.release(BigInt(token)),
  progress: (step) => timers.progress(BigInt(step)),
  set: (key, value) => store.set(key, hex(value)),
  get: async (key, timeout) => [(await store.get(key, Number(timeout))).toString("hex")],
  add: async (key, amount) => [await store.add(key, BigInt(amount))],
  compare_set: async (key, ...values) => [(await store.compareSet(key, ...values.map(hex)))?.toString("hex") ?? ""],
  wait: (timeout, ...keys) => store.wait(keys, Number(timeout)),
  check: async (...keys) => [Number(await store.check(keys))],
  delete: async (key) => [Number(await store.delete(key))],
  keys: (prefix) => store.keys(prefix),
};

for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...fields] = line.split("\t");
  let result = ["unsupported"];
  try {
    if (Object.hasOwn(steps, name)) result = ["ok", ...((await steps[name](...fields)) ?? [])];
  } catch (error) {
    if (!(error instanceof StoreError)) throw error;
    result = ["error", error.kind, error.message];
  }
  console.log(result.join("\t"));
}
