"""Process groups, and the parallelisms that split a model over them.

One module per parallelism (`sharding`, `tensor`, `pipeline`, `expert`) and per way to save memory
or time (`recompute`, `offload`, `float8`), beside what starts and watches processes (`environment`,
`device`, `launch`, `meeting`, `mesh`, `peers`).
"""
