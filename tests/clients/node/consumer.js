// A DueMQ consumer with nothing but @grpc/grpc-js and protos/: copy it, with dial.js, and begin.
//
//   node consumer.js NAMESERVER GROUP TOPIC COUNT [earliest]
//
// It reads every queue of a topic by hand (no membership: run one process a group), goes on where the group has
// committed, prints each message as a JSON line, and ends after COUNT of them.  `earliest` begins at the beginning
// instead.  A message whose body is "fail" is sent back the first time and comes again, a second later, through the
// group's own topic %RETRY%GROUP.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import { dial } from "./dial.js";

const WAIT_MS = 15_000; // how long a broker may park a pull that finds nothing; at most 30,000
const TURN_MS = 500; // the same where pulls take turns
const PULL_QUEUES = 1_024; // in a pull at most; a topic may have so many on a broker, and there is %RETRY%
const TIMEOUT_MS = 20_000; // of a call: longer than WAIT_MS
const ROUTE_MS = 5_000; // how often to ask for brokers, addresses and queues that are new
const RETRY_DELAY_MS = 1_000;
const BACKOFF_MS = 500;
// The topic was deleted, and perhaps made anew: what is known of its queues is over.
const GONE = new Set(["TOPIC_NOT_FOUND", "TOPIC_REPLACED"]);

// 64-bit values come as strings: ids of topics and stores use all 64.  Offsets stay below 2^53, which numbers hold exactly.
const definition = loader.loadSync(["duemq/v1/nameserver.proto", "duemq/v1/broker.proto", "duemq/v1/error.proto"], {
  includeDirs: [fileURLToPath(new URL("../../../protos", import.meta.url))],
  longs: String, enums: String, defaults: true, keepCase: false,
});
const { duemq: { v1 } } = grpc.loadPackageDefinition(definition);

// `storeId`: whom the address belongs to, as the route tells; another broker that has it by now refuses every call.
function client(Service, address, storeId = "0") {
  const stub = dial(Service, address);
  const metadata = new grpc.Metadata();
  if (storeId !== "0") metadata.set("duemq-store-id", storeId);
  const call = (method, request) => new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + TIMEOUT_MS };
    stub[method](request, metadata, options, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
  return { call, close: () => stub.close() };
}

// The application: throws when it cannot do with a message.
function handle(record) {
  const body = record.body.toString();
  if (body === "fail" && record.attempt === 0) throw new Error("this body fails once");
  console.log(JSON.stringify({ body, tag: record.tag, attempt: record.attempt }));
}

// A broker refuses for good; the same request would be refused again.
class Refused extends Error {}

// This topic is no more; another one may have its name.
class Gone extends Error {}

// Returns, a moment later, where the same request can succeed now; else throws.
async function again(what, error) {
  if (GONE.has(error.code)) throw new Gone();
  if (!error.retryable) throw new Refused(`${what}: ${error.code}: ${error.message}`);
  console.error(`${what}: ${error.message}`);
  await sleep(BACKOFF_MS);
}

// Consumes all queues that one broker has of the topic.
class BrokerLoop {
  constructor(route, group, topic, earliest, processed) {
    Object.assign(this, { route, group, topic, earliest, processed }); // the route is replaced as it changes
    this.retries = `%RETRY%${group}`;
    this.followed = ""; // the route as it was; empty: look for queues
    this.positions = new Map(); // "topic/queue" → { topic, queueId, topicId, next, committed, processed, settled }
  }

  async run() {
    for (;;) {
      try {
        await this.follow(this.route);
        // Where a commit failed as a whole: nothing new may come there that brings another.
        for (const at of this.positions.values()) await this.unlessGone(at, () => this.commit(at));
        await this.pull();
      } catch (error) { // the call as a whole failed; everything here may be repeated: nothing is done twice
        if (error.code === undefined) throw error;
        const refusal = refusalOf(error);
        if (refusal && !refusal.retryable && !GONE.has(refusal.code)) throw new Refused(describe(error));
        console.error(describe(error));
        await sleep(BACKOFF_MS);
      }
    }
  }

  // Does what is new in a route: an address where another replica leads, more queues.
  async follow(route) {
    const wanted = JSON.stringify(route);
    if (wanted === this.followed) return;
    if (route.address !== this.address || route.storeId !== this.storeId) {
      this.broker?.close();
      this.broker = client(v1.Broker, route.address, route.storeId);
      Object.assign(this, { address: route.address, storeId: route.storeId });
    }
    await this.assign();
    this.followed = wanted;
  }

  // Begins in queues that are new: where the group has committed, or at the beginning.
  async assign() {
    const { group, topic } = this;
    const ours = await this.broker.call("getOffsets", { group, topic });
    for (const found of ours.queues) this.begin(this.earliest ? { ...found, offset: 0, settled: [] } : found);
    const known = await this.broker.call("getOffsets", { group });
    // This broker's queue of %RETRY% is there once a message was sent back.
    for (const found of known.queues) if (found.topic === this.retries) this.begin(found);
  }

