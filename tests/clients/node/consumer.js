// A DueMQ consumer with nothing but @grpc/grpc-js and protos/: copy it and begin.
//
//   node consumer.js NAMESERVER GROUP TOPIC COUNT [earliest]
//
// It reads every queue of a topic by hand (no membership: run one process a group), goes on where the group has
// committed, prints each message as a JSON line, and ends after COUNT of them.  `earliest` seeks to the beginning
// first.  A message whose body is "fail" is sent back the first time and comes again, a second later, through the
// group's own topic %RETRY%GROUP.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

const WAIT_MS = 15_000; // how long a broker may park a pull that finds nothing; at most 30,000
const TIMEOUT_MS = 20_000; // of a call: longer than WAIT_MS
const RETRY_DELAY_MS = 1_000;
const BACKOFF_MS = 500;
const OPTIONS = { "grpc.max_receive_message_length": 16 << 20 }; // a pull answers up to 8 MiB

// Offsets are 64-bit.  As numbers they are exact up to 2^53, which no queue reaches.
const definition = loader.loadSync(["duemq/v1/nameserver.proto", "duemq/v1/broker.proto", "duemq/v1/error.proto"], {
  includeDirs: [fileURLToPath(new URL("../../../protos", import.meta.url))],
  longs: Number, enums: String, defaults: true, keepCase: false,
});
const { duemq: { v1 } } = grpc.loadPackageDefinition(definition);

function client(Service, address) {
  const stub = new Service(address, grpc.credentials.createInsecure(), OPTIONS);
  return (method, request) => new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + TIMEOUT_MS };
    stub[method](request, new grpc.Metadata(), options, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// The application: throws when it cannot do with a message.
function handle(record) {
  const body = record.body.toString();
  if (body === "fail" && record.attempt === 0) throw new Error("this body fails once");
  console.log(JSON.stringify({ body, tag: record.tag, attempt: record.attempt }));
}

// Consumes all queues that one broker has of the topic: one long poll for all of them.
class BrokerLoop {
  constructor(address, group, topic, queues, processed) {
    this.call = client(v1.Broker, address);
    Object.assign(this, { group, topic, queues, processed });
    this.retries = `%RETRY%${group}`;
    this.positions = new Map(); // "topic/queue" → { topic, queueId, offset, settled }
  }

  async run(earliest) {
    for (let assigned = false; ;) {
      try {
        if (!assigned) await this.assign(earliest);
        assigned = true;
        await this.pull();
      } catch (error) { // the call as a whole failed; everything here may be repeated: nothing is done twice
        if (error.code === undefined) throw error;
        console.error(describe(error));
        await sleep(BACKOFF_MS);
      }
    }
  }

  // Begins where the group has committed; a queue without an offset at the beginning.
  async assign(earliest) {
    const known = (await this.call("getOffsets", { group: this.group })).queues;
    for (let queueId = 0; queueId < this.queues; queueId += 1) this.seek(this.topic, queueId, 0);
    for (const { topic, queueId, offset, settled } of known) {
      // This broker's queue of %RETRY% is there once a message was sent back.
      if (topic === this.retries) this.seek(topic, queueId, Math.max(offset, 0), settled);
      if (topic === this.topic && !earliest) this.seek(topic, queueId, Math.max(offset, 0), settled);
    }
  }

  // Goes on there; commit to make it last.  `settled`: offsets that were sent back earlier and are to be skipped.
  seek(topic, queueId, offset, settled = []) {
    this.positions.set(`${topic}/${queueId}`, { topic, queueId, offset, settled: new Set(settled) });
  }

  // One long poll, and what it brought: processed, then committed.
  async pull() {
    const queues = [...this.positions.values()].map(({ topic, queueId, offset }) => ({ topic, queueId, offset }));
    const answer = await this.call("pull", { group: this.group, waitMs: WAIT_MS, queues });
    for (const pulled of answer.queues) {
      const position = this.positions.get(`${pulled.topic}/${pulled.queueId}`);
      if (pulled.error) { // one queue's: the others are fine
        await this.refused(position, pulled);
        continue;
      }
      const count = await this.consume(position, pulled);
      position.offset = pulled.nextOffset;
      await this.commit(position);
      this.processed(count);
    }
  }

  // Processes the records of one queue; what fails is sent back before it is committed.
  async consume(position, pulled) {
    const offsets = pulled.runOffsets.flatMap((first, run) =>
      Array.from({ length: pulled.runCounts[run] }, (_, step) => first + step));
    let count = 0;
    for (const [index, record] of (pulled.records?.records ?? []).entries()) {
      if (position.settled.has(offsets[index])) continue;
      try {
        handle(record);
        count += 1;
      } catch (error) {
        await this.sendBack(position, offsets[index], error.message);
      }
    }
    return count;
  }

  // Gives a failed message back: stored for later and settled in one step.  Idempotent.
  async sendBack({ topic, queueId }, offset, error) {
    const messages = [{ topic, queueId, offset, error, delayMs: RETRY_DELAY_MS }];
    const [result] = (await this.call("sendBack", { group: this.group, messages })).results;
    if (result.error) throw new Error(`${topic}/${queueId} at ${offset} was not taken back: ${result.error.message}`);
    if (!this.positions.has(`${this.retries}/0`)) this.seek(this.retries, 0, 0);
  }

  // Stores how far the group is: the next offset to consume.
  async commit({ topic, queueId, offset }) {
    const request = { group: this.group, commits: [{ topic, queueId, offset }] };
    const [result] = (await this.call("commitOffsets", request)).queues;
    if (result.error) console.error(`${topic}/${queueId} not committed: ${result.error.message}`);
  }

  // An error in band.  `retryable` says whether the same request can succeed later.
  async refused(position, { error, minOffset, maxOffset }) {
    if (error.code === "OFFSET_OUT_OF_RANGE") { // deleted by age, or beyond the end
      position.offset = Math.max(minOffset, Math.min(position.offset, maxOffset));
    } else if (error.retryable) {
      await sleep(BACKOFF_MS);
    } else {
      throw new Error(`${position.topic}/${position.queueId}: ${error.code}: ${error.message}`);
    }
  }
}

// What a failed call says.  The trailer `duemq-error-bin` holds a whole duemq.v1.Error for those who decode it.
function describe(error) {
  return `${grpc.status[error.code]}: ${error.details}`;
}

const [nameserver, group, topic, count, start] = process.argv.slice(2);
let left = Number(count);
const end = (code, message) => { if (message) console.error(message); process.exit(code); };
const route = await client(v1.Nameserver, nameserver)("getRoute", { topic }).catch((error) => end(1, describe(error)));
for (const { address, queues } of route.brokers) {
  const loop = new BrokerLoop(address, group, topic, queues, (processed) => {
    left -= processed;
    if (left <= 0) end(0);
  });
  loop.run(start === "earliest").catch((error) => end(1, error.message));
}
