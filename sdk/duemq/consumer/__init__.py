"""Consumers.  `push` and `pull` are the asyncio ones, `blocking` the others; see duemq.aio, duemq.

push.py                     a push consumer's life
   └── share.py             its share of the group's queues: taken over, consumed, given up
       ├── membership.py    the group: one stream to its coordinator
       ├── holding.py       a queue in its hands; commits
       ├── offsets.py       where queues begin, how far they are
       ├── fetcher.py       one pull stream a broker, several queues a request
       ├── receiving.py     from its answers to messages
       ├── dispatching.py   the seam to the next two
       ├── dispatcher.py    chunks, failures, what takes long
       │   ├── work.py      a worker's way through a chunk
       │   └── stalls.py    pure: who has been busy with one message for how long
       ├── ordered.py       the same in order: one of a queue, or of a key, at a time
       │   ├── runs.py      what a worker does in one go
       │   ├── lanes.py     pure: which message may be next
       │   └── lease.py     pure: whether the queues are still ours
       ├── workers.py       for both: threads or tasks that call the application (calling.py)
       ├── outcomes.py      pure: what an exception asks for
       │   └── failure_log.py   pure: which of them are worth a line
       └── settler.py       what failed goes back to its broker
   └── broadcast.py         in share.py's place: all queues, offsets in a file
       └── offset_file.py   which is replaced as a whole
pull.py                     the application says what and when; on offsets, fetcher, receiving
duemq.consumer.fetching.process_queue         pure: unfinished messages, commit point, flow control
"""
