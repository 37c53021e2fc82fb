"""Starts runs on other machines: schedulers, clusters, lists of hosts."""
