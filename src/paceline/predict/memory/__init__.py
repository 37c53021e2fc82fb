"""What a run will need, before it starts: memory by category, and the cheapest strategy that fits. No torch in here.

    facts.py         what the estimates know of a model: parameters and activations, block by block
    activations.py   those facts by formula, from the dimensions in a config
    memory.py        memory of a rank for a strategy, precision, offload and checkpointing
    parts.py         what a rank has of a model that is split: stages, shares of layers, microbatches in flight
    cutting.py       where a row of layers is cut into stages
    choice.py        ``parallel.strategy: auto``: the ladder of candidates, and why one was taken
    mesh_choice.py   ``parallel.sharding_strategy: auto``: the same with pipeline and tensor parallelism among it

Models of the user's own code have no formula: ``models/measured.py`` measures them, and gives the same facts.
"""
