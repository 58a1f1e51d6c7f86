"""Runs one function over many jobs: in this process, in several processes, or on a Ray cluster."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from guardpaint.errors import BadInput

J = TypeVar("J")
R = TypeVar("R")


def spread(work: Callable[[J], R], jobs: Sequence[J], processes: int = 1, ray: bool = False) -> Iterator[R]:
    """Yield the results in the order they finish. `work` must be importable; each process uses one thread."""
    if ray and jobs:
        yield from on_cluster(work, jobs)
    elif processes == 1 or len(jobs) < 2:
        yield from (work(j) for j in jobs)
    else:
        from concurrent.futures import ProcessPoolExecutor, as_completed
        from multiprocessing import get_context

        count = min(processes, len(jobs))
        with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=one_thread) as pool:
            try:
                for future in as_completed([pool.submit(work, j) for j in jobs]):
                    yield future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def on_cluster(work: Callable[[J], R], jobs: Sequence[J]) -> Iterator[R]:
    """Ray Data over the cluster that RAY_ADDRESS names, or over this machine; each job has a GPU if there are any."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise BadInput("--ray needs Ray: pip install 'guardpaint[ray]'") from error

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = 1 if ray.cluster_resources().get("GPU") else None
    rows = ray.data.from_items([{"job": pickle.dumps(j)} for j in jobs], override_num_blocks=len(jobs))
    for row in rows.map(partial(run_row, work=work), num_gpus=gpus).iter_rows():
        yield pickle.loads(row["result"])


def run_row(row: dict[str, Any], work: Callable[[Any], Any]) -> dict[str, Any]:
    """Run one job. Jobs and results are pickled, because the columns of a table would change their types."""
    return {"result": pickle.dumps(work(pickle.loads(row["job"])))}


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
