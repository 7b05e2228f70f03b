"""Consumers.  `push` and `pull` are the asyncio ones, `blocking` the others; see duemq.aio, duemq.

push.py                     a push consumer's life
   └── group/group_share.py its share of the group's queues: taken over, consumed, given up
       ├── holdings.py      pure: which queues are held, and what is to be done about them
       ├── membership.py    the group: one stream to its coordinator
       │   └── standing.py  pure: whom it asks, what an error means
       ├── committing.py    how far its queues are
       └── send_backs.py    what failed goes back to its broker
   └── broadcast/broadcast_share.py   in its place: all queues, offsets in a file
       └── offset_file.py   which is replaced as a whole
fetching/                   from brokers to process queues
   ├── offset_client.py     where queues begin, how far they are
   ├── subscription.py      what is asked for; filter_check.py: what brokers say to it
   ├── fetcher.py           one pull stream a broker, several queues a request
   ├── receiving.py         from its answers to messages
   └── process_queue.py     pure: unfinished messages, commit point, flow control
delivery/                   from process queues to callbacks
   ├── seams.py             what a share asks of the next two
   ├── concurrent.py        chunks, failures, what takes long
   │   ├── chunk_work.py    a worker's way through a chunk
   │   └── stalls.py        pure: who has been busy with one message for how long
   ├── in_place.py          in order, and broadcast: what failed is tried again here
   │   ├── ordered_runs.py  what a worker does in one go
   │   ├── order_lanes.py   pure: which message may be next
   │   └── lease.py         pure: whether the queues are still ours
   ├── workers.py           for both: threads or tasks that call the application (calling.py)
   └── failure_log.py       pure: which failures are worth a line
pull.py                     the application says what and when; on fetching/
settings.py                 all that can be set; duemq.outcomes: what an exception asks for
"""
