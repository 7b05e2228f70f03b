"""`duemq demo`: a real day of departures through the whole system.

`day` reads the data file and compresses the day, `changes` plans what changes during it (pure),
`run` drives the cluster, `tower` makes the changes, `outage` kills, `ledger` keeps and judges the
books with what `books` checks of the services' own (pure), `live` draws the table, `command` reads
the flags.

nyc-departures-2013-07-10.csv: the 1,004 scheduled departures of 10 July 2013 from the three New
York airports (EWR, JFK, LGA), as published by the US Bureau of Transportation Statistics (on-time
performance data, public domain).  Times are local, HMM; an empty `dep_time` is a cancelled flight,
32 flights have no tail number.
"""
