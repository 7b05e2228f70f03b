"""`duemq bench timers-matrix`: what the timer service does, by how many timers are pending.

`row` measures one size on a cluster of its own, `trickle` is another topic's timers meanwhile,
`segments` weighs the files, `table` puts the rows beside each other (pure).
"""
