"""What leaves when, and where to: plain Python.  `now_ms` and events in, a `Step` out.

    backlog ──► frame ──► in flight ──► answer: settled, or back to the backlog
    lanes, pools          a broker's

`pump` owns the others; `duemq.producing.sender` runs it.
"""
