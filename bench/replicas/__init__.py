"""What is measured of replicas: leaders that die, disks that are new."""
