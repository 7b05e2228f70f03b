//! A DueMQ consumer with nothing but tonic and what it made of protos/: copy it, with `lib.rs`,
//! `build.rs` and `Cargo.toml`, and begin.
//!
//! ```text
//! consumer NAMESERVER GROUP TOPIC COUNT [earliest]
//! ```
//!
//! It reads every queue of a topic by hand (no membership: run one process a group), goes on where
//! the group has committed, prints each message as a JSON line, and ends after COUNT of them.
//! `earliest` begins at the beginning instead.  A message whose body is "fail" is sent back the
//! first time and comes again, a second later, through the group's own topic %RETRY%GROUP.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tonic::Status;
use tonic::transport::Channel;

use clienttest::v1::broker_client::BrokerClient;
use clienttest::v1::nameserver_client::NameserverClient;
use clienttest::v1::*;
use clienttest::{ANSWER_BYTES_MAX, Dialer, Meant, StoreId, answer, describe, refusal};

/// How long a broker may park a pull that finds nothing; at most 30,000.
const WAIT_MS: i32 = 15_000;
/// The same where pulls take turns.
const TURN_MS: i32 = 500;
/// In a pull at most; a topic may have so many on a broker, and there is %RETRY%.
const PULL_QUEUES: usize = 1_024;
/// How often to ask for brokers, addresses and queues that are new.
const ROUTE_EVERY: Duration = Duration::from_secs(5);
const RETRY_DELAY_MS: i64 = 1_000;
const BACKOFF: Duration = Duration::from_millis(500);

/// The application: an error means that it cannot do with a message.
fn process(record: &Record) -> Result<()> {
    let body = str::from_utf8(&record.body)?;
    if body == "fail" && record.attempt == 0 {
        bail!("this body fails once");
    }
    println!("{}", json!({"body": body, "tag": record.tag, "attempt": record.attempt}));
    Ok(())
}

/// Why something was not done.
enum Failure {
    /// The same request can succeed a moment later.
    Again(String),
    /// The topic was deleted, and perhaps made anew: what is known of its queues is over.
    Gone(String),
    /// The same request would be refused again.
    Refused(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (Self::Again(why) | Self::Gone(why) | Self::Refused(why)) = self;
        f.write_str(why)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let why = format!("{}: {}", error.code().as_str_name(), error.message);
        match error.code() {
            ErrorCode::TopicNotFound | ErrorCode::TopicReplaced => Self::Gone(why),
            _ if error.retryable => Self::Again(why),
            _ => Self::Refused(why),
        }
    }
}

impl From<Status> for Failure {
    /// Of a call that failed as a whole.  What no server says may be repeated, whatever its code
    /// (tonic has UNKNOWN where a connection breaks): nothing here is done twice.
    fn from(status: Status) -> Self {
        match refusal(&status) {
            Some(error) => error.into(),
            None => Self::Again(describe(&status)),
        }
    }
}

/// A queue of one broker.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Queue {
    topic: String,
    id: i32,
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.id)
    }
}

/// Where the group stands in a queue.
struct Position {
    /// Tells the topic from a later one of its name; said with each offset.
    topic_id: u64,
    next: i64,
    committed: i64,
    /// Processed, and not committed.
    processed: usize,
    /// Sent back earlier: to be skipped.
    settled: HashSet<i64>,
}

/// What is consumed, for whom.
#[derive(Clone)]
struct Consumption {
    dialer: Dialer,
    group: String,
    topic: String,
    earliest: bool,
    /// How many messages were processed and committed.
    done: mpsc::Sender<usize>,
}

/// Consumes all queues that one broker has of the topic.
struct BrokerLoop {
    consumption: Consumption,
    /// `follow_routes` replaces it.
    route: watch::Receiver<BrokerQueues>,
    /// None: look for queues.
    followed: Option<BrokerQueues>,
    address: String,
    channel: Channel,
    broker: BrokerClient<Meant>,
    positions: HashMap<Queue, Position>,
}

impl BrokerLoop {
    fn new(consumption: Consumption, route: watch::Receiver<BrokerQueues>) -> Result<Self> {
        let BrokerQueues { address, store_id, .. } = route.borrow().clone();
        let channel = consumption.dialer.dial(&address)?;
        Ok(Self {
            broker: broker(&channel, store_id),
            consumption,
            route,
            followed: None,
            address,
            channel,
            positions: HashMap::new(),
        })
    }

    /// Ends where a broker refuses for good, and says why.
    async fn run(mut self) -> String {
        loop {
            match self.step().await {
                Ok(()) => {}
                Err(Failure::Refused(why)) => return format!("{}: {why}", self.address),
                // The next route may tell another address.
                Err(failure) => pause(format!("{}: {failure}", self.address)).await,
            }
        }
    }

    async fn step(&mut self) -> Result<(), Failure> {
        self.follow().await?;
        // One that failed is repeated first: nothing new may come there that brings another.
        if self.commit().await? { self.pull().await } else { Ok(()) }
    }

