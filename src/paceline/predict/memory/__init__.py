"""What a rank needs of memory, by category, before a run starts. No torch in here.

    facts.py         what the estimates know of a model: parameters and activations, block by block
    activations.py   those facts by formula, from the dimensions in a config
    memory.py        memory of a rank for a strategy, precision, offload and checkpointing
    parts.py         what a rank has of a model that is split: stages, shares of layers, microbatches in flight
    cutting.py       where a row of layers is cut into stages
    planned.py       the estimate as others ask for it: of a config, a plan, or the layouts of a search
    footprint.py     the same by coarser formulas, for frameworks of published runs

Models of the user's own code have no formula: ``models/measured.py`` measures them, and gives the same facts.
"""
