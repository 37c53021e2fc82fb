"""Starting, watching and restarting ranks."""
