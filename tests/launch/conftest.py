"""Hosts of tests; see ``pool/host_network.py``."""

from host_network import four_hosts as four_hosts
