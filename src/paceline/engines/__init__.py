"""The engines: one readable file each; their parts are in the folders below."""
