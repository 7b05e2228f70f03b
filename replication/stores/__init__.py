"""Where the record of a group lies.

| module       | what |
|--------------|------|
| `store`      | what a store can do |
| `file`       | a directory, for replicas on one machine |
| `etcd`       | etcd, by stubs that `make proto` makes (`etcd_v3`) |
| `kubernetes` | Leases of Kubernetes, by `lease_api` |
"""
