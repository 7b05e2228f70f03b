"""Consumers.  `push` and `pull` are the asyncio ones, `blocking` the others; see duemq.aio, duemq.

push.py ── membership.py    the group: one stream to its coordinator
   │  └─── offsets.py       where queues begin, how far they are
   ├── fetcher.py           one pull stream a broker, several queues a request
   ├── receiving.py         from its answers to messages
   ├── dispatcher.py        chunks, failures tried again
   │      └── workers.py    threads or tasks that call the application
   └── duemq.process_queue  pure: unfinished messages, commit point, flow control
"""
