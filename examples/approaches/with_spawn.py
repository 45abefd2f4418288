"""torch.multiprocessing.spawn: the script starts a process a GPU itself, and they meet at an address that it names.

python examples/approaches/with_spawn.py --processes 2
"""

import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from task import BATCH, LR, Net, Prefetcher, arguments, leave, load, place, report, share, sums, updates
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(rank, size, args, device):
    model = Net().to(device)
    model = DistributedDataParallel(model, device_ids=[rank] if device.type == "cuda" else None)
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


def worker(rank, size, args):
    torch.manual_seed(0)
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    device, backend = place(rank)
    dist.init_process_group(backend, init_method=args.dist_url, world_size=size, rank=rank)
    train(rank, size, args, device)
    leave()


def main():
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456", help="where the processes meet")
    args = parser.parse_args()
    mp.spawn(worker, nprocs=args.processes, args=(args.processes, args))


if __name__ == "__main__":
    main()
