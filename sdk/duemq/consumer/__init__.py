"""Consumers.  `push` and `pull` are the asyncio ones, `blocking` the others; see duemq.aio, duemq.

push.py                     a push consumer's life
   └── share.py             its share of the group's queues: taken over, consumed, given up
       ├── membership.py    the group: one stream to its coordinator
       ├── holding.py       a queue in its hands; commits
       ├── offsets.py       where queues begin, how far they are
       ├── fetcher.py       one pull stream a broker, several queues a request
       ├── receiving.py     from its answers to messages
       └── dispatcher.py    chunks, failures tried again
           └── workers.py   threads or tasks that call the application
pull.py                     the application says what and when; on offsets, fetcher, receiving
duemq.process_queue         pure: unfinished messages, commit point, flow control
"""
