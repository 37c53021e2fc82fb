"""The real engines without the machines."""
