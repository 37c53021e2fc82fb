"""The command line: one file per verb, and the only place where parts are composed and backends are chosen."""
