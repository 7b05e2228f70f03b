//! A DueMQ client with nothing but generated code: `client NAMESERVER TOPIC`.

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use tonic::transport::Channel;
use tonic::{Code, Status};

use clienttest::v1::broker_admin_client::BrokerAdminClient;
use clienttest::v1::broker_client::BrokerClient;
use clienttest::v1::nameserver_client::NameserverClient;
use clienttest::v1::timer_client::TimerClient;
use clienttest::v1::timer_inspector_client::TimerInspectorClient;
use clienttest::v1::*;
use clienttest::{ANSWER_BYTES_MAX, Dialer, Meant, StoreId, answer, refusal};

const DELAY_MS: i64 = 200;
const HOUR_MS: i64 = 3_600_000;
const WAIT_MS: i32 = 10_000;

fn now_ms() -> Result<i64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(i64::try_from(since.as_millis())?)
}

fn record(id: &str, body: &str, tag: &str) -> Result<Record> {
    Ok(Record {
        message_id: id.into(),
        body: body.into(),
        key: id.into(),
        tag: tag.into(),
        born_ms: now_ms()?,
        ..Default::default()
    })
}

fn broker(channel: &Channel, store_id: u64) -> BrokerClient<Meant> {
    BrokerClient::new(StoreId(store_id).at(channel.clone()))
        .max_decoding_message_size(ANSWER_BYTES_MAX)
}

/// Sends batches to one broker, and reads what it has of a topic.
struct Client {
    broker: BrokerClient<Meant>,
    topic: String,
    queues: i32,
    producer_id: u64,
}

impl Client {
    fn batch(&self, queue_id: i32, records: Vec<Record>) -> Batch {
        Batch {
            topic: self.topic.clone(),
            queue_id,
            producer_id: self.producer_id,
            records: Some(RecordBatch { records }),
            ..Default::default()
        }
    }

    async fn send(&mut self, batches: Vec<Batch>) -> Result<SendResponse, Status> {
        let request = SendRequest { request_id: 0, batches };
        answer(self.broker.send(request)).await
    }

    /// A batch, and again as after a lost answer: stored once.
    async fn send_and_repeat(&mut self, mut another: BrokerClient<Meant>) -> Result<()> {
        let records = vec![
            record("rust-1", "one", "a")?,
            record("rust-2", "two", "b")?,
            record("rust-3", "three", "a")?,
        ];
        let batches = vec![self.batch(0, records)];
        let request = SendRequest { request_id: 0, batches: batches.clone() };
        let misled = answer(another.send(request)).await.err().map(|status| status.code());
        ensure!(misled == Some(Code::Unavailable), "a batch for another broker was taken");
        let first = self.send(batches.clone()).await?;
        let again = self.send(batches).await?;
        let [first] = &first.results[..] else { bail!("a batch has no result") };
        let [again] = &again.results[..] else { bail!("a batch has no result") };
        ensure!(!first.duplicate && again.duplicate, "the repeated batch is no duplicate");
        ensure!(first.base_offset == again.base_offset, "a batch has two offsets");
        Ok(())
    }

    /// Two delayed messages: when the first is due, and the handle of the second.
    async fn send_delayed(&mut self) -> Result<(i64, TimerHandle)> {
        let delayed = |id, sequence, delay_ms| -> Result<Batch> {
            let batch = self.batch(-1, vec![record(id, "later", "d")?]);
            Ok(Batch { sequence, delays_ms: vec![delay_ms], ..batch })
        };
        let batches = vec![delayed("rust-4", 0, DELAY_MS)?, delayed("rust-5", 1, HOUR_MS)?];
        let sent = self.send(batches).await?;
        let [near, far] = &sent.results[..] else { bail!("a batch has no result") };
        let handle = TimerHandle {
            store_id: sent.store_id,
            queue_id: far.queue_id,
            offset: far.base_offset,
            due_ms: *far.due_ms.first().context("no due time")?,
        };
        Ok((*near.due_ms.first().context("no due time")?, handle))
    }

