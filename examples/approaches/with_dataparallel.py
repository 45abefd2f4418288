"""torch.nn.DataParallel: one process drives all GPUs of a machine. Without any it is the model itself.

python examples/approaches/with_dataparallel.py
"""

import time

import torch
import torch.nn.functional as F
from task import BATCH, LR, Net, Prefetcher, arguments, load, place, report, sums, updates
from torch.utils.data import DataLoader


def main():
    args = arguments(__doc__).parse_args()
    torch.manual_seed(0)
    device, _ = place(0)

    model = torch.nn.DataParallel(Net().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, updates(args.epochs))

    training, test = load()
    pinned = device.type == "cuda"
    loader = DataLoader(training, batch_size=BATCH, shuffle=True, drop_last=True, pin_memory=pinned)
    test_loader = DataLoader(test, batch_size=128, pin_memory=pinned)

    begin = time.perf_counter()
    for epoch in range(args.epochs):
        for images, labels in Prefetcher(loader, device):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()

        loss, right, count = sums(model, Prefetcher(test_loader, device)).tolist()
        print(f"epoch {epoch}: test loss {loss / count:.4f}, accuracy {right / count:.2%}")
    report(loss / count, right / count, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