  // `topicId` tells the topic from a later one of its name, and is said with each offset; what is `settled` was
  // sent back earlier, and is to be skipped.
  begin({ topic, queueId, topicId, offset, settled }) {
    const name = `${topic}/${queueId}`;
    if (this.positions.has(name)) return;
    const next = Math.max(Number(offset), 0);
    const at = { name, topic, queueId, topicId, next, committed: next, processed: 0 };
    this.positions.set(name, { ...at, settled: new Set(settled.map(Number)) });
  }

  // Polls all queues once: in one long poll, or in several that take turns where they are too many for one.
  async pull() {
    const queues = [...this.positions.values()].map(({ topic, queueId, topicId, next }) => (
      { topic, queueId, topicId, offset: next }));
    const waitMs = queues.length > PULL_QUEUES ? TURN_MS : WAIT_MS;
    for (let first = 0; first < queues.length; first += PULL_QUEUES) {
      await this.poll({ group: this.group, waitMs, queues: queues.slice(first, first + PULL_QUEUES) });
    }
  }

  // One long poll, and what it brought: processed, then committed.
  async poll(request) {
    const answer = await this.broker.call("pull", request);
    for (const pulled of answer.queues) {
      const at = this.positions.get(`${pulled.topic}/${pulled.queueId}`);
      await this.unlessGone(at, () => this.take(at, pulled));
    }
  }

  async unlessGone(at, act) {
    try {
      await act();
    } catch (error) {
      if (!(error instanceof Gone)) throw error;
      this.positions.delete(at.name); // begin there again, if the topic was made anew
      this.followed = "";
    }
  }

  // Does what an answer says of one queue.
  async take(at, pulled) {
    if (pulled.error) { // one queue's: the others are fine
      await this.refused(at, pulled);
      return;
    }
    at.processed += await this.consume(at, pulled);
    at.next = Number(pulled.nextOffset);
    await this.commit(at);
  }

  // Processes the records of one queue; what fails is sent back before it is committed.
  async consume(at, pulled) {
    const offsets = pulled.runOffsets.flatMap((first, run) =>
      Array.from({ length: Number(pulled.runCounts[run]) }, (_, step) => Number(first) + step));
    let count = 0;
    for (const [index, record] of (pulled.records?.records ?? []).entries()) {
      if (at.settled.has(offsets[index])) continue;
      try {
        handle(record);
        count += 1;
      } catch (error) {
        await this.sendBack(at, offsets[index], error.message);
      }
    }
    return count;
  }

  // Gives a failed message back: stored for later and settled in one step.  Idempotent.
  async sendBack({ name, topic, queueId, topicId }, offset, error) {
    const messages = [{ topic, queueId, topicId, offset, error, delayMs: RETRY_DELAY_MS }];
    for (;;) {
      const [result] = (await this.broker.call("sendBack", { group: this.group, messages })).results;
      if (!result.error) break;
      await again(`${name} at ${offset} was not taken back`, result.error);
    }
    if (!this.positions.has(`${this.retries}/0`)) this.followed = ""; // there is such a queue now
  }

  // Stores how far the group is: the next offset to consume.
  async commit(at) {
    const { name, topic, queueId, topicId, next } = at;
    if (at.committed === next) return;
    const request = { group: this.group, commits: [{ topic, queueId, topicId, offset: next }] };
    for (;;) {
      const [result] = (await this.broker.call("commitOffsets", request)).queues;
      if (!result.error) break;
      await again(`${name} was not committed`, result.error);
    }
    at.committed = next;
    this.processed(at.processed);
    at.processed = 0;
  }

  async refused(at, { error, minOffset, maxOffset }) {
    if (error.code === "OFFSET_OUT_OF_RANGE") { // deleted by age, or beyond the end
      at.next = Math.max(Number(minOffset), Math.min(at.next, Number(maxOffset)));
    } else {
      await again(at.name, error);
    }
  }
}

// What a server says of a call that failed: a duemq.v1.Error.  Nothing where the failure is gRPC's own.
function refusalOf(error) {
  const [trailer] = error.metadata?.get("duemq-error-bin") ?? [];
  return trailer && definition["duemq.v1.Error"].deserialize(trailer);
}

function describe(error) {
  const refusal = refusalOf(error);
  return refusal ? `${refusal.code}: ${refusal.message}` : `${grpc.status[error.code]}: ${error.details}`;
}

const [nameserver, group, topic, count, start] = process.argv.slice(2);
const names = client(v1.Nameserver, nameserver);
const end = (code, message) => { if (message) console.error(message); process.exit(code); };
let left = Number(count);
const processed = (some) => {
  left -= some;
  if (left <= 0) end(0);
};
for (const loops = new Map(); ; await sleep(ROUTE_MS)) { // by broker
  const route = await names.call("getRoute", { topic }).catch((error) => {
    if (loops.size === 0) end(1, describe(error));
    return { brokers: [] }; // go on with what is known
  });
  for (const part of route.brokers) {
    const known = loops.get(part.broker);
    if (known) {
      known.route = part;
      continue;
    }
    const loop = new BrokerLoop(part, group, topic, start === "earliest", processed);
    loops.set(part.broker, loop);
    loop.run().catch((error) => end(1, error.message));
  }
}
