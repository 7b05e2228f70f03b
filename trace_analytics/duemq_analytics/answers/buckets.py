"""Buckets of time to group by, several lengths in one pass."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F

MINUTE_S = 60

WHOLE_S = 0
"""Instead of a length: all of the time is one bucket."""

_US_PER_S = 1_000_000


def bucketed(time: Column, lengths_s: Sequence[int]) -> Column:
    """For `select`: repeats a row for each length, as columns bucket_s and bucket_ts.

    bucket_ts is the start of the bucket of that length that the time falls into (buckets begin at
    whole multiples since the epoch); null for WHOLE_S.
    """
    micros = F.unix_micros(time)
    starts = [
        F.struct(
            F.lit(length).alias("bucket_s"),
            F.timestamp_micros(
                micros - F.pmod(micros, F.lit(length * _US_PER_S))
                if length != WHOLE_S
                else F.lit(None).cast("bigint")
            ).alias("bucket_ts"),
        )
        for length in lengths_s
    ]
    return F.inline(F.array(*starts))
