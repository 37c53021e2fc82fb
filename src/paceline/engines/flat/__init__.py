"""Parameters as slices of flat buffers."""
