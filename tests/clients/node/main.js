// A DueMQ client with nothing but generated code.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { strict as assert } from "node:assert";
import { randomInt } from "node:crypto";
import { fileURLToPath } from "node:url";

import { dial } from "./dial.js";

const [nameserver, topic] = process.argv.slice(2);
const protos = fileURLToPath(new URL("../../../protos", import.meta.url));
const names = ["nameserver", "broker", "admin", "timer", "timer_inspector", "error"];
const definition = loader.loadSync(names.map((n) => `duemq/v1/${n}.proto`), {
  includeDirs: [protos], longs: String, enums: String, defaults: true, keepCase: false,
});
const { duemq: { v1 } } = grpc.loadPackageDefinition(definition);

// `storeId`: whom the calls are for; another broker that has the address by now refuses them.
function client(Service, address, storeId) {
  const stub = dial(Service, address);
  const metadata = new grpc.Metadata();
  if (storeId) metadata.set("duemq-store-id", storeId);
  return (method, request) => new Promise((resolve, reject) => {
    const deadline = Date.now() + 30_000;
    stub[method](request, metadata, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

const record = (messageId, body, tag) => ({ messageId, body: Buffer.from(body), key: messageId, tag, bornMs: Date.now() });

const cluster = await client(v1.Nameserver, nameserver)("getCluster", {});
const { address, storeId } = cluster.brokers[0];
const broker = client(v1.Broker, address, storeId);
const description = await client(v1.BrokerAdmin, address, storeId)("createTopic", { topic: { name: topic, queues: 2 }, ifMissing: true });
const queues = description.topic.queues;

// A batch, and again as after a lost answer: stored once.
const producerId = randomInt(2 ** 47);
const batch = { topic, queueId: 0, producerId, records: { records: [
  record("node-1", "one", "a"), record("node-2", "two", "b"), record("node-3", "three", "a")] } };
const other = client(v1.Broker, address, String(BigInt(storeId) ^ 1n));
const elsewhere = await other("send", { batches: [batch] }).then(() => assert.fail("it is for another broker"), (e) => e);
assert.equal(elsewhere.code, grpc.status.UNAVAILABLE);
const first = await broker("send", { batches: [batch] });
const again = await broker("send", { batches: [batch] });
assert(!first.results[0].duplicate && again.results[0].duplicate);
assert.equal(first.results[0].baseOffset, again.results[0].baseOffset);

// Delays: one to be delivered, one to be cancelled.
const delayed = (id, sequence, delay) => ({ topic, queueId: -1, producerId, sequence, delaysMs: [delay],
  records: { records: [record(id, "later", "d")] } });
const timed = await broker("send", { batches: [delayed("node-4", 0, 200), delayed("node-5", 1, 3_600_000)] });
const far = timed.results[1];
const handle = { storeId: timed.storeId, queueId: far.queueId, offset: far.baseOffset, dueMs: far.dueMs[0] };
const shard = cluster.timers.find((t) => far.queueId % t.shards === t.shard);
const answer = await client(v1.Timer, shard.address)("cancel", { handles: [handle] });
assert.equal(answer.results[0].outcome, "CANCELLED");
const found = await client(v1.TimerInspector, shard.address)("getTimers", { handles: [handle] });
assert.equal(found.timers[0].state, "TIMER_CANCELLED");

// Pull everything, tag a and then all.
async function pull(filter, want) {
  const got = new Map();
  const offsets = Array(queues).fill(0);
  while (got.size < want) {
    const response = await broker("pull", { waitMs: 10_000,
      queues: offsets.map((offset, queueId) => ({ topic, queueId, offset, filter })) });
    for (const queue of response.queues) {
      assert.equal(queue.error, null);
      offsets[queue.queueId] = queue.nextOffset;
      for (const r of queue.records?.records ?? []) got.set(r.messageId, r);
    }
  }
  return got;
}
assert.equal((await pull("a", 2)).size, 2);
const all = await pull("*", 4);
assert.equal(all.get("node-1").body.toString(), "one");
assert.equal(all.get("node-4").dueMs, timed.results[0].dueMs[0]);
assert(Number(all.get("node-4").dueMs) <= Date.now());

// A refusal says what is wrong.
const refused = await broker("send", { batches: [{ topic, queueId: 99, records: { records: [record("node-6", "x", "")] } }] })
  .then(() => assert.fail("queue 99 must be refused"), (error) => error);
assert.equal(refused.metadata.get("duemq-error-bin").length, 1);

console.log(JSON.stringify({ ok: true, records: all.size, refused: grpc.status[refused.code] }));
process.exit(0);
