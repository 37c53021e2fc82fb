"""Trains a small convolutional network on handwritten digits until the validation loss no longer falls."""

import os
import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def make_data():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    dataset = TensorDataset(images, torch.tensor(labels))
    return random_split(dataset, [1397, 400], generator=torch.Generator().manual_seed(0))


def make_model():
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.curve = make_model(), []

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("valid_loss", loss, batch_size=len(y), sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.curve.append(float(self.trainer.callback_metrics["valid_loss"]))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["curve"] = self.curve

    def on_load_checkpoint(self, checkpoint):
        self.curve = checkpoint["curve"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(epochs):
    train_set, valid_set = make_data()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    generator = torch.Generator().manual_seed(1)
    train_loader = DataLoader(train_set, batch_size=60 // ranks, shuffle=True, generator=generator)
    valid_loader = DataLoader(valid_set, batch_size=60 // ranks)
    stopping = EarlyStopping("valid_loss", patience=2)
    saving = ModelCheckpoint("checkpoint", save_last=True)
    options = {"accelerator": "cpu", "devices": ranks, "strategy": "ddp", "gradient_clip_val": 1.0}
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[stopping, saving], **options)
    model = Digits()
    trainer.fit(model, train_loader, valid_loader, ckpt_path="last")
    return model.curve


if __name__ == "__main__":
    main(int(sys.argv[1]))
