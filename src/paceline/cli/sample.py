"""``paceline sample``: text from the language model of a run."""

from __future__ import annotations

import typer

from paceline.cli.options import print_json


def sample(
    run: str = typer.Argument(metavar="RUN", help="A run's folder, or a checkpoint: the newest whole one is taken."),
    prompt: str = typer.Option("\n", help="The text that the model goes on from."),
    tokens: int = typer.Option(200, min=1, help="The most tokens that are written."),
    temperature: float = typer.Option(0.8, min=0.0, help="0: the most likely token always; 1: as the model says."),
    top_k: int = typer.Option(0, min=0, help="Draw among so many of the most likely tokens.  [default: all]"),
    seed: int = typer.Option(0, min=0, help="The same seed writes the same text."),
    device: str = typer.Option("auto", help="cpu, cuda, or auto."),
    as_json: bool = typer.Option(False, "--json", help="Print prompt, text and tokens as JSON."),
) -> None:
    """Write text with the language model of a run.

    The checkpoint has all that it takes: the weights, the model's config, and the vocabulary of the text or the
    tokenizer of the Hugging Face folder.

    Examples:

      paceline sample runs/gpt-pydoc --prompt "The for statement"

      paceline sample runs/gpt-pydoc --prompt "class " --tokens 500 --temperature 0.5 --top-k 20 --seed 7
    """
    import torch

    from paceline.checkpoint import open_checkpoint
    from paceline.cli.checkpoint import find_any
    from paceline.terminal import echo
    from paceline.train.sampling import SampleOptions, open_language_model
    from paceline.train.sampling import sample as draw

    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    checkpoint = open_checkpoint(find_any(run))
    language = open_language_model(checkpoint, torch.device(chosen))
    options = SampleOptions(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    found = draw(language, prompt, options)
    text = language.tokenizer.decode(found)
    if as_json:
        print_json({"checkpoint": str(checkpoint.path), "prompt": prompt, "text": text, "tokens": found})
    else:
        echo(prompt + text)
