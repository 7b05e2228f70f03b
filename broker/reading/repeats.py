"""What the answer to a repeat says of the batch that was stored before."""

from duemq.errors import Corrupt, OutOfSequence, Unavailable
from duemq_server.broker.store.producers import StoredPlace
from duemq_server.storage import frame
from duemq_server.storage.errors import DiskFull, StorageError
from duemq_server.storage.log_parts.log_reader import LogReader


def due_of(log: LogReader, stored: StoredPlace) -> bytes:
    """Due times of a stored batch as packed i64.

    Any thread, once the batch is durable.  Raises OutOfSequence if retention has removed it.
    """
    try:
        entry = log.read_entry(stored.position)
    except IndexError as error:
        raise OutOfSequence(
            "sequence: the batch was stored, but is no longer kept; its due times are unknown",
            field="sequence",
        ) from error
    except DiskFull as error:  # too many open files
        raise Unavailable(str(error)) from error
    except (StorageError, OSError) as error:
        raise Corrupt(f"{type(error).__name__}: {error}") from error
    return frame.decode(entry.body).due_ms.tobytes()