    /// Does what is new in a route: an address where another replica leads, more queues.
    async fn follow(&mut self) -> Result<(), Failure> {
        let route = self.route.borrow().clone();
        if self.followed.as_ref() == Some(&route) {
            return Ok(());
        }
        if self.address != route.address {
            let dialed = self.consumption.dialer.dial(&route.address);
            self.channel = dialed.map_err(|error| Failure::Again(format!("{error:#}")))?;
            self.address.clone_from(&route.address);
        }
        self.broker = broker(&self.channel, route.store_id);
        self.assign().await?;
        self.followed = Some(route);
        Ok(())
    }

    /// Begins in queues that are new: where the group has committed, or at the beginning.
    async fn assign(&mut self) -> Result<(), Failure> {
        for found in self.offsets(self.consumption.topic.clone()).await? {
            self.begin(found, self.consumption.earliest);
        }
        let retries = self.retries();
        for found in self.offsets(String::new()).await? {
            // This broker's queue of %RETRY% is there once a message was sent back.
            if found.topic == retries.topic {
                self.begin(found, false);
            }
        }
        Ok(())
    }

    async fn offsets(&mut self, topic: String) -> Result<Vec<OffsetResult>, Failure> {
        let request = GetOffsetsRequest { group: self.consumption.group.clone(), topic };
        Ok(answer(self.broker.get_offsets(request)).await?.queues)
    }

    fn begin(&mut self, found: OffsetResult, earliest: bool) {
        let (next, settled) = match earliest {
            true => (0, HashSet::new()),
            false => (found.offset.max(0), found.settled.into_iter().collect()),
        };
        let queue = Queue { topic: found.topic, id: found.queue_id };
        self.positions.entry(queue).or_insert(Position {
            topic_id: found.topic_id,
            next,
            committed: next,
            processed: 0,
            settled,
        });
    }

    fn retries(&self) -> Queue {
        Queue { topic: format!("%RETRY%{}", self.consumption.group), id: 0 }
    }

    /// Stores how far the group is in each queue: the next offset to consume.  False: not in all.
    async fn commit(&mut self) -> Result<bool, Failure> {
        let moved = self.positions.iter().filter(|(_, at)| at.next != at.committed);
        let commits: Vec<_> = moved
            .map(|(queue, at)| OffsetCommit {
                topic: queue.topic.clone(),
                queue_id: queue.id,
                topic_id: at.topic_id,
                offset: at.next,
                ..Default::default()
            })
            .collect();
        if commits.is_empty() {
            return Ok(true);
        }
        let mut all = true;
        let group = self.consumption.group.clone();
        let request = CommitOffsetsRequest { group, commits, ..Default::default() };
        for result in answer(self.broker.commit_offsets(request)).await?.queues {
            let queue = Queue { topic: result.topic, id: result.queue_id };
            let Some(at) = self.positions.get_mut(&queue) else { continue };
            if let Some(error) = result.error {
                self.overcome(&queue, error.into()).await?;
                all = false;
                continue;
            }
            at.committed = at.next;
            let processed = std::mem::take(&mut at.processed);
            // Nobody counts any more: the program is about to end.
            let _ = self.consumption.done.send(processed).await;
        }
        Ok(all)
    }

    /// Polls all queues once: in one long poll, or in several that take turns where they are too
    /// many for one.
    async fn pull(&mut self) -> Result<(), Failure> {
        let queues = self.positions.iter().map(|(queue, at)| QueuePull {
            topic: queue.topic.clone(),
            queue_id: queue.id,
            topic_id: at.topic_id,
            offset: at.next,
            ..Default::default()
        });
        let queues: Vec<_> = queues.collect();
        let wait_ms = if queues.len() > PULL_QUEUES { TURN_MS } else { WAIT_MS };
        for some in queues.chunks(PULL_QUEUES) {
            self.poll(some.to_vec(), wait_ms).await?;
        }
        Ok(())
    }

    /// One long poll, and what it brought, processed.
    async fn poll(&mut self, queues: Vec<QueuePull>, wait_ms: i32) -> Result<(), Failure> {
        let group = self.consumption.group.clone();
        let request = PullRequest { group, queues, wait_ms, ..Default::default() };
        for pulled in answer(self.broker.pull(request)).await?.queues {
            let queue = Queue { topic: pulled.topic.clone(), id: pulled.queue_id };
            let Some(mut at) = self.positions.remove(&queue) else { continue };
            let taken = self.take(&queue, &mut at, pulled).await;
            self.positions.insert(queue.clone(), at);
            if let Err(failure) = taken {
                self.overcome(&queue, failure).await?;
            }
        }
        Ok(())
    }

