"""What is timed and scored: collectives, how runs scale, engines beside other libraries, predictions of published runs.

``paceline bench`` and ``paceline validate`` are here. No run needs any of it; the package imports it for these verbs.
"""
