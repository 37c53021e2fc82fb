"""Data: what a sample is, in which order samples come, and how a rank reads its share of them.

order.py     the global order, a pure function of (seed, epoch, index); numpy only
datasets.py  data sets in memory: digits and synthetic ones
synthetic.py synthetic sets that are too large to be made whole
text.py      the tokens of a text file
windows.py   samples of a language model: windows of tokens
tokenizers.py  what tokens stand for
token_files.py  tokens in files that may be larger than memory
manifest.py  what stands beside prepared tokens
documents.py, prepare.py  from text, JSON lines and parquet to files of tokens
images.py    images in class folders
rows.py      rows of JSON lines, parquet and saved data sets
fetch.py     how one batch is read: here, or by worker processes
workers.py   by how many of them
feed.py      batches on their way to a device while it computes
loader.py    a rank's microbatches of each step; exact evaluation
registry.py  from a config to data sets
"""
