"""Append-only files: bytes on a disk, and what is left of them after a crash.

Knows no gRPC, no asyncio, no clock, and nothing of messages but their frame.

| module          | what |
|-----------------|------|
| `record`        | entry of a log: header, CRC-32C, padding |
| `frame`         | message frame: a batch of records, the body of an entry |
| `segment`       | one file of a log |
| `log`           | `SegmentedLog`: append, group commit, retention; two writer threads |
| `log_parts`     | how it is read, and opened |
| `replicas`      | `ReplicaLog`, which others hold too; its `epoch` entries; `catching_up` |
| `recovery`      | where a log ends after a crash: torn tail or damage |
| `writer`        | `LogWriter`, the thread that commits groups |
| `durable_mark`  | how far a log is durable |
| `index`         | `FixedIndex`: fixed-size entries by number; written by its owner |
| `consume_queue` | entry of a queue's index |
| `checkpoint`    | small state in one file, replaced as a whole |
| `dirlock`       | one process a directory |
| `starts`        | when the last process of a directory began |
| `disk`          | the seam to the operating system; `open_files` bounds descriptors |
| `errors`        | the tree of what can go wrong |
"""
