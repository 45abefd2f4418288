"""Slurm: srun starts the processes, and its variables say which one this is.

srun -n 2 python examples/approaches/with_slurm.py
"""

import os
import subprocess
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import BATCH, LR, Net, Prefetcher, arguments, leave, load, place, report, share, sums, updates
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def join():
    """This process's rank, how many there are, and its rank on its node; the process group is open then."""
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    if "MASTER_ADDR" not in os.environ:
        names = subprocess.check_output(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], text=True)
        os.environ["MASTER_ADDR"] = names.split()[0]
    os.environ.setdefault("MASTER_PORT", str(15000 + int(os.environ["SLURM_JOB_ID"][-4:])))
    device, backend = place(local_rank)
    dist.init_process_group(backend, world_size=size, rank=rank)
    return rank, size, local_rank, device


def train(args, rank, size, local_rank, device):
    model = Net().to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, updates(args.epochs))

    training, test = load()
    pinned = device.type == "cuda"
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=BATCH // size, sampler=sampler, drop_last=True, pin_memory=pinned)
    test_loader = DataLoader(share(test, rank, size), batch_size=128, pin_memory=pinned)

    begin = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in Prefetcher(loader, device):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()

        found = sums(model, Prefetcher(test_loader, device))
        dist.all_reduce(found)
        loss, right, count = found.tolist()
        if rank == 0:
            print(f"epoch {epoch}: test loss {loss / count:.4f}, accuracy {right / count:.2%}")
    if rank == 0:
        report(loss / count, right / count, time.perf_counter() - begin)


def main():
    args = arguments(__doc__).parse_args()
    torch.manual_seed(0)
    train(args, *join())
    leave()


if __name__ == "__main__":
    main()
