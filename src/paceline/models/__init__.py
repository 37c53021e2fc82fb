"""The reference models: a perceptron, residual networks and transformers, in plain PyTorch.

[Note: initialisation] Every module that directly owns parameters or buffers has ``reset_parameters()``, which fills
all of them in place, and only leaves of the module tree draw random numbers there. Constructors call it too. So a
model that is built on the meta device and made real later, whole or unit by unit,

    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cuda")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

holds the values that a direct construction with the same seed gives, as construction and ``modules()`` visit the
leaves in one order. A tied output layer is not a second module, but a second use of the embedding's weight, because
``to_empty`` would part two modules that share a parameter.
"""
