"""Is the distributed run the run of one process?"""
