"""easymp itself: the loop of one process. Devices, shares of the data, prefetching and averages are the Accelerator's.

easymp launch --processes 2 examples/approaches/with_easymp.py
"""

import time

import torch
import torch.nn.functional as F
from task import BATCH, LR, Net, arguments, load, report, updates
from torch.utils.data import DataLoader

from easymp import Accelerator, DataLoaderConfiguration


def main():
    args = arguments(__doc__).parse_args()
    acc = Accelerator(mixed_precision="fp32", seed=0, dataloader_config=DataLoaderConfiguration(split_batches=True))

    training, test = load()
    loader = DataLoader(training, batch_size=BATCH, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, batch_size=128)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, updates(args.epochs))
    model, optimizer, scheduler, loader, test_loader = acc.prepare(model, optimizer, scheduler, loader, test_loader)

    begin = time.perf_counter()
    for epoch in acc.epochs(args.epochs):
        for images, labels in loader:
            acc.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        loss = right = count = 0
        model.eval()
        for images, labels in test_loader:
            with torch.no_grad():
                outputs, labels = acc.gather_for_metrics((model(images), labels))  # each sample once
            loss += F.cross_entropy(outputs, labels, reduction="sum").item()
            right += (outputs.argmax(1) == labels).sum().item()
            count += len(labels)
        model.train()
        acc.print(f"epoch {epoch}: test loss {loss / count:.4f}, accuracy {right / count:.2%}")
    if acc.is_main_process:
        report(loss / count, right / count, time.perf_counter() - begin)
    acc.end_training()


if __name__ == "__main__":
    main()
