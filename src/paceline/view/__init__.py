"""Shows runs: a live page in the browser, and the same page as one file."""
