// Timers under keys, with nothing but generated code: schedules, replaces, reschedules, cancels.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { strict as assert } from "node:assert";
import { randomBytes } from "node:crypto";
import { fileURLToPath } from "node:url";
import { crc32 } from "node:zlib";

import { dial } from "./dial.js";

const [nameserver, topic] = process.argv.slice(2);
const protos = fileURLToPath(new URL("../../../protos", import.meta.url));
const definition = loader.loadSync(["nameserver", "timer"].map((n) => `duemq/v1/${n}.proto`), {
  includeDirs: [protos], longs: String, enums: String, defaults: true, keepCase: false,
});
const { duemq: { v1 } } = grpc.loadPackageDefinition(definition);

function client(Service, address) {
  const stub = dial(Service, address);
  return (method, request) => new Promise((resolve, reject) => {
    const deadline = Date.now() + 30_000;
    stub[method](request, new grpc.Metadata(), { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// The shard that keeps a key: CRC-32 of topic, a zero byte and key, modulo the shards that keep keys.
const { timers } = await client(v1.Nameserver, nameserver)("getCluster", {});
const keyShards = timers[0].keyShards || timers[0].shards;
const shardOf = (key) => timers.find((t) => t.shard === crc32(`${topic}\0${key}`) % keyShards);
const shard = client(v1.Timer, shardOf("order-17").address);

const schedule = (body, delay, more = {}) => ({ requestId: randomBytes(16), topic, queueId: -1, delaysMs: [delay],
  records: { records: [{ messageId: body, body: Buffer.from(body), bornMs: Date.now(), timerKey: "order-17" }] }, ...more });

// Scheduled, and again as after a lost answer: the same answer.
const request = schedule("first", 3_600_000);
const first = await shard("schedule", request);
assert.equal(first.results[0].outcome, "SCHEDULED");
assert.deepEqual((await shard("schedule", request)).results, first.results);

// Replaced; or refused where something waits.
const second = await shard("schedule", schedule("second", 7_200_000));
assert.equal(second.results[0].outcome, "REPLACED");
assert.deepEqual(second.results[0].replaced, first.results[0].handle);
const refused = await shard("schedule", schedule("third", 5, { ifAbsent: true }));
assert.equal(refused.results[0].outcome, "EXISTS");
assert.deepEqual(refused.results[0].handle, second.results[0].handle);

// Another due time, by key; then it is cancelled, by key too.
const key = { topic, key: "order-17" };
const moved = await shard("reschedule", { requestId: randomBytes(16), timers: [{ key }], dueMs: [Date.now() + 60_000] });
assert.equal(moved.results[0].outcome, "RESCHEDULED");
assert.notDeepEqual(moved.results[0].handle, second.results[0].handle);
const cancel = { requestId: randomBytes(16), keys: [key] };
assert.equal((await shard("cancel", cancel)).results[0].outcome, "CANCELLED");
assert.equal((await shard("cancel", cancel)).results[0].outcome, "CANCELLED"); // a repeat
assert.equal((await shard("reschedule", { requestId: randomBytes(16), timers: [{ key }], delaysMs: [5] })).results[0].outcome,
  "RESCHEDULE_UNKNOWN");

// The last one is delivered.
assert.equal((await shard("schedule", schedule("fourth", 100))).results[0].outcome, "SCHEDULED");
console.log(JSON.stringify({ ok: true }));
process.exit(0);
