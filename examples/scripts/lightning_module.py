"""Lightning (needs lightning): an autoencoder with accelerator="gpu", mixed precision, validation, checkpoints."""

import argparse
import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()


class AutoEncoder(lightning.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )

    def forward(self, images):
        return self.decoder(self.encoder(images))

    def training_step(self, batch, number):
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[0]), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


if __name__ == "__main__":
    images = TensorDataset(torch.rand(512, 3, 96, 96))
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=args.epochs,
        precision="16-mixed",
        default_root_dir=tempfile.mkdtemp(),
        logger=False,
    )
    trainer.fit(AutoEncoder(), DataLoader(images, args.batch_size, shuffle=True), DataLoader(images, args.batch_size))
    print("max_memory_reserved", torch.cuda.max_memory_reserved())
