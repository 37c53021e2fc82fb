"""Hosts of tests; see ``pool/host_network.py``. The marker of tests that need Ray."""

import pytest
from host_network import four_hosts as four_hosts


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ray: needs Ray, which make ray installs apart (make ray)")
