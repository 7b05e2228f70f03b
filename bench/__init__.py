"""`duemq bench`: one file a benchmark, each beside its floor.

`command` is the command line, `measures` holds the benchmarks, `matrix` the one that is a table,
`target` the cluster under test, `report` what a run says, `floors` what the bare machine does with
the same bytes, `arrivals` the count of what came.

Every benchmark prints its parameters before it starts, counts what arrived, and fails when
something was lost or came twice.
"""
