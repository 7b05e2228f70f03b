"""Stubs of etcd's API, generated from protos/etcd by `make proto`."""
