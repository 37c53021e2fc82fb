"""What is timed and scored: collectives, how runs scale, engines beside other libraries, predictions of published runs.

``paceline bench``, ``paceline profile`` and ``paceline validate`` are here. Training needs none of it; the package
imports it for these verbs alone.
"""
