"""Trains a small network on a folder of pictures, fed by feedline.

    python train.py                          # pictures of its own, on the best device there is
    python train.py --data train/ --size 224 --batch-size 256 --device cuda:0 --checkpoint run.pt

On a GPU, pictures are decoded to bytes on the CPU, copied by feedline, and made floats on the GPU; the batches that PyTorch
gets lie there. With --checkpoint it goes on where it was interrupted: the same samples in the same order, also with another number of
workers.
"""

import argparse
import os
import tempfile
import time

import torch
from torch import nn

import demo
import feedline.torch as fl


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with a folder of pictures per class [default: a small one is made]")
    parser.add_argument("--classes", type=int, help="how many [default: the folders in it]")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop after so many batches of this run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, help="decode threads [default: one per core]")
    parser.add_argument("--device", default="auto", help="where batches and model are: auto, cpu, cuda:N")
    parser.add_argument("--gds", default="auto", help="GPUDirect Storage: auto, require, off; pictures are decoded on the CPU")
    parser.add_argument("--checkpoint", help="file to go on from, and to save to")
    return parser.parse_args()


def network(classes):
    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*block(3, 16), *block(16, 32), *block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, classes))


def loader(args, folder):
    """Batches (float [N, 3, H, W], labels), where the model will be."""
    # feedline finds a GPU that a PyTorch built for the CPU cannot use.
    device = "cpu" if args.device == "auto" and not torch.cuda.is_available() else args.device
    pictures = {"size": args.size, "dtype": "f32", "normalize": fl.IMAGENET}
    settings = {"batch_size": args.batch_size, "shuffle": args.seed, "workers": args.workers, "gds": args.gds}
    return fl.images(folder, device=device, **pictures, **settings)


class Run:
    """Model, optimiser and loader: what a checkpoint holds."""

    def __init__(self, args, folder):
        torch.manual_seed(args.seed)
        self.loader = loader(args, folder)
        self.device = torch.device(self.loader.device)
        classes = args.classes or sum(entry.is_dir() for entry in os.scandir(folder))
        self.model = network(classes).to(self.device)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.path = args.checkpoint
        if self.path and os.path.exists(self.path):
            self.load()

    def load(self):
        saved = torch.load(self.path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.loader.load_state_dict(saved["loader"])
        print(f"goes on in epoch {self.loader.next_epoch}")

    def save(self):
        if not self.path:
            return
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "loader": self.loader.state_dict(),
        }
        torch.save(state, self.path + ".new")
        os.replace(self.path + ".new", self.path)  # whole, or not at all

    def step(self, images, labels):
        logits = self.model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        return loss.detach(), (logits.argmax(1) == labels).float().mean()


def train(args, folder):
    run = Run(args, folder)
    steps = 0
    while run.loader.next_epoch < args.epochs:
        number, images, start = run.loader.next_epoch, 0, time.perf_counter()
        with run.loader.epoch(number) as epoch:
            for pictures, labels in epoch:
                loss, accuracy = run.step(pictures, labels)
                images += len(labels)
                steps += 1
                if steps == args.steps:
                    run.save()
                    return print(f"stopped in epoch {number} after {steps} steps")
        # Asking for the numbers waits for the GPU, so that the time is that of its work.
        words = f"epoch {number}: loss {loss.item():.3f}, accuracy of the last batch {accuracy.item():.2f}"
        print(f"{words} ({images / (time.perf_counter() - start):.0f} images/s)")
        run.save()
    print(run.loader.report())


def main():
    args = arguments()
    if args.data:
        return train(args, args.data)
    with tempfile.TemporaryDirectory() as folder:
        demo.write(folder)
        train(args, folder)


if __name__ == "__main__":
    main()
