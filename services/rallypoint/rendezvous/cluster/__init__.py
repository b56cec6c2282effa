"""Several replicas of the rendezvous service over one etcd."""
