"""A journal on etcd, fenced by the owner of its shard."""
