"""Trains a small convolutional network on handwritten digits until the validation loss no longer falls."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))


class Stopping:
    """What the loop remembers beside model, optimizer and loader."""

    def __init__(self):
        self.epoch, self.curve, self.best, self.worse = 0, [], float("inf"), 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def make_data():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    dataset = TensorDataset(images, torch.tensor(labels))
    return random_split(dataset, [1397, 400], generator=torch.Generator().manual_seed(0))


def make_model():
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            losses = accelerator.gather_for_metrics(F.cross_entropy(model(x), y, reduction="none"))
            total += losses.sum()
            count += len(losses)
    model.train()
    return float(total / count)


def main(epochs):
    train_set, valid_set = make_data()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_loader = DataLoader(train_set, batch_size=60, shuffle=True, generator=torch.Generator().manual_seed(1))
    valid_loader = DataLoader(valid_set, batch_size=60)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(model, optimizer, train_loader, valid_loader)
    stopping = Stopping()
    accelerator.register_for_checkpointing(stopping)
    if Path("checkpoint").exists():
        accelerator.load_state("checkpoint")
    for epoch in range(stopping.epoch, epochs):
        for x, y in train_loader:
            train_step(model, optimizer, x, y)
        valid_loss = validate(model, valid_loader)
        accelerator.print(f"epoch {epoch}: validation loss {valid_loss:.4f}")
        stopping.epoch = epoch + 1
        stopping.curve.append(valid_loss)
        stopping.worse = 0 if valid_loss < stopping.best else stopping.worse + 1
        stopping.best = min(stopping.best, valid_loss)
        accelerator.save_state("checkpoint")
        if stopping.worse == 2:
            break
    return stopping.curve


if __name__ == "__main__":
    main(int(sys.argv[1]))
