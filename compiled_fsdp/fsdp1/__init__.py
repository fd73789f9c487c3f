"""The FSDP1 front end: `FullyShardedDataParallel` on the same units, ops, runtime and passes as
`fully_shard`.
"""
