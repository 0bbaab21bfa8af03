"""One text over several devices: exact context parallelism for a window and a memory."""

from .shards import ShardCache, check_shards, read_rows, shard_rows

__all__ = ["ShardCache", "check_shards", "read_rows", "shard_rows"]
