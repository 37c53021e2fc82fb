"""What a rank needs of memory, by category, before a run starts. No torch in here.

    facts.py         what the estimates know of a model, block by block; where it is cut, and what a rank has of it
    activations.py   those facts by formula, from the dimensions in a config
    memory.py        memory of a rank for a strategy, precision, offload and checkpointing
    footprint.py     the same by coarser formulas, for frameworks of published runs

Models of the user's own code have no formula: ``models/measured.py`` measures them, and gives the same facts.
"""
