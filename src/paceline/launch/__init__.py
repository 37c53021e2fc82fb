"""Starting ranks: on this machine through torch's elastic agent, or as plain processes that run one function."""
