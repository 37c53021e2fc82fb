"""Monitoring: the records that a run leaves, the sinks they go to, and the view of a run on a console."""