    /// Pulls all queues from the beginning until there are so many records.
    async fn pull(&mut self, filter: &str, count: usize) -> Result<HashMap<String, Record>> {
        let mut queues: Vec<QueuePull> = (0..self.queues)
            .map(|queue_id| QueuePull {
                topic: self.topic.clone(),
                queue_id,
                filter: filter.into(),
                ..Default::default()
            })
            .collect();
        let mut found = HashMap::new();
        while found.len() < count {
            let request =
                PullRequest { queues: queues.clone(), wait_ms: WAIT_MS, ..Default::default() };
            for pulled in answer(self.broker.pull(request)).await?.queues {
                ensure!(pulled.error.is_none(), "queue {}: {:?}", pulled.queue_id, pulled.error);
                let queue = queues.iter_mut().find(|queue| queue.queue_id == pulled.queue_id);
                queue.context("no such queue")?.offset = pulled.next_offset;
                let records = pulled.records.unwrap_or_default().records;
                found.extend(records.into_iter().map(|record| (record.message_id.clone(), record)));
            }
        }
        Ok(found)
    }

    /// A refusal says what is wrong.
    async fn be_refused(&mut self) -> Result<Code> {
        let batch = self.batch(99, vec![record("rust-6", "x", "")?]);
        let status = self.send(vec![batch]).await.err().context("queue 99 took a batch")?;
        let error = refusal(&status).context("a refusal has a trailer")?;
        ensure!(error.field == "queue_id" && error.value == "99", "refused for {error:?}");
        Ok(status.code())
    }
}

/// Cancels at the shard that serves the message's queue.
async fn cancel(dialer: &Dialer, timers: &[TimerInstance], handle: TimerHandle) -> Result<()> {
    let shard = timers
        .iter()
        .find(|timer| handle.queue_id.checked_rem(timer.shards) == Some(timer.shard))
        .context("no shard serves the queue")?;
    let channel = StoreId(0).at(dialer.dial(&shard.address)?);
    let mut timer = TimerClient::new(channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
    let request = CancelRequest { handles: vec![handle], ..Default::default() };
    let cancelled = answer(timer.cancel(request)).await?;
    let outcome = cancelled.results.first().context("no outcome")?.outcome();
    ensure!(outcome == CancelOutcome::Cancelled, "a pending message is {outcome:?}");

    let mut inspector =
        TimerInspectorClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
    let request = GetTimersRequest { handles: vec![handle] };
    let found = answer(inspector.get_timers(request)).await?;
    let state = found.timers.first().context("no timer")?.state();
    ensure!(state == TimerState::TimerCancelled, "a cancelled message is {state:?}");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(nameserver), Some(topic)) = (arguments.next(), arguments.next()) else {
        bail!("client NAMESERVER TOPIC");
    };
    let dialer = Dialer::from_env()?;
    let mut names = NameserverClient::new(StoreId(0).at(dialer.dial(&nameserver)?))
        .max_decoding_message_size(ANSWER_BYTES_MAX);
    let cluster = answer(names.get_cluster(GetClusterRequest {})).await?;
    let instance = cluster.brokers.first().context("no broker is there")?;
    let channel = dialer.dial(&instance.address)?;

    let mut admin = BrokerAdminClient::new(StoreId(instance.store_id).at(channel.clone()))
        .max_decoding_message_size(ANSWER_BYTES_MAX);
    let config = TopicConfig { name: topic.clone(), queues: 2, ..Default::default() };
    let request = CreateTopicRequest { topic: Some(config), if_missing: true };
    let made = answer(admin.create_topic(request)).await?;

    let mut client = Client {
        broker: broker(&channel, instance.store_id),
        topic,
        queues: made.topic.context("a topic without settings")?.queues,
        producer_id: getrandom::u64()? >> 1,
    };
    client.send_and_repeat(broker(&channel, instance.store_id.wrapping_add(1))).await?;
    let (due_ms, handle) = client.send_delayed().await?;
    cancel(&dialer, &cluster.timers, handle).await?;

    let tagged = client.pull("a", 2).await?;
    ensure!(tagged.len() == 2, "{} records have tag a", tagged.len());
    let all = client.pull("*", 4).await?;
    let found = |id| all.get(id).with_context(|| format!("{id} was not delivered"));
    ensure!(found("rust-1")?.body == b"one", "another body than was sent");
    ensure!(found("rust-2")?.tag == "b", "another tag than was sent");
    ensure!(found("rust-4")?.due_ms == due_ms, "the delayed record has another due time");
    ensure!(due_ms <= now_ms()?, "the delayed record is early");

    let refused = client.be_refused().await?;
    println!("{}", json!({"ok": true, "records": all.len(), "refused": format!("{refused:?}")}));
    Ok(())
}