    /// Does what an answer says of one queue.  After a failure `at` is in front of what failed.
    async fn take(
        &mut self,
        queue: &Queue,
        at: &mut Position,
        pulled: QueueRecords,
    ) -> Result<(), Failure> {
        if let Some(error) = pulled.error {
            if error.code() != ErrorCode::OffsetOutOfRange {
                return Err(error.into());
            }
            // Deleted by age, or beyond the end.
            at.next = at.next.min(pulled.max_offset).max(pulled.min_offset);
            return Ok(());
        }
        let runs = pulled.run_offsets.into_iter().zip(pulled.run_counts);
        let offsets = runs.flat_map(|(first, count)| first..first.saturating_add(count));
        let records = pulled.records.unwrap_or_default().records;
        for (offset, record) in offsets.zip(records) {
            if !at.settled.contains(&offset) {
                match process(&record) {
                    Ok(()) => at.processed += 1,
                    Err(why) => self.send_back(queue, at.topic_id, offset, why).await?,
                }
            }
            at.next = offset + 1;
        }
        at.next = pulled.next_offset;
        Ok(())
    }

    /// Gives a failed message back: stored for later and settled in one step.  Idempotent.
    async fn send_back(
        &mut self,
        queue: &Queue,
        topic_id: u64,
        offset: i64,
        why: anyhow::Error,
    ) -> Result<(), Failure> {
        let message = FailedMessage {
            topic: queue.topic.clone(),
            queue_id: queue.id,
            topic_id,
            offset,
            delay_ms: Some(RETRY_DELAY_MS),
            error: why.to_string(),
            ..Default::default()
        };
        let group = self.consumption.group.clone();
        let request = SendBackRequest { group, messages: vec![message], ..Default::default() };
        for result in answer(self.broker.send_back(request)).await?.results {
            if let Some(error) = result.error {
                return Err(error.into());
            }
        }
        if !self.positions.contains_key(&self.retries()) {
            self.followed = None; // there is such a queue now
        }
        Ok(())
    }

    /// Goes on after what was said of one queue: the others are fine.
    async fn overcome(&mut self, queue: &Queue, failure: Failure) -> Result<(), Failure> {
        let why = format!("{queue}: {failure}");
        match failure {
            Failure::Again(_) => pause(why).await,
            Failure::Gone(_) => {
                self.positions.remove(queue);
                self.followed = None; // begin there again, if the topic was made anew
            }
            Failure::Refused(_) => return Err(Failure::Refused(why)),
        }
        Ok(())
    }
}

async fn pause(why: String) {
    eprintln!("{why}");
    sleep(BACKOFF).await;
}

fn broker(channel: &Channel, store_id: u64) -> BrokerClient<Meant> {
    BrokerClient::new(StoreId(store_id).at(channel.clone()))
        .max_decoding_message_size(ANSWER_BYTES_MAX)
}

/// Has a loop for each broker that a route ever named: one that is missing for a while is not gone.
async fn follow_routes(nameserver: &str, consumption: Consumption) -> Result<Infallible> {
    let mut names = NameserverClient::new(StoreId(0).at(consumption.dialer.dial(nameserver)?))
        .max_decoding_message_size(ANSWER_BYTES_MAX);
    let mut routes: HashMap<String, watch::Sender<BrokerQueues>> = HashMap::new();
    let mut loops = JoinSet::<String>::new();
    let mut turns = interval(ROUTE_EVERY);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = turns.tick() => {}
            Some(ended) = loops.join_next() => bail!(ended?),
        }
        let request = GetRouteRequest { topic: consumption.topic.clone() };
        let brokers = match answer(names.get_route(request)).await {
            Ok(route) => route.brokers,
            Err(status) if routes.is_empty() => bail!("{}", Failure::from(status)),
            Err(_) => continue, // with what is known
        };
        for route in brokers {
            if let Some(known) = routes.get(&route.broker) {
                known.send_replace(route);
                continue;
            }
            let name = route.broker.clone();
            let (sender, receiver) = watch::channel(route);
            match BrokerLoop::new(consumption.clone(), receiver) {
                Ok(new) => {
                    loops.spawn(new.run());
                    routes.insert(name, sender);
                }
                Err(error) => eprintln!("{name}: {error:#}"), // the next route may be a better one
            }
        }
    }
}

async fn count_down(mut left: usize, mut done: mpsc::Receiver<usize>) {
    while left > 0 {
        let Some(count) = done.recv().await else { return };
        left = left.saturating_sub(count);
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [nameserver, group, topic, count, start @ ..] = &arguments[..] else {
        bail!("consumer NAMESERVER GROUP TOPIC COUNT [earliest]");
    };
    let count = count.parse().context("COUNT")?;
    let (done, counted) = mpsc::channel(1);
    let consumption = Consumption {
        dialer: Dialer::from_env()?,
        group: group.clone(),
        topic: topic.clone(),
        earliest: start == ["earliest"],
        done,
    };
    tokio::select! {
        ended = follow_routes(nameserver, consumption) => match ended? {},
        () = count_down(count, counted) => Ok(()),
    }
}
